// kvcache/checkpoint_policy.h - where in a text to make checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvcache {

enum class PlacementRule : uint8_t {
  // Multiples of `stride`, `tail` before the end, and the end: what a state
  // that grows at its end or changes in its middle needs.
  kChunkEnds,
  // The end, marks, the divergence point, and a ladder whose rungs lie
  // `stride`, `stride` * `ladder`, `stride` * `ladder`^2, ... before the end.
  kGeneration
};

// Counts in tokens; 0 switches a rule off.
struct PlacementOptions {
  PlacementRule rule = PlacementRule::kChunkEnds;
  int64_t stride = 2048;     // of kGeneration too: the first rung
  int64_t tail = 16;         // of kChunkEnds
  int64_t align = 64;        // checkpoints are at multiples of it
  int64_t max_chunk = 2048;  // of kChunkEnds: longer gaps are cut
  int64_t min_prefix = 256;  // texts that are shorter, aligned, get none
  double ladder = 2;         // of kGeneration; 1: a rung at every stride
  bool marks = true;         // of kGeneration: use the caller's
  bool divergence = true;    // of kGeneration: use the store's
  // Of one text: at most budget / point_bytes checkpoints, but always one. 0:
  // no budget.
  size_t budget = 0;
  size_t point_bytes = 0;  // of the states at one position
};

class PlacementPolicy {
 public:
  // Throws for options that contradict themselves: negative ones, a stride that
  // is no multiple of align, a ladder in (0, 1), a budget without point_bytes.
  explicit PlacementPolicy(const PlacementOptions& options);

  // Where a text of `length` tokens that continues from a checkpoint at `from`
  // is to be checkpointed: ascending, in (from, length]. The prefill is cut
  // there too. Over budget the end stays longest, then the divergence point,
  // then marks from the last on, then the others from the last on.
  // `marks`: ends that the caller knows (system prompt, turns), in any order;
  // `divergence`: LookupReport::divergence.
  std::vector<int64_t> positions(int64_t from, int64_t length,
                                 std::span<const int64_t> marks = {},
                                 std::optional<int64_t> divergence = {}) const;

  int64_t align_down(int64_t position) const noexcept;
  const PlacementOptions& options() const noexcept { return options_; }

 private:
  std::vector<int64_t> chunk_ends(int64_t from, int64_t length) const;
  std::vector<int64_t> wanted(int64_t length, std::span<const int64_t> marks,
                              std::optional<int64_t> divergence) const;

  PlacementOptions options_;
};

}  // namespace kvcache
