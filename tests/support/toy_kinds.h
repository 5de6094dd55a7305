// support/toy_kinds.h - the kinds of cache that the contract suite runs on. A
// new kind adds an entry to plain_kinds().
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/slot_cache.h"
#include "kvcache/state_cache.h"
#include "kvcache/window_cache.h"
#include "src/step_numbers.h"

namespace kvcache::toy {

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Cache>(CacheSpec)> make;
  bool in_place = false;    // tokens are written into memory that stays
  bool growing = false;     // that memory may be replaced by a larger one
  bool fixed_rows = false;  // reorder() to another row count is refused
  bool by_ops = false;      // as on another device: ATen ops, which allocate
  unsigned seeds = 8;       // of a fuzz; more where storage differs
  int64_t spare = 0;        // cells of a row beside the capacity
  bool one_window = false;  // the capacity, always
  KvFormat format = KvFormat::kPlain;
  std::vector<int64_t> buckets = {};  // below the capacity; static windows only

  // Bytes of K, or of V, of a token and head, its scale not counted.
  size_t head_bytes(int64_t head_dim, at::ScalarType dtype) const {
    return format == KvFormat::kInt8
               ? static_cast<size_t>((head_dim + 3) / 4 * 4)
               : static_cast<size_t>(head_dim) * c10::elementSize(dtype);
  }

  // What attention reads over so many keys.
  int64_t window(int64_t keys, int64_t capacity) const {
    for (const int64_t bucket : buckets) {
      if (keys <= bucket) {
        return bucket;
      }
    }
    return buckets.empty() && !one_window ? keys : capacity + spare;
  }
};

inline PreallocatedCache* preallocated(Cache& cache) {
  return dynamic_cast<PreallocatedCache*>(&cache);
}

inline std::unique_ptr<Cache> make_preallocated(
    CacheSpec spec, const PreallocatedOptions& options) {
  return std::make_unique<PreallocatedCache>(std::move(spec), options);
}

inline std::unique_ptr<Cache> make_slots(CacheSpec spec) {
  const int64_t capacity = *spec.capacity;
  auto slots = std::make_unique<SlotCache>(
      std::move(spec), WindowOptions{.buckets = {4, capacity}});
  while (slots->acquire()) {
  }
  return slots;
}

// Buckets that the small lengths of these tests cross.
inline std::unique_ptr<Cache> make_window(
    CacheSpec spec, std::optional<RingOptions> rings = {}) {
  return std::make_unique<WindowCache>(
      spec, WindowOptions{.buckets = {3, 8, *spec.capacity}, .rings = rings});
}

// The kind `of` with its K and V in codes.
inline Kind in_int8(Kind of) {
  of.name += "Int8";
  of.format = KvFormat::kInt8;
  of.make = [make = of.make](CacheSpec spec) {
    spec.kv_format = KvFormat::kInt8;
    return make(std::move(spec));
  };
  return of;
}

inline std::vector<Kind> plain_kinds() {
  return {
      {.name = "Concat",
       .make =
           [](CacheSpec spec) {
             return std::make_unique<ConcatCache>(std::move(spec));
           },
       .seeds = 40},
      {.name = "Preallocated",
       .make =
           [](CacheSpec spec) {
             return make_preallocated(std::move(spec), {});
           },
       .in_place = true,
       .seeds = 40},
      {.name = "GrowingExact",
       .make =
           [](CacheSpec spec) {
             return make_preallocated(
                 std::move(spec), {.growth = Growth::kExact, .multiple = 4});
           },
       .in_place = true,
       .growing = true},
      {.name = "GrowingDoubling",
       .make =
           [](CacheSpec spec) {
             return make_preallocated(
                 std::move(spec), {.growth = Growth::kDoubling, .initial = 2});
           },
       .in_place = true,
       .growing = true},
      {.name = "State",  // it marks by itself only beyond these lengths
       .make =
           [](CacheSpec spec) {
             return std::make_unique<StateCache>(std::move(spec));
           },
       .in_place = true},
      {.name = "Window",
       .make = [](CacheSpec spec) { return make_window(std::move(spec)); },
       .in_place = true,
       .seeds = 40,
       .spare = 1,
       .buckets = {3, 8}},
      {.name = "OneWindow",
       .make =
           [](CacheSpec spec) {
             return std::make_unique<WindowCache>(
                 std::move(spec), WindowOptions{.windows = Windows::kOne});
           },
       .in_place = true,
       .spare = 1,
       .one_window = true},
      {.name = "Slots",
       .make = [](CacheSpec spec) { return make_slots(std::move(spec)); },
       .in_place = true,
       .fixed_rows = true,
       .spare = 1,
       .buckets = {4}},
      {.name = "WindowByOps",
       .make =
           [](CacheSpec spec) {
             const ForcedOps ops;
             return make_window(std::move(spec));
           },
       .in_place = true,
       .by_ops = true,
       .spare = 1,
       .buckets = {3, 8}},
      {.name = "PreallocatedByOps",
       .make =
           [](CacheSpec spec) {
             const ForcedOps ops;
             return make_preallocated(std::move(spec), {});
           },
       .in_place = true,
       .by_ops = true},
  };
}

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = [] {
    std::vector<Kind> made = plain_kinds();
    for (const Kind& kind : plain_kinds()) {
      if (kind.name == "Preallocated" || kind.name == "GrowingExact" ||
          kind.name == "State" || kind.name == "Window" ||
          kind.name == "Slots") {
        made.push_back(in_int8(kind));
      }
    }
    return made;
  }();
  return all;
}

// Fills every cell that holds no live token with NaN. Kinds without memory to
// spare have none; their fresh memory is NaN by TestAllocator.
inline void poison(Cache& cache) {
  auto* in_place = dynamic_cast<InPlaceCache*>(&cache);
  if (in_place == nullptr) {
    return;
  }
  at::NoGradGuard no_grad;
  int64_t index = 0;
  for (const LayerSpec& layer : cache.spec().layers) {
    if (!std::holds_alternative<AttentionLayer>(layer)) {
      continue;
    }
    const KvTensors& cells = in_place->cells(index);
    const bool ring = in_place->ring(index++) > 0;
    for (int64_t row = 0; row < cache.spec().rows; ++row) {
      const int64_t length = cache.lengths()[static_cast<size_t>(row)];
      for (const Tensor& t : {cells.k, cells.v}) {
        // Of a ring that has tokens only the spare cell is known to be free.
        const int64_t first = ring && length > 0 ? t.size(2) - 1 : length;
        const Tensor dead =
            t.select(0, row).narrow(1, first, t.size(2) - first);
        if (t.scalar_type() == at::kChar) {
          dead.fill_(-1);  // four bytes of it are a NaN
        } else {
          dead.fill_(std::numeric_limits<double>::quiet_NaN());
        }
      }
    }
  }
}

// The addresses of K and V that a recorded graph may hold.
inline std::vector<const void*> addresses(Cache& cache) {
  std::vector<const void*> found;
  if (auto* in_place = dynamic_cast<InPlaceCache*>(&cache)) {
    for (const KvTensors& group : in_place->storage()) {
      found.push_back(group.k.const_data_ptr());
      found.push_back(group.v.const_data_ptr());
    }
  }
  return found;
}

}  // namespace kvcache::toy
