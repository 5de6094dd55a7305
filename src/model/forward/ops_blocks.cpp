// src/model/forward/ops_blocks.cpp - norms, turns, attention and feed-forward
// by operators.
#include "src/model/forward/ops_blocks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>

#include "src/model/forward/low_rank.h"

namespace kvcache::model {
namespace {

// A copy even on the CPU: what the source returns may lie on the mapped file.
Tensor placed(const Tensor& from, at::Device device) {
  return from.to(from.options().device(device), /*non_blocking=*/false,
                 /*copy=*/true);
}

std::optional<Tensor> placed_if_defined(const Tensor& from, at::Device device) {
  if (!from.defined()) return std::nullopt;
  return placed(from, device);
}

Tensor per_head(const ModelConfig& config, const Tensor& q, const Tensor& k) {
  return at::cat({q.expand({config.heads, config.head_dim}),
                  k.expand({config.kv_heads, config.head_dim})});
}

Tensor activated(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return at::gelu(x, "none");
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kSilu:
      break;
  }
  return at::silu(x);
}

}  // namespace

OpsLinear::OpsLinear(const LinearWeights& weights, const OpsPlace& place)
    : weight_(placed(weights.weight, place.device)),
      bias_(placed_if_defined(weights.bias, place.device)) {}

OpsLinear OpsLinear::load(const LinearWeights& weights, Loader& loader,
                          const OpsPlace& place) {
  OpsLinear made(weights, place);
  loader.finished();
  return made;
}

OpsLinear OpsLinear::outputs_of(const Tensor& which) const {
  OpsLinear made;
  made.weight_ = weight_.index_select(0, which);
  if (bias_) made.bias_ = bias_->index_select(0, which);
  return made;
}

Tensor OpsLinear::operator()(const Tensor& x) const {
  return at::linear(x, weight_, bias_);
}

OpsNorm::OpsNorm(const ModelConfig& config, const NormWeights& weights,
                 at::Device device)
    : kind_(config.norm),
      eps_(config.norm_eps),
      weight_(placed(weights.weight, device)),
      bias_(placed_if_defined(weights.bias, device)) {}

OpsNorm::OpsNorm(const ModelConfig& config, const NormWeights& q,
                 const NormWeights& k, at::Device device)
    : kind_(config.norm),
      eps_(config.norm_eps),
      weight_(placed(per_head(config, q.weight, k.weight), device)) {
  if (q.bias.defined())
    bias_ = placed(per_head(config, q.bias, k.bias), device);
}

Tensor OpsNorm::operator()(const Tensor& x) const {
  const at::IntArrayRef width = x.sizes().slice(x.dim() - 1);
  const bool fused = weight_.dim() == 1;  // the operators take no more
  const auto weight = fused ? std::optional(weight_) : std::nullopt;
  const auto bias = fused ? bias_ : std::nullopt;
  Tensor out = kind_ == Norm::kLayer
                   ? at::layer_norm(x, width, weight, bias, eps_)
                   : at::rms_norm(x, width, weight, eps_);
  if (fused) return out;
  out.mul_(weight_);
  return bias_ ? out.add_(*bias_) : out;
}

OpsRotary::OpsRotary(const ModelConfig& config, at::Device device) {
  std::vector<float> frequencies = inverse_frequencies(config.rope);
  const auto pairs = static_cast<int64_t>(frequencies.size());
  frequencies_ =
      at::from_blob(frequencies.data(), {pairs}, at::TensorOptions(at::kFloat))
          .to(at::kDouble)
          .to(device);
  unturned_ = config.head_dim - 2 * pairs;
}

OpsRotary::Turn OpsRotary::turn(const Tensor& positions) const {
  const Tensor angles =
      positions.to(at::kDouble).unsqueeze(-1).unsqueeze(-1).mul(frequencies_);
  const Tensor cosines = angles.cos().to(at::kFloat);
  std::vector<Tensor> factors = {cosines, cosines};
  if (unturned_ > 0) {
    factors.push_back(
        at::ones({positions.size(0), positions.size(1), 1, unturned_},
                 cosines.options()));
  }
  return {at::cat(factors, -1), angles.sin().to(at::kFloat)};
}

OpsAttention::OpsAttention(const ModelConfig& config, Loader& loader,
                           int64_t layer, const OpsPlace& where)
    : qkv_(OpsLinear::load(loader.qkv(layer), loader, where)),
      output_(OpsLinear::load(loader.attention_output(layer), loader, where)),
      heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim),
      gated_(config.output_gate) {
  if (config.qk_norm) {
    const NormWeights q = loader.q_norm(layer);
    head_norm_.emplace(config, q, loader.k_norm(layer), where.device);
  }
  options_.scale = config.attention_scale;
}

// `heads` [B, T, heads, D] normed, then turned, in float32 in between.
Tensor OpsAttention::turned(const Tensor& heads, const OpsPass& pass) const {
  Tensor x = head_norm_ ? (*head_norm_)(heads.to(at::kFloat)) : heads;
  if (pass.turn) {
    const Tensor& sines = pass.turn->sines;
    const int64_t pairs = sines.size(-1);
    const Tensor y = x.mul(pass.turn->factors);
    y.narrow(-1, 0, pairs).addcmul_(x.narrow(-1, pairs, pairs), sines, -1);
    y.narrow(-1, pairs, pairs).addcmul_(x.narrow(-1, 0, pairs), sines);
    x = y;
  }
  return x.to(heads.scalar_type());
}

Tensor OpsAttention::run(const Tensor& normed, OpsPass& pass,
                         int64_t layer) const {
  const int64_t B = normed.size(0), T = normed.size(1);
  const int64_t all = heads_ + kv_heads_;
  // Gates, if any, are behind v.
  const Tensor qkv =
      run_linear(qkv_, pass, layer, LinearPlace::kMixerInputs, normed)
          .view({B, T, -1, head_dim_});
  const Tensor qk = turned(qkv.narrow(2, 0, all), pass);
  const Tensor q = qk.narrow(2, 0, heads_).transpose(1, 2);
  const Tensor k = qk.narrow(2, heads_, kv_heads_).transpose(1, 2);
  const Tensor v = qkv.narrow(2, all, kv_heads_).transpose(1, 2);
  const KvView& view = pass.memory.update(layer, k, v);
  AttendOptions options = options_;
  options.role = pass.role;
  Tensor attended = attend(q, view, options).transpose(1, 2);
  if (gated_) {
    attended = attended.mul(qkv.narrow(2, all + kv_heads_, heads_).sigmoid());
  }
  return run_linear(output_, pass, layer, LinearPlace::kMixerOutput,
                    attended.reshape({B, T, heads_ * head_dim_}));
}

OpsFeedForward::OpsFeedForward(const ModelConfig& config, Loader& loader,
                               int64_t layer, const OpsPlace& where)
    : up_(OpsLinear::load(loader.up(layer), loader, where)),
      down_(OpsLinear::load(loader.down(layer), loader, where)),
      activation_(config.activation),
      gated_(config.gated_mlp) {}

Tensor OpsFeedForward::run(const Tensor& normed, const OpsPass& pass,
                           int64_t layer) const {
  const Tensor up = run_linear(up_, pass, layer, LinearPlace::kUp, normed);
  const auto down = [&](const Tensor& x) {
    return run_linear(down_, pass, layer, LinearPlace::kDown, x);
  };
  if (!gated_) return down(activated(up, activation_));
  const std::vector<Tensor> halves = up.chunk(2, -1);
  return down(activated(halves[0], activation_).mul_(halves[1]));
}

}  // namespace kvcache::model
