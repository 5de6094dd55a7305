// The recurrent and convolution states of all rows, current and next.
//
// All layers of a row stand side by side in one flat tensor, so that a commit
// moves whole rows and cannot stop between two layers.
#pragma once

#include "kvcache/detail/step_data.h"
#include "kvcache/types.h"

namespace kvcache {

class RowStates {
 public:
  RowStates(const CacheSpec& spec, bool may_swap);

  struct Layer {
    RecurrentLayer spec;
    int64_t conv_offset = 0, state_offset = 0;  // elements, in a row
  };

  bool empty() const noexcept { return layers_.empty(); }
  size_t layers() const noexcept { return layers_.size(); }
  std::span<const Layer> layout() const noexcept { return layers_; }
  // Views of rows [first_row, first_row + rows) into `step.states`.
  void fill(StepData& step) const;
  // Rows that took tokens take their next state. True if addresses moved. All
  // that can fail, memory for ops, comes before the first change.
  bool commit(const StepData& step, bool by_ops);

  void clear(int64_t row) noexcept;
  std::shared_ptr<const RestorePoint> snapshot(int64_t row,
                                               int64_t position) const;
  // Whether load() can take the point, and what it would have to look like.
  bool holds(const RestorePoint& point) const;
  std::string point_text() const;
  void load(int64_t row, const RestorePoint& point) noexcept;
  // The same rows in another order; gathers before it is assigned.
  RowStates reordered(std::span<const int64_t> rows) const;
  RowStates copy() const;
  // Takes the values of `from` at the addresses held now.
  void copy_from(const RowStates& from) noexcept;

  void add_addresses(std::vector<const void*>& to) const;
  void add_memory(MemoryReport& report, int64_t live_rows) const;
  const Tensor& conv() const noexcept { return conv_[0]; }
  const Tensor& state() const noexcept { return state_[0]; }

 private:
  RowStates() = default;
  void allocate(int64_t rows);

  std::vector<Layer> layers_;
  int64_t conv_width_ = 0, state_width_ = 0;
  at::ScalarType conv_dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  bool may_swap_ = false;
  Tensor conv_[2], state_[2];  // [B, width]: current, next
};

}  // namespace kvcache
