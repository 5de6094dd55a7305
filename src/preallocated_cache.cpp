#include "kvcache/preallocated_cache.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "kv_report.h"

namespace kvcache {
namespace {

// All four numbers that make a shape, or an error that names them.
const CacheSpec& checked(const char* kind, const CacheSpec& spec,
                         const PreallocatedOptions& options) {
  const std::vector<AttentionLayer> layers = attention_layers(spec);
  int64_t heads = layers.empty() ? 1 : layers[0].heads;
  int64_t head_dim = layers.empty() ? 1 : layers[0].head_dim;
  for (const AttentionLayer& layer : layers) {
    heads = std::min(heads, layer.heads);
    head_dim = std::min(head_dim, layer.head_dim);
  }
  const bool growing = options.growth != Growth::kNone;
  const int64_t capacity = spec.capacity.value_or(growing ? 1 : 0);
  TORCH_CHECK_VALUE(
      !spec.layers.empty() && capacity >= 1 && heads >= 1 && head_dim >= 1, "[",
      kind, "::", kind,
      "] layers, capacity, kv_heads and "
      "head_dim must be >= 1 but got layers=",
      spec.layers.size(), " capacity=", capacity, " kv_heads=", heads,
      " head_dim=", head_dim, "; fix the CacheSpec.");
  TORCH_CHECK_VALUE(options.multiple >= 1, "[", kind, "::", kind,
                    "] multiple must be "
                    ">= 1 but got ",
                    options.multiple, "; 1 allocates exactly.");
  TORCH_CHECK_VALUE(
      !options.initial ||
          (growing && *options.initial >= 0 &&
           *options.initial <= spec.capacity.value_or(*options.initial)),
      "[", kind, "::", kind,
      "] initial must be in [0, capacity] "
      "of a growing cache but got ",
      options.initial.value_or(0), "; set PreallocatedOptions::growth.");
  return spec;
}

int64_t rounded(int64_t cells, int64_t multiple, int64_t capacity) {
  const int64_t over = cells % multiple;
  const int64_t more = over == 0 ? 0 : multiple - over;
  return more > capacity - cells ? capacity : cells + more;
}

InPlaceOptions in_place_options(const char* kind, const CacheSpec& spec,
                                const PreallocatedOptions& options) {
  InPlaceOptions result{.kind = kind, .rings = options.rings};
  constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
  result.cells = options.growth == Growth::kNone
                     ? *spec.capacity
                     : rounded(options.initial.value_or(0), options.multiple,
                               spec.capacity.value_or(kUnbounded));
  return result;
}

}  // namespace

PreallocatedCache::PreallocatedCache(CacheSpec spec,
                                     const PreallocatedOptions& options)
    : PreallocatedCache("PreallocatedCache", std::move(spec), options) {}

PreallocatedCache::PreallocatedCache(const char* kind, CacheSpec spec,
                                     const PreallocatedOptions& options)
    : InPlaceCache(
          spec, in_place_options(kind, checked(kind, spec, options), options)),
      options_(options) {}

void PreallocatedCache::grow(int64_t needed) {
  int64_t cells = needed;
  if (options_.growth == Growth::kDoubling) {
    cells = std::max(cells, std::min(allocated(), capacity() / 2) * 2);
  }
  resize(rounded(cells, options_.multiple, capacity()));
}

void PreallocatedCache::reserve(int64_t tokens) {
  TORCH_CHECK_VALUE(tokens >= 0 && tokens <= capacity(),
                    "[PreallocatedCache::reserve] tokens must be in [0, ",
                    capacity(), "] but got ", tokens,
                    "; raise CacheSpec::capacity.");
  check_idle("reserve");
  if (tokens > allocated()) {
    grow(tokens);
  }
}

void PreallocatedCache::do_begin_host(StepData& step) {
  if (step.longest > allocated()) {
    grow(step.longest);
  }
}

void PreallocatedCache::do_import(int64_t row, const Checkpoint& from,
                                  int64_t n) {
  if (n > allocated()) {
    grow(n);
  }
  InPlaceCache::do_import(row, from, n);
}

PreallocatedOptions PreallocatedCache::options_now() const {
  PreallocatedOptions options = options_;
  if (options.growth != Growth::kNone) {
    options.initial = allocated();
  }
  return options;
}

std::unique_ptr<Cache> PreallocatedCache::do_make() const {
  return std::make_unique<PreallocatedCache>(spec(), options_now());
}

}  // namespace kvcache
