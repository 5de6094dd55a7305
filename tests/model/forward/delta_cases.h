// delta_cases.h - one linear-attention layer of random weights, its runs, and
// the same in float64.
//
// Hk key heads of Dk, Hv value heads of Dv, C channels, Kc saved inputs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "src/model/forward/gated_delta.h"

namespace kvcache::model {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct DeltaMemory {
  Tensor conv, state;  // [B, C, Kc], [B, Hv, Dk, Dv]
};

struct DeltaResult {
  Tensor out;  // [B, T, Hv * Dv]
  DeltaMemory memory;
};

inline bool same_bits(const DeltaResult& a, const DeltaResult& b) {
  return a.out.equal(b.out) && a.memory.conv.equal(b.memory.conv) &&
         a.memory.state.equal(b.memory.state);
}

inline double relative_error(const Tensor& found, const Tensor& wanted) {
  const Tensor exact = wanted.to(at::kDouble);
  return (found.to(at::kDouble) - exact).norm().item<double>() /
         exact.norm().item<double>();
}

class DeltaCase {
 public:
  explicit DeltaCase(const LinearAttentionConfig& sizes, uint64_t seed = 1)
      : sizes_(sizes), random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    config_.linear_attention = sizes;
    weights_.conv =
        normal({sizes.conv_channels(), sizes.conv_kernel}).mul_(0.5);
    // -exp(A_log) from nearly nothing to strong: alpha from 0.999 to e^-10.
    weights_.decay = at::linspace(-1e-3, -8.0, sizes.value_heads);
    weights_.dt_bias = normal({sizes.value_heads});
    weights_.norm = normal({sizes.value_head_dim}).mul_(0.2).add_(1.0);
  }

  const LinearAttentionConfig& sizes() const { return sizes_; }
  DeltaWeights& weights() { return weights_; }
  GatedDeltaCore core() const { return {config_, weights_}; }
  int64_t inputs() const {
    return sizes_.conv_channels() + sizes_.value_size() +
           2 * sizes_.value_heads;
  }

  Tensor normal(at::IntArrayRef shape) {
    return at::randn(shape, random_, at::TensorOptions(at::kFloat));
  }
  // [B, T, inputs]; tokens resemble each other, as keys of a text do.
  Tensor tokens(int64_t B, int64_t T, at::ScalarType dtype = at::kFloat) {
    const Tensor common = normal({B, 1, inputs()});
    return normal({B, T, inputs()}).add_(common).to(dtype);
  }
  DeltaMemory memory(int64_t B, at::ScalarType dtype = at::kFloat) {
    return {
        normal({B, sizes_.conv_channels(), sizes_.conv_kernel - 1}).to(dtype),
        normal({B, sizes_.value_heads, sizes_.key_head_dim,
                sizes_.value_head_dim})};
  }

  // Row b has the live tokens [skip[b], skip[b] + count[b]); empty: all.
  static DeltaResult run(const GatedDeltaCore& core, const Tensor& in,
                         const DeltaMemory& before,
                         const std::vector<int64_t>& skip = {},
                         const std::vector<int64_t>& count = {},
                         bool in_place = false,
                         const StateWindow* window = nullptr) {
    const int64_t B = in.size(0), T = in.size(1);
    std::vector<int64_t> limits(static_cast<size_t>(B * T), 0);
    for (int64_t b = 0; b < B; ++b) {
      const auto row = static_cast<size_t>(b);
      const int64_t first = skip.empty() ? 0 : skip[row];
      const int64_t live = count.empty() ? T - first : count[row];
      for (int64_t t = first; t < first + live; ++t) {
        limits[static_cast<size_t>(b * T + t)] = t + 1;
      }
    }
    DeltaResult result;
    result.out = at::full({B, T, core.outputs()}, kNaN, in.options());
    StateView view{before.conv.clone(), {}, before.state.clone(), {}};
    view.next_conv = in_place ? view.conv : at::full_like(view.conv, kNaN);
    view.next_state = in_place ? view.state : at::full_like(view.state, kNaN);
    const Tensor dense = in.contiguous();
    core.run({B, T, limits, limits, limits}, dense, view, result.out, window);
    result.memory = {view.next_conv, view.next_state};
    return result;
  }

  // The same of one row in float64. `groups_apart`: the wrong head mapping,
  // value head h reads key head h % Hk.
  DeltaResult exact(const Tensor& in, const DeltaMemory& before,
                    bool groups_apart = false) const;

 private:
  LinearAttentionConfig sizes_;
  at::Generator random_;
  ModelConfig config_;
  DeltaWeights weights_;
};

inline DeltaResult DeltaCase::exact(const Tensor& in, const DeltaMemory& before,
                                    bool groups_apart) const {
  const auto wide = [](const Tensor& t) { return t.to(at::kDouble); };
  const int64_t Hk = sizes_.key_heads, Hv = sizes_.value_heads;
  const int64_t Dk = sizes_.key_head_dim, Dv = sizes_.value_head_dim;
  const int64_t C = sizes_.conv_channels(), Kc = sizes_.conv_kernel - 1;
  Tensor conv = wide(before.conv[0]);            // [C, Kc]
  Tensor state = wide(before.state[0]).clone();  // [Hv, Dk, Dv]
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < in.size(1); ++t) {
    const Tensor token = wide(in[0][t]);
    const auto part = [&](int64_t first, int64_t size) {
      return token.narrow(0, first, size);
    };
    const Tensor window = at::cat({conv, part(0, C).unsqueeze(1)}, 1);
    conv = window.narrow(1, 1, Kc);
    const Tensor sums = (window * wide(weights_.conv)).sum(1);
    const Tensor mixed = sums * sums.sigmoid();
    const auto keys = [&](int64_t first) {
      const Tensor x = mixed.narrow(0, first, Hk * Dk).view({Hk, Dk});
      const Tensor unit = x / (x.square().sum(-1, true) + 1e-6).sqrt();
      return groups_apart ? unit.repeat({Hv / Hk, 1})
                          : unit.repeat_interleave(Hv / Hk, 0);
    };
    const Tensor q = keys(0) / std::sqrt(static_cast<double>(Dk));
    const Tensor k = keys(Hk * Dk);
    const Tensor v = mixed.narrow(0, 2 * Hk * Dk, Hv * Dv).view({Hv, Dv});
    const Tensor z = part(C, Hv * Dv).view({Hv, Dv});
    const Tensor beta = part(C + Hv * Dv, Hv).sigmoid();
    const Tensor dt = part(C + Hv * Dv + Hv, Hv) + wide(weights_.dt_bias);
    const Tensor alpha = (wide(weights_.decay) * dt.exp().log1p()).exp();
    state = state * alpha.view({Hv, 1, 1});
    const Tensor read = (state * k.unsqueeze(2)).sum(1);
    const Tensor delta = (v - read) * beta.unsqueeze(1);
    state = state + k.unsqueeze(2) * delta.unsqueeze(1);
    const Tensor o = (state * q.unsqueeze(2)).sum(1);
    const Tensor scale =
        (o.square().mean(at::IntArrayRef{-1}, true) + config_.norm_eps).rsqrt();
    outputs.push_back(
        (o * scale * wide(weights_.norm) * z * z.sigmoid()).reshape({1, -1}));
  }
  return {at::cat(outputs).unsqueeze(0),
          {conv.unsqueeze(0), state.unsqueeze(0)}};
}

}  // namespace kvcache::model
