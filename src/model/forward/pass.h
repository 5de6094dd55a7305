// src/model/forward/pass.h - one forward on its way: tokens and scratch.
//
// Activations are [N, width], a token a row; N is the number of rows that the
// linears run B * T tokens as (PackedLinear). The rows too many are zero in
// what a linear reads. B rows, T tokens a row.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>

#include "kvcache/attention.h"
#include "kvcache/model/config.h"
#include "src/model/forward/layer_memory.h"
#include "src/model/forward/rotary.h"

namespace kvcache::model {

// The tokens of a forward, [B * T].
struct TokenSpans {
  int64_t rows = 0;     // B
  int64_t per_row = 0;  // T
  std::span<const int64_t> ids;
  std::span<const int64_t> positions;  // 0 where dead
  std::span<const int64_t> limits;     // 0 where dead

  int64_t count() const { return rows * per_row; }
  bool live(int64_t i) const { return limits[static_cast<size_t>(i)] > 0; }
};

class TokenAdapters;  // src/model/forward/low_rank.h

// [N, width], N as many rows as linears run `tokens` as; those from `tokens` on
// are zero.
Tensor scratch(int64_t tokens, int64_t width, at::ScalarType dtype);

struct Pass {
  // `frequencies`: of the rotation, see RotaryTable; empty: none.
  Pass(const ModelConfig& config, std::span<const float> frequencies,
       const TokenSpans& of, LayerMemory& layers, Role of_role,
       at::ScalarType dtype);

  const TokenSpans& tokens;
  LayerMemory& memory;
  Role role;
  const TokenAdapters* adapters = nullptr;  // null: of no token
  std::optional<RotaryTable> rotary;
  Tensor hidden;     // [N, hidden_size] float32, the residual stream
  Tensor normed;     // [N, hidden_size], what a block reads
  Tensor heads;      // [N, q | k | v], turned
  Tensor q, k, v;    // views of heads, [B, heads, T, head_dim]
  Tensor attended;   // [N, query_size], if there are rows too many, or gates
  Tensor activated;  // [N, intermediate_size]
};

}  // namespace kvcache::model
