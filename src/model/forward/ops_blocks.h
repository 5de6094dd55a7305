// src/model/forward/ops_blocks.h - what a layer of the operator decoder is made
// of.
//
// LibTorch's operators alone, on any device, and none that waits for the device
// or copies from the host, so that a step may be recorded in a CUDA graph. Each
// block reads normed activations [B, T, hidden_size] in the running dtype and
// returns what is added to the residual stream, in the same.
// D head size, P turned pairs of a head.
#pragma once

#include <optional>
#include <vector>

#include "kvcache/attention.h"
#include "src/model/forward/layer_memory.h"
#include "src/model/forward/loader.h"

namespace kvcache::model {

class RowAdapters;  // src/model/forward/low_rank.h

// Where weights go.
struct OpsPlace {
  at::ScalarType dtype;
  at::Device device;
};

class OpsLinear {
 public:
  OpsLinear(const LinearWeights& weights, const OpsPlace& place);
  // The same; pages of the file are given back behind it.
  static OpsLinear load(const LinearWeights& weights, Loader& loader,
                        const OpsPlace& place);
  Tensor operator()(const Tensor& x) const;
  const Tensor& weight() const { return weight_; }
  // A copy of these outputs, `which` [n] int64 on the weights' device.
  OpsLinear outputs_of(const Tensor& which) const;

 private:
  OpsLinear() = default;
  Tensor weight_;
  std::optional<Tensor> bias_;
};

class OpsNorm {
 public:
  // Of rows [width].
  OpsNorm(const ModelConfig& config, const NormWeights& weights,
          at::Device device);
  // Of heads [q heads + k heads, D], each with the weights of its kind.
  OpsNorm(const ModelConfig& config, const NormWeights& q, const NormWeights& k,
          at::Device device);

  // `x` float32 [..., width] or [..., heads, D]; float32.
  Tensor operator()(const Tensor& x) const;

 private:
  Norm kind_;
  double eps_;
  Tensor weight_;
  std::optional<Tensor> bias_;
};

// Angles in float64 and only the results in float32, whatever dtype the model
// runs in; made for each step from the positions on the device, so that no
// table of a whole context is kept.
class OpsRotary {
 public:
  OpsRotary(const ModelConfig& config, at::Device device);

  struct Turn {
    Tensor factors;  // [B, T, 1, D]: cosines of both halves, 1 where unturned
    Tensor sines;    // [B, T, 1, P]
  };
  Turn turn(const Tensor& positions) const;  // [B, T]

 private:
  Tensor frequencies_;  // [P] float64
  int64_t unturned_;    // last values of a head
};

// One forward on its way.
struct OpsPass {
  LayerMemory& memory;
  Role role;
  Tensor dead;                            // [B, T] bool
  std::optional<OpsRotary::Turn> turn;    // empty: learned positions
  const RowAdapters* adapters = nullptr;  // null: of no row
};

// What lets a token see earlier ones.
class OpsMixer {
 public:
  OpsMixer() = default;
  OpsMixer(const OpsMixer&) = delete;
  OpsMixer& operator=(const OpsMixer&) = delete;
  virtual ~OpsMixer() = default;
  virtual Tensor run(const Tensor& normed, OpsPass& pass,
                     int64_t layer) const = 0;
};

class OpsAttention final : public OpsMixer {
 public:
  OpsAttention(const ModelConfig& config, Loader& loader, int64_t layer,
               const OpsPlace& place);
  Tensor run(const Tensor& normed, OpsPass& pass, int64_t layer) const override;

 private:
  Tensor turned(const Tensor& heads, const OpsPass& pass) const;

  OpsLinear qkv_, output_;
  std::optional<OpsNorm> head_norm_;
  int64_t heads_, kv_heads_, head_dim_;
  bool gated_;  // each attended value times the sigmoid of one of its own
  AttendOptions options_;
};

class OpsFeedForward {
 public:
  OpsFeedForward(const ModelConfig& config, Loader& loader, int64_t layer,
                 const OpsPlace& place);
  Tensor run(const Tensor& normed, const OpsPass& pass, int64_t layer) const;

 private:
  OpsLinear up_, down_;
  Activation activation_;
  bool gated_;
};

}  // namespace kvcache::model
