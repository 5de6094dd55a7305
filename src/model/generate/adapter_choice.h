// adapter_choice.h - the adapter that a text runs with.
#pragma once

#include <optional>
#include <string>

#include "kvcache/model/language_model.h"
#include "kvcache/reuse_report.h"

namespace kvcache::model {

struct AdapterChoice {
  int64_t index = -1;  // in LanguageModel::adapters(); -1: none
  int64_t from = 0;    // first position that it changes
  // Tokens that two texts may share if they begin alike; empty: all of them.
  std::optional<int64_t> shared_with(const AdapterChoice& other) const;
};

// The adapter of that name from position `from` on; none if it is empty.
// Throws, naming `function` and the adapters there are.
AdapterChoice choose_adapter(const char* function, const LanguageModel& model,
                             const std::string& name, int64_t from);

// `options` of a forward over one row that runs with `choice`.
ForwardOptions with_adapter(ForwardOptions options,
                            const AdapterChoice& choice);

// `space` of texts that run with `choice`: set apart by what the adapter is,
// whatever it is called.
Namespace with_adapter(Namespace space, const LanguageModel& model,
                       const AdapterChoice& choice);

}  // namespace kvcache::model
