// src/model/forward/pass.h - one forward on its way: tokens and scratch.
//
// Activations are [N, width], a token a row; N is the number of rows that the
// linears run B * T tokens as. The rows too many are zero in what a linear
// reads. B rows, T tokens a row.
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

// What a decoder computes in.
struct Arithmetic {
  at::ScalarType dtype = at::kFloat;  // of activations
  at::ScalarType kv = at::kFloat;     // of K and V, and of q
  bool pads_rows = true;              // as PackedLinear::padded_rows() says
};

class TokenAdapters;  // src/model/forward/low_rank.h

struct Pass {
  // `frequencies`: of the rotation, see RotaryTable; empty: none.
  Pass(const ModelConfig& config, std::span<const float> frequencies,
       const TokenSpans& of, LayerMemory& layers, Role of_role,
       const Arithmetic& in);

  // [N, width]; the rows too many are zero.
  Tensor scratch(int64_t width) const {
    return scratch(width, arithmetic.dtype);
  }
  Tensor scratch(int64_t width, at::ScalarType dtype) const;

  const TokenSpans& tokens;
  LayerMemory& memory;
  Role role;
  Arithmetic arithmetic;
  const TokenAdapters* adapters = nullptr;  // null: of no token
  std::optional<RotaryTable> rotary;
  Tensor hidden;     // [N, hidden_size] float32, the residual stream
  Tensor normed;     // [N, hidden_size], what a block reads
  Tensor heads;      // [N, q | k | v], turned
  Tensor kept;       // the same in the dtype of K and V
  Tensor q, k, v;    // views of kept, [B, heads, T, head_dim]
  Tensor attended;   // [N, query_size], if there are rows too many, or gates
  Tensor activated;  // [N, intermediate_size]
};

}  // namespace kvcache::model
