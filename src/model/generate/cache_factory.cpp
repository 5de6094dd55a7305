// cache_factory.cpp - a cache of a named kind for a model.

#include "kvcache/model/cache_factory.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/slot_cache.h"
#include "kvcache/state_cache.h"

namespace kvcache::model {
namespace {

// Cells of a growing cache at first: a short chat without a move.
constexpr int64_t kFirstCells = 512;

CacheSpec spec_for(const LanguageModel& model, const CacheOptions& options,
                   std::optional<int64_t> capacity) {
  CacheSpec spec = model.cache_spec(options.rows, capacity);
  spec.kv_format = options.kv_format;
  return spec;
}

std::unique_ptr<Cache> make_preallocated(const LanguageModel& model,
                                         const CacheOptions& options,
                                         bool marks) {
  const int64_t capacity = options.capacity.value_or(model.context_length());
  PreallocatedOptions growth;
  if (options.grow) {
    growth.growth = Growth::kDoubling;
    growth.initial = std::min(kFirstCells, capacity);
  }
  CacheSpec spec = spec_for(model, options, capacity);
  if (marks) {
    return std::make_unique<StateCache>(std::move(spec),
                                        StateOptions{.storage = growth});
  }
  return std::make_unique<PreallocatedCache>(std::move(spec), growth);
}

std::unique_ptr<Cache> make_window(const LanguageModel& model,
                                   const CacheOptions& options) {
  CacheSpec spec = spec_for(model, options,
                            options.capacity.value_or(model.context_length()));
  if (options.slots) return std::make_unique<SlotCache>(std::move(spec));
  return std::make_unique<WindowCache>(std::move(spec));
}

}  // namespace

std::string_view to_string(CacheKind kind) noexcept {
  switch (kind) {
    case CacheKind::kConcat:
      return "concat";
    case CacheKind::kPreallocated:
      return "preallocated";
    case CacheKind::kWindow:
      return "window";
    case CacheKind::kState:
      return "state";
    case CacheKind::kNone:
      break;
  }
  return "none";
}

std::optional<CacheKind> cache_kind(std::string_view name) noexcept {
  constexpr std::array kKinds = {CacheKind::kNone, CacheKind::kConcat,
                                 CacheKind::kPreallocated, CacheKind::kWindow,
                                 CacheKind::kState};
  for (const CacheKind kind : kKinds) {
    if (to_string(kind) == name) return kind;
  }
  return std::nullopt;
}

CacheKind default_cache_kind(const LanguageModel& model) {
  const CacheSpec spec = model.cache_spec(1, 1);
  const bool states = std::any_of(
      spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) {
        return std::holds_alternative<RecurrentLayer>(layer);
      });
  return states ? CacheKind::kState : CacheKind::kPreallocated;
}

std::unique_ptr<Cache> make_cache(CacheKind kind, const LanguageModel& model,
                                  const CacheOptions& options) {
  switch (kind) {
    case CacheKind::kConcat:
      return std::make_unique<ConcatCache>(
          spec_for(model, options, std::nullopt));
    case CacheKind::kPreallocated:
    case CacheKind::kState:
      return make_preallocated(model, options, kind == CacheKind::kState);
    case CacheKind::kWindow:
      return make_window(model, options);
    case CacheKind::kNone:
      break;
  }
  return nullptr;
}

}  // namespace kvcache::model
