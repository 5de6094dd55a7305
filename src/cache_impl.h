// What Cache keeps: lengths, states, restore points, the open step.
#pragma once

#include <limits>

#include "kvcache/cache.h"
#include "kvcache/detail/step_data.h"
#include "row_states.h"
#include "state_windows.h"
#include "step_numbers.h"

namespace kvcache {

struct Cache::Impl {
  Impl(CacheSpec given, bool may_swap);

  // Throws if a step is open: `verb` is a between-step call.
  void check_idle(const char* verb) const;
  // Throws until the lengths after a replay are known.
  void check_read_back(const char* verb) const;
  void check_row(const char* verb, int64_t row) const;
  // Local layer number of the model's `layer`; throws unless it is there.
  // `where` is the function for the message, "Step::update".
  size_t local(const char* where, int64_t layer) const;
  const AttentionLayer& attention(const char* where, int64_t layer) const;
  const RecurrentLayer& recurrent(const char* where, int64_t layer) const;

  // Where a row can be cut at or below `target`.
  struct Cut {
    int64_t length = 0;
    std::shared_ptr<const RestorePoint> point;  // null: zero state or none
    TruncationReason reason = TruncationReason::kExact;
    bool in_window = false;  // its states are in the row's state window
  };
  Cut find_cut(int64_t row, int64_t target) const;
  template <typename Holds>
  Cut find_cut(const RestorePoints& points, int64_t target,
               const Holds& holds) const;
  // Whether sliding layers still hold what a row cut at `length` can see.
  bool keeps(const std::vector<int64_t>& first, int64_t length) const;
  // A restore point in each of rows [first, end), or in none if one fails.
  void mark_rows(int64_t first, int64_t end);
  // A row's checkpoint but for K and V, with the restore points that are there;
  // and the one at its length, which is made if there are states.
  Checkpoint without_kv(int64_t row) const;
  void add_last_point(int64_t row, Checkpoint& to) const;
  void thin_points(int64_t row, size_t most) noexcept;
  // Rows by length, the longest first: what copies row by row allocates once.
  static std::vector<int64_t> longest_first(std::span<const int64_t> lengths);
  // Ring storage: once a row reaches up to `end`, older keys are overwritten.
  void raise_floor(int64_t row, int64_t end);
  void clear_row(int64_t row) noexcept;
  void set_state(int64_t row, const RestorePoint* point) noexcept;

  CacheSpec spec;
  std::vector<size_t> index;  // of a layer among those of its sort
  std::vector<AttentionLayer> attention_layers;
  std::vector<int64_t> lengths;       // [B]
  std::vector<RestorePoints> points;  // [B], ascending, position 0 implied
  // [B][attention layer] first position held behind the sinks; 0 unless a ring
  // went round or a checkpoint brought no more.
  std::vector<std::vector<int64_t>> oldest;
  std::vector<CellLayout> layouts;  // distinct ones
  std::vector<size_t> layout_of;    // of each attention layer
  int64_t most_live = std::numeric_limits<int64_t>::max();  // tokens of a step
  RowStates states;
  StateWindows windows;
  StepData step;
  struct StepKey {
    int64_t rows = 0, tokens = 0, first_row = 0;
    uint64_t epoch = 0;
    bool state_window = false;
    bool operator==(const StepKey&) const = default;
  };
  std::optional<StepKey> step_key;  // what buffers and views of `step` are for
  StepNumbers numbers;
  uint64_t epoch = 0;
  size_t graph_bytes = 0;  // of graphs recorded over this cache
  bool pending = false;    // a graph's counts are not read back yet
};

template <typename Holds>
Cache::Impl::Cut Cache::Impl::find_cut(const RestorePoints& row_points,
                                       int64_t target,
                                       const Holds& holds) const {
  if (states.empty()) {
    if (holds(target)) {
      return {target, nullptr, TruncationReason::kExact};
    }
    return {0, nullptr, TruncationReason::kEvicted};
  }
  TruncationReason reason = TruncationReason::kRestorePoint;
  for (auto point = row_points.rbegin(); point != row_points.rend(); ++point) {
    const int64_t position = (*point)->position;
    if (position > target) {
      continue;
    }
    if (holds(position)) {
      return {position, *point,
              position == target ? TruncationReason::kExact : reason};
    }
    reason = TruncationReason::kEvicted;
  }
  return {0, nullptr, target == 0 ? TruncationReason::kExact : reason};
}

}  // namespace kvcache
