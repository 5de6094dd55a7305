// src/model/forward/rotary.cpp - cosines and sines of the positions of a step.
#include "src/model/forward/rotary.h"

#include <cmath>

#include "src/model/forward/row_loops.h"

namespace kvcache::model {

RotaryTable::RotaryTable(std::span<const int64_t> positions,
                         std::span<const float> frequencies)
    : pairs_(static_cast<int64_t>(frequencies.size())),
      table_(2 * positions.size() * frequencies.size()) {
  constexpr int64_t kCost = 32;  // an angle takes as long as so many values
  const auto count = static_cast<int64_t>(positions.size());
  for_each_row(count, pairs_ * kCost, [&](int64_t row) {
    float* cosine = table_.data() + row * 2 * pairs_;
    const auto position =
        static_cast<double>(positions[static_cast<size_t>(row)]);
    for (int64_t i = 0; i < pairs_; ++i) {
      const double angle =
          position * static_cast<double>(frequencies[static_cast<size_t>(i)]);
      cosine[i] = static_cast<float>(std::cos(angle));
      cosine[pairs_ + i] = static_cast<float>(std::sin(angle));
    }
  });
}

}  // namespace kvcache::model
