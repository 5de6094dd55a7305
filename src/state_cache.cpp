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

void StateCache::do_committed(const StepData& step) noexcept {
  const int64_t every = options_.mark_every;
  for (int64_t row = 0; every > 0 && row < step.rows; ++row) {
    const int64_t before = step.start[row];
    if ((before + step.count[row]) / every > before / every) {
      mark_and_thin(step.first_row + row,
                    static_cast<size_t>(options_.most_points));
    }
  }
}

std::unique_ptr<Cache> StateCache::do_make() const {
  StateOptions options = options_;
  options.storage = options_now();
  return std::make_unique<StateCache>(spec(), options);
}

}  // namespace kvcache
