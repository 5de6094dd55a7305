// src/model/forward/gated_delta.h - the gated delta rule on the CPU, between
// the two projections of a linear-attention layer.
//
// Convolution, gates, recurrence and gated norm in one loop over key heads; the
// plain recurrence for any number of tokens, since on a CPU it is faster than
// its chunked form, and may be cut anywhere without a bit changing.
// B rows, T tokens, N >= B T rows of activations; see gated_delta_table.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "kvcache/types.h"
#include "src/model/forward/gated_delta_table.h"
#include "src/model/forward/loader.h"
#include "src/model/forward/pass.h"

namespace kvcache::model {

// The kernel for kernels::cpu_level(). T is float or Bf16.
template <typename T>
const DeltaKernel<T>& delta_kernel();
template <>
const DeltaKernel<float>& delta_kernel<float>();
template <>
const DeltaKernel<Bf16>& delta_kernel<Bf16>();

class GatedDeltaCore {
 public:
  GatedDeltaCore(const ModelConfig& config, const DeltaWeights& weights);

  // Reads `in` [N, q | k | v | z | b | a], conv and state of `memory`; writes
  // `out` [N, Hv * Dv] in the dtype of `in`, 0 for dead tokens, and the next
  // conv and state of rows with a live token, and `window` after each of them;
  // null: not wanted. Rows are row-exact.
  void run(const TokenSpans& tokens, const Tensor& in, const StateView& memory,
           const Tensor& out, const StateWindow* window = nullptr) const;

  int64_t inputs() const { return layer_.inputs(); }
  int64_t outputs() const { return layer_.value_heads() * layer_.value_dim; }

 private:
  DeltaWeights weights_;  // what layer_ points into
  DeltaLayer layer_;
};

}  // namespace kvcache::model
