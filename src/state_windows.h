// The recurrent and convolution states after each token of a step that asked
// for them: short-lived restore points of the step's rows.
//
// One piece of memory for all rows and layers, kept from step to step and
// grown. Of a token all layers' states stand side by side, as in a row of
// RowStates; of a convolution there are the inputs that the tokens saw.
#pragma once

#include "row_states.h"

namespace kvcache {

class StateWindows {
 public:
  explicit StateWindows(int64_t rows) : rows_(static_cast<size_t>(rows)) {}

  // Memory and views for the step, into `step.windows`; none unless it asks.
  // What rows remember stays readable until drop_all().
  void fill(StepData& step, const RowStates& states);
  // Rows that took tokens remember this step, or nothing unless every layer
  // was filled.
  void committed(const StepData& step) noexcept;

  // Whether the row's states after `length` tokens are here.
  bool holds(int64_t row, int64_t length) const noexcept;
  // Tokens of the row before its window.
  int64_t start(int64_t row) const noexcept {
    return rows_[static_cast<size_t>(row)].start;
  }
  // Puts the states after `length` tokens into the row of `states`.
  void load(int64_t row, int64_t length,
            const RowStates& states) const noexcept;
  // Forgets what lies behind `length` tokens; all of it if that is before.
  void shorten(int64_t row, int64_t length) noexcept;
  void drop(int64_t row) noexcept { rows_[static_cast<size_t>(row)] = {}; }
  void drop_all() noexcept;
  // The same windows of the same rows in another order.
  StateWindows reordered(std::span<const int64_t> rows) const;

  // A window ends where its row does.
  bool ends_at(int64_t row, int64_t length) const noexcept;
  void add_memory(MemoryUse& points, const RowStates& states) const;

 private:
  struct Row {
    int64_t start = 0, tokens = 0;  // tokens 0: nothing
    int64_t index = 0, skip = 0;    // row of the step, padding before
  };
  struct Memory {
    Tensor state;  // [rows of the step, T, states of all layers], flat
    Tensor conv;   // [rows of the step, C * (Kc + T) of all layers], flat
  };

  Memory memory_;       // of the next step that asks
  Memory kept_;         // what rows_ are about: the same unless it has grown
  int64_t tokens_ = 0;  // T of that step
  std::vector<Row> rows_;
};

}  // namespace kvcache
