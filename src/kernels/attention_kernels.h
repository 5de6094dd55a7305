// kernels/attention_kernels.h - what attend() asks of a CPU level.
//
// B rows, T queries, H key/value heads, Hq query heads, D head size.
#pragma once

#include <cstdint>

namespace kvcache::kernels {

// Keys are cut into blocks of this many, counted from position 0 of the row.
// A query's result is a fold of one partial result per block, in ascending
// order, so this number is part of the arithmetic: another value, other bits.
constexpr int64_t kKeyBlock = 128;

enum class Element : uint8_t { kFloat32, kBFloat16 };

// A checked attend() call as plain numbers. Strides count elements.
struct AttentionCall {
  Element element = Element::kFloat32;
  const void* q = nullptr;  // [B, Hq, T, D]
  const void* k = nullptr;  // [B, H, cells, D]
  const void* v = nullptr;
  void* out = nullptr;              // [B, T, Hq, D], dense
  const int64_t* limits = nullptr;  // [B, T]
  int64_t q_row = 0, q_head = 0, q_token = 0;
  int64_t k_row = 0, k_head = 0, k_cell = 0;
  int64_t v_row = 0, v_head = 0, v_cell = 0;
  int64_t limits_row = 0, limits_token = 0;
  int64_t rows = 0, heads = 0, group = 0, tokens = 0, head_dim = 0;
  int64_t sliding = 0;
  int64_t ring = 0;
  float scale = 0;  // of q . k, times log2(e): the kernels take powers of 2
};

}  // namespace kvcache::kernels
