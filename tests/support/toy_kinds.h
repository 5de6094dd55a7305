// support/toy_kinds.h - the kinds of cache that the contract suite runs on. A
// new kind adds an entry to kinds().
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"

namespace kvcache::toy {

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Cache>(CacheSpec)> make;
  bool in_place = false;  // tokens are written into memory that stays
  bool growing = false;   // that memory may be replaced by a larger one
};

inline PreallocatedCache* preallocated(Cache& cache) {
  return dynamic_cast<PreallocatedCache*>(&cache);
}

inline std::unique_ptr<Cache> make_preallocated(
    CacheSpec spec, const PreallocatedOptions& options) {
  return std::make_unique<PreallocatedCache>(std::move(spec), options);
}

inline const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {.name = "Concat",
       .make =
           [](CacheSpec spec) {
             return std::make_unique<ConcatCache>(std::move(spec));
           }},
      {.name = "Preallocated",
       .make =
           [](CacheSpec spec) {
             return make_preallocated(std::move(spec), {});
           },
       .in_place = true},
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
  };
  return all;
}

// Fills every cell that holds no live token with NaN. Kinds without memory to
// spare have none; their fresh memory is NaN by TestAllocator.
inline void poison(Cache& cache) {
  PreallocatedCache* in_place = preallocated(cache);
  if (in_place == nullptr) {
    return;
  }
  at::NoGradGuard no_grad;
  for (const KvTensors& group : in_place->storage()) {
    for (int64_t row = 0; row < cache.spec().rows; ++row) {
      const int64_t length = cache.lengths()[static_cast<size_t>(row)];
      for (const Tensor& t : {group.k, group.v}) {
        t.select(1, row)
            .narrow(1, length, in_place->allocated() - length)
            .fill_(std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
}

// The addresses of K and V that a recorded graph may hold.
inline std::vector<const void*> addresses(Cache& cache) {
  std::vector<const void*> found;
  if (PreallocatedCache* in_place = preallocated(cache)) {
    for (const KvTensors& group : in_place->storage()) {
      found.push_back(group.k.const_data_ptr());
      found.push_back(group.v.const_data_ptr());
    }
  }
  return found;
}

}  // namespace kvcache::toy
