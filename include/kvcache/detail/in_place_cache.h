// kvcache/detail/in_place_cache.h - keys and values in fixed buffers.
//
// What PreallocatedCache, WindowCache and SlotCache share: the buffers, rings
// for sliding-window layers, and the verbs over them. A kind chooses among
// InPlaceOptions and adds its own policy.
#pragma once

#include "kvcache/cache.h"
#include "kvcache/detail/step_data.h"

namespace kvcache {

// Sliding-window layers keep only what a later query can see, and the sinks:
// sliding - 1 + max_step + rollback cells instead of the capacity.
// Bit-identical to full storage. Set CacheSpec::max_step: its default is the
// capacity, which leaves nothing to save.
struct RingOptions {
  // Tokens that truncate() can take back without replay, counted from the
  // longest that the row has been since it was empty.
  int64_t rollback = 0;
};

struct InPlaceOptions {
  const char* kind = "InPlaceCache";  // for people
  int64_t cells = 0;                  // per row, at first
  bool head_major = false;  // [.., H, cells, D]; else [.., cells, H, D]
  bool spare = false;       // one more cell per row, for dead tokens
  std::optional<RingOptions> rings = {};
};

class InPlaceCache : public Cache {
 public:
  // Cells per row of a layer without a ring, the spare one not counted.
  int64_t allocated() const noexcept { return cells_; }
  size_t bytes() const;  // of K and V, allocated
  double mib() const;
  size_t bytes_per_token() const;  // one more token of one row, all layers
  std::string describe() const override;
  // K and V of each group of layers with equal shapes: [layers, B, cells, H, D]
  // or, head-major, [layers, B, H, cells, D]. KvFormat::kInt8: R for D, as in a
  // KvBlock.
  std::span<const KvTensors> storage() const noexcept { return groups_; }
  // The cells of an attention layer, counted from 0: [B, H, cells, D].
  const KvTensors& cells(int64_t index) const;
  // Cells that its positions take in turn behind the sinks; 0: no ring.
  int64_t ring(int64_t index) const;
  // Live tokens that one step may have in a row, for rings; else no bound.
  int64_t most_step() const noexcept { return most_live(); }

 protected:
  InPlaceCache(CacheSpec spec, const InPlaceOptions& options);
  // Other memory with the same values; raises the epoch. Rings stay.
  void resize(int64_t cells);

  void do_shape(StepData& step) override;
  KvTensors do_row(int64_t row, int64_t index) const override;
  void do_import(int64_t row, const Checkpoint& from, int64_t n) override;
  void do_reorder(std::span<const int64_t> rows) override;
  void do_memory(MemoryReport& report) const override;
  void do_validate(std::vector<std::string>& broken) const override;

 private:
  struct Place {
    size_t group = 0;
    int64_t layer = 0;  // within the group
  };
  struct Group {
    int64_t layers = 0, heads = 0, head_dim = 0, ring_cells = 0;  // 0: no ring
  };
  void plan_groups();
  int64_t cells_of(const Group& group, int64_t cells) const;
  std::vector<KvTensors> allocate(int64_t rows, int64_t cells) const;
  void adopt(std::vector<KvTensors> groups, int64_t cells);
  Tensor live_part(const Tensor& group, int64_t cells) const;

  InPlaceOptions options_;
  std::vector<AttentionLayer> layers_;  // per attention layer
  std::vector<CellLayout> layouts_;     // per attention layer
  std::vector<Group> plan_;
  std::vector<Place> places_;      // per attention layer
  std::vector<KvTensors> groups_;  // as storage()
  std::vector<KvTensors> views_;   // per attention layer [B, H, cells, D]
  int64_t cells_ = 0;
};

}  // namespace kvcache
