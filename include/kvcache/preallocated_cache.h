// kvcache/preallocated_cache.h - keys and values in fixed buffers, in place.
//
// One allocation for K and one for V of all equal layers, zero-filled up front,
// so that memory is flat while generating. A step writes its tokens and nothing
// else. The kind to choose unless the length is unknown and short.
#pragma once

#include "kvcache/detail/in_place_cache.h"

namespace kvcache {

enum class Growth : uint8_t {
  kNone,     // all of the capacity at once
  kExact,    // what a step needs
  kDoubling  // at least twice as much as before
};

struct PreallocatedOptions {
  Growth growth = Growth::kNone;
  std::optional<int64_t> initial = {};  // cells at first; growing kinds only
  int64_t multiple = 1;  // allocations are a multiple of it, or the capacity
  // Of sliding-window layers; empty: they keep every token as the others do.
  std::optional<RingOptions> rings = {};
};

// Cost of a step: one copy of its own K and V. No allocation, except that a
// growing cache reallocates in begin_step() (values kept, epoch raised).
// Storage is position-major, [layers, B, allocated, H, D].
class PreallocatedCache : public InPlaceCache {
 public:
  // spec.capacity is needed, except with growth, where it is the bound.
  explicit PreallocatedCache(CacheSpec spec,
                             const PreallocatedOptions& options = {});

  // Grows to at least `tokens` cells per row; never shrinks.
  void reserve(int64_t tokens);

 protected:
  PreallocatedCache(const char* kind, CacheSpec spec,
                    const PreallocatedOptions& options);
  // Those of an empty cache with as much memory as this one.
  PreallocatedOptions options_now() const;

 private:
  void do_begin_host(StepData& step) override;
  void do_import(int64_t row, const Checkpoint& from, int64_t n) override;
  std::unique_ptr<Cache> do_make() const override;

  void grow(int64_t needed);

  PreallocatedOptions options_;
};

}  // namespace kvcache
