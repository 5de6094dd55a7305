// kvcache/concat_cache.h - keys and values that grow by concatenation.
//
// Simple, exact in size, no bound, no unused memory; every step copies all
// earlier keys, so N tokens cost O(N^2) bytes. For short or unknown lengths;
// PreallocatedCache is faster from a few hundred tokens on.
#pragma once

#include "kvcache/cache.h"

namespace kvcache {

// Cost of a step: new K and V for every layer, of the length after the step.
// Addresses move with every commit, so graphs cannot be recorded over it.
class ConcatCache final : public Cache {
 public:
  // spec.capacity empty: rows grow without bound.
  explicit ConcatCache(CacheSpec spec);
  std::string describe() const override;

 private:
  void do_reserve(StepData& step, int64_t index) override;
  void do_commit(StepData& step) noexcept override;
  void do_abandon(StepData& step) noexcept override;
  void do_shrunk() override;
  KvTensors do_row(int64_t row, int64_t index) const override;
  const char* do_cannot_record() const noexcept override;
  void do_import(int64_t row, const Checkpoint& from, int64_t n) override;
  void do_reorder(std::span<const int64_t> rows) override;
  std::unique_ptr<Cache> do_make() const override;
  void do_memory(MemoryReport& report) const override;
  void do_validate(std::vector<std::string>& broken) const override;

  // Memory for `length` cells with what rows `rows` hold now copied in.
  KvTensors grown(size_t index, std::span<const int64_t> rows,
                  int64_t length) const;

  void release();  // what no row has tokens in

  std::vector<AttentionLayer> layers_;
  std::vector<KvTensors> committed_;  // [B, H, S, D]; undefined: no tokens
  std::vector<KvTensors> pending_;    // the same, with the open step's tokens
};

}  // namespace kvcache
