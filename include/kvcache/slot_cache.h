// kvcache/slot_cache.h - one row per slot, which requests enter and leave.
//
// The rows are always all there, so that a step over them has one shape: a free
// slot takes part in it as a row without live tokens, and disturbs nobody.
#pragma once

#include "kvcache/window_cache.h"

namespace kvcache {

// A step without StepSpec::count is one of the taken slots: free ones get 0.
class SlotCache final : public WindowCache {
 public:
  // spec.rows slots, all free.
  explicit SlotCache(CacheSpec spec, const WindowOptions& options = {});

  // The lowest free slot, now taken and empty as a fresh one; empty: none left.
  std::optional<int64_t> acquire();
  // The same with the tokens of a checkpoint in it, of any cache kind. Throws,
  // with the slot still free, where restore() would.
  std::optional<int64_t> admit(const Checkpoint& from);
  // Forgets the slot's tokens; what it held is never read again.
  void release(int64_t slot);

  bool taken(int64_t slot) const;
  int64_t free_slots() const noexcept;

 private:
  void do_default_count(const StepSpec& spec,
                        std::vector<int64_t>& count) const override;
  void do_reorder(std::span<const int64_t> rows) override;
  std::unique_ptr<Cache> do_make() const override;

  std::vector<bool> taken_;  // [rows]
};

}  // namespace kvcache
