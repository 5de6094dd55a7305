// src/model/forward/row_loops_table.h - what the row loops are called with.
//
// Kept free of LibTorch and the standard library: the translation units that
// are compiled for one instruction set include nothing else.
#pragma once

#include <cstdint>

namespace kvcache::model {

// The bits of a bfloat16.
struct Bf16 {
  uint16_t bits;
};

// One normalisation: (x - mean) / deviation * weight + bias, or without mean.
struct NormParameters {
  const float* weight;  // [width]
  const float* bias;    // [width] or nullptr
  float eps;
  bool centre;  // LayerNorm; else RMS
};

// The turn of one position: angles of the pairs (i, i + pairs) of a head.
struct Turn {
  const float* cosine;  // [pairs]
  const float* sine;    // [pairs]
  int64_t pairs;        // 0: nothing is turned
};

// What a low-rank adapter adds to a row: B (A x).
struct LowRankMatrices {
  const float* a;  // [rank, inputs]
  const float* b;  // [rank, outputs]: B transposed
  int64_t inputs, rank, outputs;
};

// Each works on one row, in float32 whatever T (float or Bf16) is. `width`
// counts values.
template <typename T>
struct RowLoops {
  // out = activation(x) * factor; without factor if nullptr.
  using Activate = void (*)(T* out, const T* x, const T* factor, int64_t width);

  // residual += delta (unless nullptr), then out = norm(residual).
  void (*add_norm)(T* out, float* residual, const T* delta,
                   const NormParameters& norm, int64_t width);
  // residual += delta.
  void (*add)(float* residual, const T* delta, int64_t width);
  // out = heads of `width` values each, normed (unless nullptr), then turned.
  // `out` and `in` do not overlap.
  void (*turn_heads)(T* out, const T* in, int64_t heads, int64_t width,
                     const NormParameters* norm, const Turn& turn);
  Activate silu, gelu, gelu_tanh, sigmoid;
  void (*to_float)(float* out, const T* x, int64_t width);
  // out += B (A x), rounded once; `between` [rank] holds A x then.
  void (*add_low_rank)(T* out, const T* x, const LowRankMatrices& of,
                       float* between);
};

// One pair of tables per instruction set.
#define KVCACHE_DECLARE_ROW_LOOPS(name)   \
  namespace name {                        \
  const RowLoops<float>& float_loops();   \
  const RowLoops<Bf16>& bfloat16_loops(); \
  }
KVCACHE_DECLARE_ROW_LOOPS(portable)
KVCACHE_DECLARE_ROW_LOOPS(avx2)
KVCACHE_DECLARE_ROW_LOOPS(avx512)
#undef KVCACHE_DECLARE_ROW_LOOPS

}  // namespace kvcache::model
