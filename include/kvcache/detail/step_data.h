// kvcache/detail/step_data.h - what a cache kind sees of an open step.
//
// For authors of kinds only. Filled by Cache before the do_* calls, reused from
// step to step: nothing here is allocated in steady decode.
#pragma once

#include "kvcache/types.h"

namespace kvcache {

// Where an attention layer stores positions, in the words of KvView.
struct CellLayout {
  int64_t sinks = 0, ring = 0;
  int64_t dead = -1;  // cell that a dead token may be written to; -1: none
  bool operator==(const CellLayout&) const = default;
};

struct StepData {
  int64_t tokens = 0;  // T
  int64_t first_row = 0;
  int64_t rows = 0;                         // B of the step
  std::vector<int64_t> skip, count, start;  // [rows]; start: length before
  int64_t longest = 0;                      // of the step's rows after it
  int64_t window = 0;
  bool uniform = false;       // equal starts, every token live
  Tensor positions, limits;   // [rows, T] int64
  std::vector<Tensor> cells;  // the same, one per distinct CellLayout
  Tensor taken;               // [rows] int64, tokens that commit() will add
  // Replayed later with other lengths: the host's numbers above are those of
  // one step, the tensors are those of every replay.
  bool recorded = false;
  std::vector<KvView> views;      // one per attention layer
  std::vector<StateView> states;  // one per recurrent layer
  std::vector<bool> done;         // one per layer
  std::vector<bool> conv_done;    // one per layer
  bool state_window = false;
  std::vector<StateWindow> windows;  // one per recurrent layer; none: empty
  std::vector<bool> window_done;     // one per recurrent layer
  bool open = false;
};

}  // namespace kvcache
