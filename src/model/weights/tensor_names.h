// tensor_names.h - what Hugging Face calls a tensor that has
// GGUF's name here.

#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvcache::model {

// Where a tensor of a Hugging Face file belongs.
struct CanonicalName {
  std::string name;         // empty: a buffer without weights, not needed
  bool transposed = false;  // stored [in, out], as GPT-2's Conv1D does
};

// The canonical name of `name` in a model of `architecture`; empty if no
// tensor of that name belongs to it.
std::optional<CanonicalName> canonical_name(std::string_view architecture,
                                            std::string_view name);

// The other way round, with the root that current files have.
std::string hugging_face_name(std::string_view architecture,
                              std::string_view canonical);

}  // namespace kvcache::model
