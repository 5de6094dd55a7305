// tensor_names.h - what Hugging Face calls a tensor that has
// GGUF's name here.

#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvcache::model {

// How a Hugging Face file stores what the canonical name stands for.
enum class Stored {
  kAsItIs,
  kTransposed,  // [in, out], as GPT-2's Conv1D does
  kChannels,    // [channels, 1, taps] of a convolution, wanted [channels, taps]
  kLogDecay,    // log(a) of the gated delta rule, wanted -a
};

// Where a tensor of a Hugging Face file belongs.
struct CanonicalName {
  std::string name;  // empty: not needed
  Stored stored = Stored::kAsItIs;
};

// The canonical name of `name` in a model of `architecture`; empty if no
// tensor of that name belongs to it.
std::optional<CanonicalName> canonical_name(std::string_view architecture,
                                            std::string_view name);

// The part of a model that `name` belongs to, if it is one that text does not
// need ("model.visual.", "mtp."); else empty.
std::string_view other_part(std::string_view architecture,
                            std::string_view name);

// The other way round, with the root that current files have.
std::string hugging_face_name(std::string_view architecture,
                              std::string_view canonical);

}  // namespace kvcache::model
