#include "kvcache/speculation.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

namespace kvcache {

Speculation::Speculation(Cache& cache, int64_t row,
                         const SpeculationOptions& options)
    : cache_(cache), row_(row), options_(options) {
  const std::vector<int64_t> before = cache.restore_points(row);
  start_ = cache.lengths()[static_cast<size_t>(row)];
  cache.mark(row);
  marked_ = cache.restore_points(row).size() > before.size();
}

Speculation::~Speculation() {
  if (!open_) return;
  try {
    cut(start_);
  } catch (const std::exception&) {
    // A step is open: whoever abandons it has the drafts before it.
  }
}

// In double, since sizes multiply: exact far beyond any bound.
bool Speculation::window(int64_t tokens) const noexcept {
  const CacheSpec& spec = cache_.spec();
  const auto conv_bytes = static_cast<double>(
      c10::elementSize(spec.conv_dtype.value_or(spec.dtype)));
  double bytes = 0;
  for (const LayerSpec& layer : spec.layers) {
    const auto* of = std::get_if<RecurrentLayer>(&layer);
    if (of == nullptr) continue;
    if (of->conv_taps > 0) {
      bytes += conv_bytes * static_cast<double>(of->conv_channels) *
               static_cast<double>(of->conv_taps + tokens);
    }
    double state = of->state_shape.empty() ? 0 : sizeof(float);
    for (const int64_t size : of->state_shape) {
      state *= static_cast<double>(size);
    }
    bytes += state * static_cast<double>(tokens);
  }
  return bytes > 0 && bytes <= static_cast<double>(options_.window_bytes);
}

int64_t Speculation::cut(int64_t length) {
  std::vector<int64_t> targets(cache_.lengths().begin(),
                               cache_.lengths().end());
  targets[static_cast<size_t>(row_)] = length;
  const Truncation result = cache_.truncate(targets);
  if (marked_) cache_.unmark(row_, start_);
  open_ = false;
  return result.replay[static_cast<size_t>(row_)];
}

int64_t Speculation::accept(int64_t tokens) {
  const int64_t came = cache_.lengths()[static_cast<size_t>(row_)] - start_;
  TORCH_CHECK_VALUE(open_,
                    "[Speculation::accept] drafts are accepted once; "
                    "begin another Speculation.");
  TORCH_CHECK_VALUE(tokens >= 0 && tokens <= came,
                    "[Speculation::accept] between 0 and ", came,
                    " tokens came since it began but got ", tokens,
                    "; commit the step of the drafts first.");
  return cut(start_ + tokens);
}

}  // namespace kvcache
