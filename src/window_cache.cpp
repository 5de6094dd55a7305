#include "kvcache/window_cache.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace kvcache {
namespace {

InPlaceOptions in_place_options(const char* kind, const CacheSpec& spec,
                                const WindowOptions& options) {
  TORCH_CHECK_VALUE(spec.capacity && *spec.capacity >= 1, "[", kind, "::", kind,
                    "] capacity must be given and >= 1 but got ",
                    spec.capacity.value_or(0),
                    "; static shapes need CacheSpec::capacity.");
  TORCH_CHECK_VALUE(*spec.capacity < std::numeric_limits<int64_t>::max(), "[",
                    kind, "::", kind,
                    "] capacity must be below 2^63 - 1 but "
                    "is it; no memory holds so many cells.");
  return {.kind = kind,
          .cells = *spec.capacity,
          .head_major = options.windows == Windows::kBuckets,
          .spare = true,
          .rings = options.rings};
}

std::vector<int64_t> checked_buckets(const char* kind, int64_t capacity,
                                     std::vector<int64_t> wanted) {
  if (wanted.empty()) {
    return default_buckets(capacity);
  }
  for (int64_t& bucket : wanted) {
    TORCH_CHECK_VALUE(bucket >= 1, "[", kind, "::", kind,
                      "] a bucket must be >= 1 but got ", bucket,
                      "; it is a number of keys.");
    bucket = std::min(bucket, capacity);
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  TORCH_CHECK_VALUE(wanted.back() == capacity, "[", kind, "::", kind,
                    "] the largest bucket must reach the capacity ", capacity,
                    " but is ", wanted.back(),
                    "; add one, or lower CacheSpec::capacity.");
  return wanted;
}

}  // namespace

std::vector<int64_t> default_buckets(int64_t capacity, int64_t first) {
  TORCH_CHECK_VALUE(capacity >= 1 && first >= 1,
                    "[kvcache::default_buckets] capacity and first must be >= "
                    "1 but got ",
                    capacity, " and ", first, ".");
  std::vector<int64_t> buckets;
  for (int64_t bucket = first; bucket < capacity; bucket *= 2) {
    buckets.push_back(bucket);
    if (bucket > capacity / 2) {
      break;  // its double is no number below the capacity
    }
  }
  buckets.push_back(capacity);
  return buckets;
}

WindowCache::WindowCache(CacheSpec spec, const WindowOptions& options)
    : WindowCache("WindowCache", std::move(spec), options) {}

WindowCache::WindowCache(const char* kind, CacheSpec spec,
                         const WindowOptions& options)
    : InPlaceCache(spec, in_place_options(kind, spec, options)),
      options_(options),
      buckets_(options.windows == Windows::kOne
                   ? std::vector<int64_t>{*spec.capacity}
                   : checked_buckets(kind, *spec.capacity, options.buckets)) {}

int64_t WindowCache::bucket(int64_t keys) const {
  TORCH_CHECK_VALUE(keys <= buckets_.back(),
                    "[WindowCache::bucket] keys must be <= ", buckets_.back(),
                    ", the capacity, but got ", keys,
                    "; raise CacheSpec::capacity.");
  return *std::lower_bound(buckets_.begin(), buckets_.end(), keys);
}

int64_t WindowCache::do_window(int64_t longest) const {
  return bucket(longest);
}

std::unique_ptr<Cache> WindowCache::do_make() const {
  return std::make_unique<WindowCache>(spec(), options_);
}

}  // namespace kvcache
