// kvcache/model/cache_factory.h - a cache of a named kind for a model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "kvcache/cache.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

enum class CacheKind : uint8_t {
  kNone,          // no memory: everything is recomputed
  kConcat,        // grows by concatenation
  kPreallocated,  // fixed buffers, written in place
  kWindow,        // the same with static shapes, for recorded steps
  kState          // preallocated, with restore points on the way
};

std::string_view to_string(CacheKind kind) noexcept;
// "none", "concat", "preallocated", "window", "state"; empty for anything else.
std::optional<CacheKind> cache_kind(std::string_view name) noexcept;

struct CacheOptions {
  int64_t rows = 1;
  // Most tokens of a row. Empty: the model's context. A concat cache has no
  // bound and does not look at it.
  std::optional<int64_t> capacity = {};
  // Preallocated, state: start small and double up to the capacity. Growth
  // moves addresses and keeps every value.
  bool grow = false;
  // Window: a SlotCache, all slots free.
  bool slots = false;
  // Of every kind but concat, which throws.
  KvFormat kv_format = KvFormat::kPlain;
};

// kState for a model with recurrent layers, else kPreallocated.
CacheKind default_cache_kind(const LanguageModel& model);

// An empty cache for `model`; null for CacheKind::kNone.
std::unique_ptr<Cache> make_cache(CacheKind kind, const LanguageModel& model,
                                  const CacheOptions& options = {});

}  // namespace kvcache::model
