// src/model/forward/rotary.h - cosines and sines of the positions of a step.
//
// Angles are float64 products and only the results float32, whatever dtype the
// model runs in: integers above 256 are not exact in bfloat16. Made for each
// step, so that no table of a whole context is kept.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/model/forward/row_loops_table.h"  // Turn

namespace kvcache::model {

class RotaryTable {
 public:
  // `frequencies`: radians per position of each pair, scaling applied.
  RotaryTable(std::span<const int64_t> positions,
              std::span<const float> frequencies);

  // The turn of positions[index]; good as long as the table.
  Turn turn(int64_t index) const {
    const int64_t at = index * 2 * pairs_;
    return {table_.data() + at, table_.data() + at + pairs_, pairs_};
  }

 private:
  int64_t pairs_;
  std::vector<float> table_;  // [positions, cosines then sines]
};

}  // namespace kvcache::model
