// kernels/quantise.cpp - plain loops, which every compiler makes vectors of.

#include "kernels/quantise.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace kvcache::kernels {
namespace {

constexpr int32_t kLargestCode = 127;

float number(float x) { return x; }
float number(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Bits of the largest |x|; those of an infinity or more if one is not finite.
template <typename T>
int32_t largest_bits(const T* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    top = std::max(top, std::bit_cast<int32_t>(number(x[i])) & 0x7fffffff);
  }
  return top;
}

template <typename T>
void quantise(const T* x, int64_t count, int8_t* codes, float* scale) {
  constexpr int32_t kInfinity = 0x7f800000;
  const int32_t top = largest_bits(x, count);
  *scale = top >= kInfinity ? std::numeric_limits<float>::quiet_NaN()
                            : std::bit_cast<float>(top) / kLargestCode;
  if (!(*scale > 0)) {
    std::fill_n(codes, count, int8_t{0});
    return;
  }
  const float divisor = *scale;
  // 1.5 * 2^23: a sum with it has no fraction, and the number in its low bits.
  constexpr float kWhole = 12582912;
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = number(x[i]) / divisor + kWhole;
    const int32_t code =
        std::bit_cast<int32_t>(rounded) - std::bit_cast<int32_t>(kWhole);
    // Beyond only where the scale is too small for a float32.
    codes[i] =
        static_cast<int8_t>(std::clamp(code, -kLargestCode, kLargestCode));
  }
}

}  // namespace

void quantise_row(const float* x, int64_t count, int8_t* codes, float* scale) {
  quantise(x, count, codes, scale);
}

void quantise_row(const uint16_t* x, int64_t count, int8_t* codes,
                  float* scale) {
  quantise(x, count, codes, scale);
}

}  // namespace kvcache::kernels
