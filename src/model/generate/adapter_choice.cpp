// adapter_choice.cpp - the adapter that a text runs with.
#include "adapter_choice.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace kvcache::model {
namespace {

std::string known_names(const LanguageModel& model) {
  std::string names;
  for (const AdapterInfo& adapter : model.adapters()) {
    names += (names.empty() ? "" : ", ") + adapter.name;
  }
  return names.empty() ? "none" : names;
}

}  // namespace

std::optional<int64_t> AdapterChoice::shared_with(
    const AdapterChoice& other) const {
  if (index == other.index && (index < 0 || from == other.from)) return {};
  if (index < 0) return other.from;
  return other.index < 0 ? from : std::min(from, other.from);
}

AdapterChoice choose_adapter(const char* function, const LanguageModel& model,
                             const std::string& name, int64_t from) {
  TORCH_CHECK_VALUE(from >= 0, "[", function,
                    "] adapter_from must be at least 0 but got ", from, ".");
  if (name.empty()) return {};
  const auto adapters = model.adapters();
  const auto found = std::find_if(
      adapters.begin(), adapters.end(),
      [&](const AdapterInfo& adapter) { return adapter.name == name; });
  TORCH_CHECK_VALUE(found != adapters.end(), "[", function,
                    "] the adapter must be one of the model's (",
                    known_names(model), ") but got ", name,
                    "; load it, or choose another.");
  return {found - adapters.begin(), from};
}

ForwardOptions with_adapter(ForwardOptions options,
                            const AdapterChoice& choice) {
  if (choice.index < 0) return options;
  options.adapters = at::full({1}, choice.index, at::kLong);
  options.adapters_from = at::full({1}, choice.from, at::kLong);
  return options;
}

Namespace with_adapter(Namespace space, const LanguageModel& model,
                       const AdapterChoice& choice) {
  if (choice.index < 0) return space;
  space.adapter = model.adapters()[static_cast<size_t>(choice.index)].digest;
  space.active_from = choice.from;
  return space;
}

}  // namespace kvcache::model
