// kvcache/state_cache.h - in-place memory that marks where it can go back to.
//
// For hybrid models: K and V of any position stay, but a recurrent state is one
// of its moment, so going back takes a restore point and a replay. This kind
// makes restore points as tokens come in, and thins them out, so that the way
// back to any length is short: at most about as far again as the length lies
// behind the end. For models without states it is a PreallocatedCache.
#pragma once

#include "kvcache/preallocated_cache.h"

namespace kvcache {

struct StateOptions {
  // A restore point at the first step that ends at or behind each multiple of
  // it, in tokens; 0: only where mark() is called.
  int64_t mark_every = 256;
  // Restore points of a row, those of mark() included; each has the bytes of a
  // row's states. The newest always stays.
  int64_t most_points = 8;
  PreallocatedOptions storage = {};
};

// Cost beyond a PreallocatedCache's: a copy of the row's states per point.
class StateCache final : public PreallocatedCache {
 public:
  explicit StateCache(CacheSpec spec, const StateOptions& options = {});

 private:
  void do_committed(const StepData& step) noexcept override;
  void do_cut_in_window(int64_t row, int64_t before) noexcept override;
  std::unique_ptr<Cache> do_make() const override;
  // Tokens [before, end) came to the row.
  void mark_crossing(int64_t row, int64_t before, int64_t end) noexcept;

  StateOptions options_;
};

}  // namespace kvcache
