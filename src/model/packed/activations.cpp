// src/model/packed/activations.cpp - a product with tiles, on several threads.
#include "src/model/packed/activations.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "src/model/packed/tile_kernels.h"

namespace kvcache::model {
namespace {

// Multiplications that make a thread worth waking.
constexpr int64_t kWorkOfThread = 64 * 1024;

}  // namespace

TileRows RowBuffer::rows(int64_t count, int64_t groups) {
  const auto scales = static_cast<size_t>(count * groups);
  const size_t bytes =
      scales * (kTileInputs * sizeof(int16_t) + 2 * sizeof(float));
  TileRows made;
  made.rows = count;
  made.q = static_cast<int16_t*>(memory_.at_least(bytes));
  made.scale = reinterpret_cast<float*>(
      made.q + scales * static_cast<size_t>(kTileInputs));
  made.offset = made.scale + scales;
  return made;
}

void multiply_tiles(const TileMatrix& w, const float* x, int64_t inputs,
                    int64_t rows, float* out) {
  static thread_local RowBuffer buffer;
  const TileKernels& kernels = tile_kernels();
  const TileRows quantised = buffer.rows(rows, w.groups);
  const int64_t row_grain = std::max<int64_t>(1, 16384 / inputs);
  at::parallel_for(0, rows, row_grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      kernels.quantise(x + row * inputs, inputs, quantised, row);
    }
  });
  const int64_t work = rows * w.groups * kTileInputs * kTileOutputs;
  const int64_t grain = std::max<int64_t>(1, kWorkOfThread / work);
  at::parallel_for(0, w.blocks(), grain, [&](int64_t first, int64_t last) {
    kernels.multiply(w, quantised, out, w.outputs, first, last);
  });
}

}  // namespace kvcache::model
