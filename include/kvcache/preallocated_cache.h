// kvcache/preallocated_cache.h - keys and values in fixed buffers, in place.
//
// One allocation for K and one for V of all equal layers, zero-filled up front,
// so that memory is flat while generating. A step writes its tokens and nothing
// else. The kind to choose unless the length is unknown and short.
#pragma once

#include "kvcache/cache.h"

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
};

// Cost of a step: one copy of its own K and V. No allocation, except that a
// growing cache reallocates in begin_step() (values kept, epoch raised).
class PreallocatedCache final : public Cache {
 public:
  // spec.capacity is needed, except with growth, where it is the bound.
  explicit PreallocatedCache(CacheSpec spec,
                             const PreallocatedOptions& options = {});

  int64_t allocated() const noexcept { return allocated_; }  // cells per row
  // Grows to at least `tokens` cells per row; never shrinks.
  void reserve(int64_t tokens);

  size_t bytes() const;  // of K and V, allocated
  double mib() const;
  size_t bytes_per_token() const;  // one more token of one row, all layers
  std::string describe() const override;
  // K and V of each group of equal layers, [layers, B, allocated, H, D].
  std::span<const KvTensors> storage() const noexcept { return groups_; }

 private:
  void do_begin_host(StepData& step) override;
  void do_begin_device(StepData& step) override;
  KvTensors do_export(int64_t row, int64_t index) const override;
  void do_import(int64_t row, const Checkpoint& from, int64_t n) override;
  void do_reorder(std::span<const int64_t> rows) override;
  std::unique_ptr<Cache> do_make() const override;
  void do_memory(MemoryReport& report) const override;
  void do_validate(std::vector<std::string>& broken) const override;

  std::vector<KvTensors> allocate(int64_t rows, int64_t cells) const;
  void adopt(std::vector<KvTensors> groups, int64_t cells);
  void grow(int64_t needed);
  int64_t rounded(int64_t cells) const;

  struct Place {
    size_t group = 0;
    int64_t layer = 0;  // within the group
  };
  PreallocatedOptions options_;
  std::vector<AttentionLayer> layers_;  // per attention layer
  std::vector<Place> places_;           // per attention layer
  std::vector<KvTensors> groups_;       // [layers, B, allocated, H, D]
  std::vector<KvTensors> views_;        // per layer [B, H, allocated, D]
  int64_t allocated_ = 0;
};

}  // namespace kvcache
