// rotary_test.cpp - rotary tables at long positions and under scaling.
#include "src/model/forward/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kvcache/model/config.h"

namespace kvcache::model {
namespace {

// K70: a table made in bfloat16 is noise at long positions. Ours is float32 of
// float64 angles whatever the model runs in.
TEST(RotaryTable, K70IsExactAtLongPositions) {
  RopeConfig rope;
  rope.theta = 10000.0;
  rope.rotary_dim = 64;
  const std::vector<float> frequencies = inverse_frequencies(rope);
  ASSERT_EQ(frequencies.size(), 32u);
  const std::vector<int64_t> positions = {0, 1, 255, 257, 4095, 15962};
  const RotaryTable table(positions, frequencies);
  for (size_t p = 0; p < positions.size(); ++p) {
    const Turn turn = table.turn(static_cast<int64_t>(p));
    ASSERT_EQ(turn.pairs, 32);
    for (int i = 0; i < 32; ++i) {
      const double exact = static_cast<double>(positions[p]) *
                           std::pow(10000.0, -2.0 * i / 64.0);
      // Half a step of bfloat16 is 2^-9; the frequencies are float32.
      EXPECT_NEAR(turn.cosine[i], std::cos(exact), 0x1p-9) << positions[p];
      EXPECT_NEAR(turn.sine[i], std::sin(exact), 0x1p-9) << positions[p];
      const double stored = static_cast<double>(positions[p]) *
                            static_cast<double>(frequencies[size_t(i)]);
      EXPECT_EQ(turn.cosine[i], static_cast<float>(std::cos(stored)));
      EXPECT_EQ(turn.sine[i], static_cast<float>(std::sin(stored)));
    }
  }
}

// K71: rope_type llama3, factor 8, low 1, high 4, original 64: the turn follows
// the scaled frequencies.
TEST(RotaryTable, K71AppliesLlama3Scaling) {
  RopeConfig rope;
  rope.theta = 10000.0;
  rope.rotary_dim = 16;
  rope.scaling = RopeScaling::kLlama3;
  rope.factor = 8.0;
  rope.low_freq_factor = 1.0;
  rope.high_freq_factor = 4.0;
  rope.original_context = 64;
  const std::vector<float> frequencies = inverse_frequencies(rope);
  const std::vector<int64_t> positions = {5000};
  const RotaryTable table(positions, frequencies);
  int scaled = 0;
  for (int i = 0; i < 8; ++i) {
    const double plain = std::pow(10000.0, -2.0 * i / 16.0);
    const double wavelength = 2.0 * M_PI / plain;
    double wanted = plain;
    if (wavelength > 64.0 / 1.0) {
      wanted = plain / 8.0;
    } else if (wavelength >= 64.0 / 4.0) {
      const double smooth = (64.0 / wavelength - 1.0) / (4.0 - 1.0);
      wanted = (1.0 - smooth) * plain / 8.0 + smooth * plain;
    }
    if (wanted != plain) ++scaled;
    EXPECT_NEAR(frequencies[size_t(i)], wanted, wanted * 1e-6);
    EXPECT_NEAR(table.turn(0).cosine[i], std::cos(5000.0 * wanted), 2e-3);
  }
  EXPECT_GE(scaled, 4);
}

TEST(RotaryTable, LinearScalingDividesEveryFrequency) {
  RopeConfig rope;
  rope.rotary_dim = 8;
  const std::vector<float> plain = inverse_frequencies(rope);
  rope.scaling = RopeScaling::kLinear;
  rope.factor = 4.0;
  const std::vector<float> scaled = inverse_frequencies(rope);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_FLOAT_EQ(scaled[i], plain[i] / 4.0F);
  }
}

}  // namespace
}  // namespace kvcache::model
