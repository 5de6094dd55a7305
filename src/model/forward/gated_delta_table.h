// src/model/forward/gated_delta_table.h - what the gated delta kernels are
// called with.
//
// Kept free of LibTorch and the standard library, as row_loops_table.h is.
// Hk key heads of Dk, Hv value heads of Dv, C = 2 Hk Dk + Hv Dv channels of the
// convolution, Kc + 1 taps.
#pragma once

#include <cstdint>

#include "src/model/forward/row_loops_table.h"  // Bf16

namespace kvcache::model {

// One linear-attention layer.
struct DeltaLayer {
  int64_t key_heads = 0;  // Hk
  int64_t groups = 0;     // Hv / Hk, value heads that read one key head
  int64_t key_dim = 0;    // Dk
  int64_t value_dim = 0;  // Dv
  int64_t taps = 0;       // Kc + 1
  float eps = 0;          // of the norm of the outputs

  const float* conv = nullptr;     // [taps, C], the current token's last
  const float* decay = nullptr;    // [Hv], -exp(A_log)
  const float* dt_bias = nullptr;  // [Hv]
  const float* norm = nullptr;     // [Dv]

  int64_t value_heads() const { return key_heads * groups; }
  int64_t channels() const {
    return 2 * key_heads * key_dim + value_heads() * value_dim;
  }
  // Of a token's inputs: q | k | v | z | b | a.
  int64_t inputs() const {
    return channels() + value_heads() * (value_dim + 2);
  }
};

// The live tokens of one row. Next conv and state may be the current ones.
template <typename T>
struct DeltaRow {
  int64_t tokens = 0;       // at least 1
  const T* in = nullptr;    // [tokens, DeltaLayer::inputs()]
  T* out = nullptr;         // [tokens, Hv * Dv]
  const T* conv = nullptr;  // [C, Kc], raw inputs before these, newest last
  T* next_conv = nullptr;
  const float* state = nullptr;  // [Hv, Dk, Dv]
  float* next_state = nullptr;
  float* window = nullptr;    // S after each token as well; null: not wanted
  int64_t window_stride = 0;  // from one token's [Hv, Dk, Dv] to the next
};

template <typename T>
struct DeltaKernel {
  // Floats of scratch that run() needs, aligned to 64 bytes.
  int64_t (*scratch)(const DeltaLayer& layer);
  // Key head `head` and the value heads that read it: everything between the
  // input and the output projection. Each element takes the same instructions
  // whatever `tokens` is, so a row may be cut anywhere.
  void (*run)(const DeltaLayer& layer, const DeltaRow<T>& row, int64_t head,
              float* scratch);
};

// One pair per instruction set.
#define KVCACHE_DECLARE_DELTA(name)          \
  namespace name {                           \
  const DeltaKernel<float>& float_delta();   \
  const DeltaKernel<Bf16>& bfloat16_delta(); \
  }
KVCACHE_DECLARE_DELTA(portable)
KVCACHE_DECLARE_DELTA(avx2)
KVCACHE_DECLARE_DELTA(avx512)
#undef KVCACHE_DECLARE_DELTA

}  // namespace kvcache::model
