// kvcache/window_cache.h - in-place memory whose steps have static shapes.
//
// A step attends over a window: the smallest bucket that holds the longest row.
// Shapes, and with them a recorded graph, depend on the window only; where
// tokens go and what they see are numbers on the device. Left padding is the
// live range of a step: pads are not stored, so a padded row equals the row
// alone bit for bit.
#pragma once

#include "kvcache/detail/in_place_cache.h"

namespace kvcache {

// 128 and its doublings below `capacity`, then `capacity`.
std::vector<int64_t> default_buckets(int64_t capacity, int64_t first = 128);

enum class Windows : uint8_t {
  kBuckets,  // one graph for each bucket; for attention that slices by windows
  kOne       // one graph for all lengths; for attention that reads lengths
};

struct WindowOptions {
  // kOne stores [layers, B, capacity + 1, H, D], which packed attention kernels
  // want, and has the capacity as its one bucket. attention_reads_lengths()
  // says where it pays. Bit-identical on the CPU.
  Windows windows = Windows::kBuckets;
  // Of kBuckets: windows, in any order; those above the capacity are cut to it,
  // and one must reach it. Empty: default_buckets().
  std::vector<int64_t> buckets = {};
  // Of sliding-window layers; empty: they keep every token as the others do.
  std::optional<RingOptions> rings = {};
};

// Cost of a step: one copy of its own K and V, no allocation. Storage is
// head-major with one spare cell per row, [layers, B, H, capacity + 1, D]; dead
// tokens may be written to the spare one, which nobody reads.
class WindowCache : public InPlaceCache {
 public:
  // spec.capacity is needed.
  explicit WindowCache(CacheSpec spec, const WindowOptions& options = {});

  std::span<const int64_t> buckets() const noexcept { return buckets_; }
  // The smallest window of at least `keys` keys; throws beyond the capacity.
  int64_t bucket(int64_t keys) const;

 protected:
  WindowCache(const char* kind, CacheSpec spec, const WindowOptions& options);
  const WindowOptions& options() const noexcept { return options_; }
  std::unique_ptr<Cache> do_make() const override;

 private:
  int64_t do_window(int64_t longest) const override;
  const char* do_cannot_record() const noexcept override { return nullptr; }

  WindowOptions options_;
  std::vector<int64_t> buckets_;  // ascending; the last is the capacity
};

}  // namespace kvcache
