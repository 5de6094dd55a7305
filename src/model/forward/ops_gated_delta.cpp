// src/model/forward/ops_gated_delta.cpp - linear attention by operators.
#include "src/model/forward/ops_gated_delta.h"

#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>

#include <cmath>

#include "src/model/forward/low_rank.h"

namespace kvcache::model {
namespace {

DeltaWeights placed(const DeltaWeights& weights, at::Device device) {
  const auto move = [&](const Tensor& t) { return t.to(device); };
  return {move(weights.conv), move(weights.decay), move(weights.dt_bias),
          move(weights.norm)};
}

Tensor unit_length(const Tensor& x) {
  constexpr double kEps = 1e-6;  // the definition's, not the model's
  return x.mul(x.square().sum(-1, /*keepdim=*/true).add(kEps).rsqrt());
}

// [B, T, Hk, D] -> [B, T, Hk * groups, D]: value heads that read one key head
// are neighbours.
Tensor repeated(const Tensor& heads, int64_t groups) {
  return heads.unsqueeze(3)
      .expand({-1, -1, -1, groups, -1})
      .reshape({heads.size(0), heads.size(1), -1, heads.size(3)});
}

}  // namespace

OpsGatedDelta::OpsGatedDelta(const ModelConfig& config, Loader& loader,
                             int64_t layer, const OpsPlace& place)
    : sizes_(*config.linear_attention),
      eps_(config.norm_eps),
      inputs_(OpsLinear::load(loader.delta_inputs(layer), loader, place)),
      output_(OpsLinear::load(loader.delta_output(layer), loader, place)),
      weights_(placed(loader.delta(layer), place.device)) {}

OpsGatedDelta::Heads OpsGatedDelta::heads_of(const Tensor& inputs,
                                             OpsPass& pass,
                                             int64_t layer) const {
  const int64_t B = inputs.size(0), T = inputs.size(1);
  const Tensor raw = inputs.narrow(2, 0, sizes_.conv_channels());
  const Tensor extended = pass.memory.extend_conv(layer, raw.transpose(1, 2))
                              .to(at::kFloat);  // [B, C, Kc + T]
  Tensor sums = extended.narrow(2, 0, T).mul(weights_.conv.narrow(1, 0, 1));
  for (int64_t tap = 1; tap < sizes_.conv_kernel; ++tap) {
    sums.addcmul_(extended.narrow(2, tap, T), weights_.conv.narrow(1, tap, 1));
  }
  const Tensor mixed = at::silu(sums).transpose(1, 2);  // [B, T, C]
  const auto part = [&](int64_t first, int64_t heads, int64_t size) {
    return mixed.narrow(2, first, heads * size).reshape({B, T, heads, size});
  };
  const int64_t groups = sizes_.value_heads / sizes_.key_heads;
  const auto keys = [&](int64_t first) {
    return repeated(
        unit_length(part(first, sizes_.key_heads, sizes_.key_head_dim)),
        groups);
  };
  const double scale =
      1.0 / std::sqrt(static_cast<double>(sizes_.key_head_dim));
  return {
      keys(0).mul(scale), keys(sizes_.key_size()),
      part(2 * sizes_.key_size(), sizes_.value_heads, sizes_.value_head_dim)};
}

// `alpha`, `beta` [B, T, Hv]. Returns [B, T, Hv, Dv].
Tensor OpsGatedDelta::scan(const Heads& heads, const Tensor& alpha,
                           const Tensor& beta, const StateView& memory,
                           const StateWindow* window) const {
  Tensor state = memory.state;  // [B, Hv, Dk, Dv]
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < heads.q.size(1); ++t) {
    const auto column = [&](const Tensor& x) {  // [B, Hv, Dk, 1]
      return x.select(1, t).unsqueeze(-1);
    };
    const Tensor k = column(heads.k);
    const Tensor decayed = state.mul(column(alpha).unsqueeze(-1));
    const Tensor read = decayed.mul(k).sum(2);  // [B, Hv, Dv]
    const Tensor delta =
        heads.v.select(1, t).sub(read).mul(column(beta)).unsqueeze(2);
    state = decayed.addcmul(k, delta);
    if (window != nullptr) window->state.select(1, t).copy_(state);
    outputs.push_back(state.mul(column(heads.q)).sum(2));
  }
  memory.next_state.copy_(state);
  return at::stack(outputs, 1);
}

// Dead tokens change nothing: with alpha 1 and beta 0 a state stays what it is.
Tensor OpsGatedDelta::run(const Tensor& normed, OpsPass& pass,
                          int64_t layer) const {
  const int64_t B = normed.size(0), T = normed.size(1);
  const int64_t Hv = sizes_.value_heads, C = sizes_.conv_channels();
  const Tensor inputs =
      run_linear(inputs_, pass, layer, LinearPlace::kMixerInputs, normed);
  const Heads heads = heads_of(inputs, pass, layer);
  const Tensor dead = pass.dead.unsqueeze(-1);
  const auto gate = [&](int64_t index) {
    return inputs.narrow(2, C + sizes_.value_size() + index * Hv, Hv)
        .to(at::kFloat);
  };
  const Tensor beta = gate(0).sigmoid().masked_fill(dead, 0);
  const Tensor alpha = at::softplus(gate(1).add(weights_.dt_bias))
                           .mul(weights_.decay)
                           .masked_fill(dead, 0)
                           .exp();
  const Tensor o = scan(heads, alpha, beta, pass.memory.state(layer),
                        pass.memory.state_window(layer));
  const Tensor z = inputs.narrow(2, C, sizes_.value_size())
                       .to(at::kFloat)
                       .reshape(o.sizes());
  const Tensor gated = at::rms_norm(o, o.sizes().slice(3), weights_.norm, eps_)
                           .mul(at::silu(z))
                           .reshape({B, T, sizes_.value_size()})
                           .masked_fill(dead, 0);
  return run_linear(output_, pass, layer, LinearPlace::kMixerOutput,
                    gated.to(inputs.scalar_type()));
}

}  // namespace kvcache::model
