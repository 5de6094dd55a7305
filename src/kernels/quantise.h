// kernels/quantise.h - rows of numbers as 8-bit codes and one scale.
#pragma once

#include <cstdint>

namespace kvcache::kernels {

// x[i] is about codes[i] * scale, at most half a scale off: the scale is
// max |x| / 127 in float32, codes are x / scale to the nearest whole number,
// ties to even, within +-127. Zeros have the scale 0. A row with a number that
// is not finite has the scale NaN, so that whoever sees it gets NaN. The same
// bits on every machine.
void quantise_row(const float* x, int64_t count, int8_t* codes, float* scale);
// The same for bits of bfloat16 numbers.
void quantise_row(const uint16_t* x, int64_t count, int8_t* codes,
                  float* scale);

}  // namespace kvcache::kernels
