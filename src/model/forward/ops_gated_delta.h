// src/model/forward/ops_gated_delta.h - linear attention by operators.
//
// The formulas of gated_delta.h in LibTorch's operators, token by token: the
// reference, and the form for other devices. A step of one token may be
// recorded in a CUDA graph.
#pragma once

#include "src/model/forward/ops_blocks.h"

namespace kvcache::model {

class OpsGatedDelta final : public OpsMixer {
 public:
  OpsGatedDelta(const ModelConfig& config, Loader& loader, int64_t layer,
                const OpsPlace& place);
  Tensor run(const Tensor& normed, OpsPass& pass, int64_t layer) const override;

 private:
  struct Heads {
    Tensor q, k, v;  // [B, T, Hv, Dk or Dv] float32
  };
  Heads heads_of(const Tensor& inputs, OpsPass& pass, int64_t layer) const;
  Tensor scan(const Heads& heads, const Tensor& alpha, const Tensor& beta,
              const StateView& memory, const StateWindow* window) const;

  LinearAttentionConfig sizes_;
  double eps_;
  OpsLinear inputs_, output_;
  DeltaWeights weights_;
};

}  // namespace kvcache::model
