#include "kvcache/state_cache.h"

#include <c10/util/Exception.h>

#include <utility>

namespace kvcache {
namespace {

const StateOptions& checked(const StateOptions& options) {
  TORCH_CHECK_VALUE(
      options.mark_every >= 0 && options.most_points >= 1,
      "[StateCache::StateCache] mark_every must be >= 0 and most_points >= 1 "
      "but got ",
      options.mark_every, " and ", options.most_points,
      "; mark_every 0 leaves marking to mark().");
  return options;
}

}  // namespace

StateCache::StateCache(CacheSpec spec, const StateOptions& options)
    : PreallocatedCache("StateCache", std::move(spec),
                        checked(options).storage),
      options_(options) {}

void StateCache::mark_crossing(int64_t row, int64_t before,
                               int64_t end) noexcept {
  const int64_t every = options_.mark_every;
  if (every > 0 && end / every > before / every) {
    mark_and_thin(row, static_cast<size_t>(options_.most_points));
  }
}

void StateCache::do_committed(const StepData& step) noexcept {
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t before = step.start[row];
    mark_crossing(step.first_row + row, before, before + step.count[row]);
  }
}

// The point at the end of the drafts went with those that were wrong.
void StateCache::do_cut_in_window(int64_t row, int64_t before) noexcept {
  mark_crossing(row, before, lengths()[static_cast<size_t>(row)]);
}

std::unique_ptr<Cache> StateCache::do_make() const {
  StateOptions options = options_;
  options.storage = options_now();
  return std::make_unique<StateCache>(spec(), options);
}

}  // namespace kvcache
