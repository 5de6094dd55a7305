// src/model/packed/tile_table.h - tiles of quantised weights, and what the
// kernels over them are called with.
//
// Kept free of LibTorch and the standard library: the translation units that
// are compiled for one instruction set include nothing else.
//
// A linear of N outputs and K inputs is cut into tiles of 16 outputs by 32
// inputs. Vector lanes are outputs, so a product needs no horizontal sum.
// Activations are 16-bit integers with one scale per 32 of a row: finer than
// bfloat16, and integer sums have no order. That is why a row has the same bits
// however many rows come along, in prefill as in decode.
#pragma once

#include <cstdint>

namespace kvcache::model {

constexpr int64_t kTileOutputs = 16;
constexpr int64_t kTileInputs = 32;

// Of a weight w with the stored integer q and a scale d per output and 32
// inputs, float16 as in GGUF files.
enum class TileFormat : uint8_t {
  kQ4,  // w = d q + m, q of [0, 15], m a float16 minimum
  kQ8   // w = d q, q of [-127, 127]
};

// A tile in memory: the integers of each output in one 32-bit lane per vector,
// 16 lanes a vector; then d of 16 outputs; then m of 16 outputs (kQ4).
//
// kQ4: vector j of 4 holds inputs 8 j to 8 j + 7: input 8 j + 2 i + h is nibble
// i of the 16-bit half h of the lane. kQ8: vector j of 8 holds inputs 4 j to
// 4 j + 3: inputs 0 and 2 of them are the bytes of half 0, 1 and 3 those of
// half 1. Either way two neighbouring inputs meet two neighbouring activations
// in one multiply-add of 16-bit pairs.
constexpr int64_t kVectorBytes = 4 * kTileOutputs;
constexpr int64_t kScaleBytes = 2 * kTileOutputs;
constexpr int64_t tile_vectors(TileFormat format) {
  return format == TileFormat::kQ4 ? 4 : 8;
}
constexpr int64_t tile_bytes(TileFormat format) {
  return tile_vectors(format) * kVectorBytes +
         (format == TileFormat::kQ4 ? 2 : 1) * kScaleBytes;
}

constexpr int64_t tile_groups(int64_t inputs) {
  return (inputs + kTileInputs - 1) / kTileInputs;
}

// All tiles of a linear: those of 16 outputs follow each other, [N / 16, K /
// 32], both rounded up; what is too many is zero.
struct TileMatrix {
  const uint8_t* tiles = nullptr;
  TileFormat format = TileFormat::kQ4;
  int64_t outputs = 0;  // N
  int64_t groups = 0;   // K / 32

  int64_t blocks() const { return (outputs + kTileOutputs - 1) / kTileOutputs; }
};

// Quantised activations, x = scale q. The same inputs of all rows lie together.
// Written and read by the same kernels: some keep the bytes of q in another
// order.
struct TileRows {
  int64_t rows = 1;
  int16_t* q = nullptr;     // [groups, rows, 32]
  float* scale = nullptr;   // [groups, rows]
  float* offset = nullptr;  // [groups, rows], scale times the sum of q
};

// Weights as they are, N and K rounded up with zeros: [N / 16, K, 16] float32
// or bfloat16, or, in pairs of inputs, [N / 16, K / 2, 16, 2] bfloat16, K a
// multiple of 32.
struct DenseMatrix {
  const void* weights = nullptr;
  bool bfloat16 = false;
  bool pairs = false;
  int64_t outputs = 0;  // N
  int64_t inputs = 0;   // K

  int64_t blocks() const { return (outputs + kTileOutputs - 1) / kTileOutputs; }
  int64_t padded_inputs() const {
    return pairs ? tile_groups(inputs) * kTileInputs : inputs;
  }
};

// Dense rows of bfloat16, and where their products go: float32 sums, or these
// rounded to bfloat16.
struct PairRows {
  const uint16_t* x = nullptr;  // [rows, inputs]
  int64_t rows = 0;
  int64_t inputs = 0;
  const float* bias = nullptr;  // [N], or none
  float* sums = nullptr;        // [rows, N], or
  uint16_t* rounded = nullptr;  // [rows, N]
};

// out of x: see PairRows; outputs of the blocks [first, last) of 16.
using PairsKernel = void (*)(const DenseMatrix& w, const PairRows& x,
                             int64_t first, int64_t last);

struct TileKernels {
  // `inputs` values into row `row` of `to`. A group that holds a NaN or an
  // infinity gets the scale NaN.
  void (*quantise)(const float* x, int64_t inputs, const TileRows& to,
                   int64_t row);
  // out[m * stride + n] = x[m] . w[n] for outputs n of the blocks [first,
  // last) of 16.
  void (*multiply)(const TileMatrix& w, const TileRows& x, float* out,
                   int64_t stride, int64_t first, int64_t last);
  // out[m, n] = x[m] . w[n], both dense, for the same outputs.
  void (*multiply_dense)(const DenseMatrix& w, const float* x, int64_t rows,
                         float* out, int64_t first, int64_t last);
  // Of weights in pairs; nullptr where nothing is gained by them.
  PairsKernel multiply_pairs = nullptr;
};

// One table per instruction set.
namespace portable {
const TileKernels& tile_kernels();
}
namespace avx2 {
const TileKernels& tile_kernels();
}
namespace avx_vnni {
const TileKernels& tile_kernels();
}
namespace avx512 {
const TileKernels& tile_kernels();
}
namespace avx512_vnni {
const TileKernels& tile_kernels();
}
namespace amx {
const TileKernels& tile_kernels();
void multiply_pairs(const DenseMatrix& w, const PairRows& x, int64_t first,
                    int64_t last);
}  // namespace amx

}  // namespace kvcache::model
