// src/model/forward/blocks.cpp - norms, attention and feed-forward of a layer.
#include "src/model/forward/blocks.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "src/model/forward/low_rank.h"
#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

// [B, heads, T, head_dim] of the columns [first, first + heads * head_dim).
Tensor head_view(const Tensor& from, const TokenSpans& tokens, int64_t first,
                 int64_t heads, int64_t head_dim) {
  const int64_t width = from.size(1);
  return from.as_strided({tokens.rows, heads, tokens.per_row, head_dim},
                         {tokens.per_row * width, head_dim, width, 1}, first);
}

}  // namespace

Tensor Pass::scratch(int64_t width, at::ScalarType dtype) const {
  const int64_t count = tokens.count();
  const int64_t rows =
      arithmetic.pads_rows ? PackedLinear::padded_rows(count) : count;
  Tensor made = at::empty({rows, width}, at::TensorOptions(dtype));
  const auto row_bytes =
      static_cast<size_t>(width) * static_cast<size_t>(made.element_size());
  std::memset(static_cast<char*>(made.data_ptr()) +
                  static_cast<size_t>(count) * row_bytes,
              0, static_cast<size_t>(rows - count) * row_bytes);
  return made;
}

Pass::Pass(const ModelConfig& config, std::span<const float> frequencies,
           const TokenSpans& of, LayerMemory& layers, Role of_role,
           const Arithmetic& in)
    : tokens(of), memory(layers), role(of_role), arithmetic(in) {
  if (!frequencies.empty()) rotary.emplace(tokens.positions, frequencies);
  const int64_t q_size = config.query_size(), kv_size = config.kv_size();
  hidden = scratch(config.hidden_size, at::kFloat);
  normed = scratch(config.hidden_size);
  heads = scratch(q_size + 2 * kv_size);
  const bool same = in.kv == in.dtype;
  kept = same ? heads : scratch(q_size + 2 * kv_size, in.kv);
  q = head_view(kept, tokens, 0, config.heads, config.head_dim);
  k = head_view(kept, tokens, q_size, config.kv_heads, config.head_dim);
  v = head_view(kept, tokens, q_size + kv_size, config.kv_heads,
                config.head_dim);
  if (tokens.count() != normed.size(0) || config.output_gate) {
    attended = scratch(q_size);
  }
  activated = scratch(config.intermediate_size);
}

Normalisation::Normalisation(const ModelConfig& config, NormWeights weights)
    : weight_(std::move(weights.weight)),
      bias_(std::move(weights.bias)),
      eps_(static_cast<float>(config.norm_eps)),
      centre_(config.norm == Norm::kLayer) {}

NormParameters Normalisation::parameters() const {
  return {weight_.const_data_ptr<float>(),
          bias_.defined() ? bias_.const_data_ptr<float>() : nullptr, eps_,
          centre_};
}

void Normalisation::add_and_apply(const Tensor& out, const Tensor& hidden,
                                  const Tensor& delta, int64_t tokens) const {
  const NormParameters norm = parameters();
  const int64_t width = hidden.size(1);
  with_row_type(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* to = data_of<T>(out);
    auto* residual = data_of<float>(hidden);
    const T* added = delta.defined() ? data_of<T>(delta) : nullptr;
    const auto add_norm = row_loops<T>().add_norm;
    for_each_row(tokens, width, [&](int64_t i) {
      add_norm(to + i * width, residual + i * width,
               added == nullptr ? nullptr : added + i * width, norm, width);
    });
  });
}

Tensor Mixer::run(Pass& pass, int64_t layer) const {
  const Tensor in =
      run_linear(input_, pass, layer, LinearPlace::kMixerInputs, pass.normed);
  return run_linear(output_, pass, layer, LinearPlace::kMixerOutput,
                    mix(pass, layer, in));
}

Attention::Attention(const ModelConfig& config, Parts parts)
    : Mixer(std::move(parts.qkv), std::move(parts.output)),
      q_norm_(std::move(parts.q_norm)),
      k_norm_(std::move(parts.k_norm)),
      heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim),
      gated_(config.output_gate) {
  options_.scale = config.attention_scale;
}

void Attention::turn(const Pass& pass, const Tensor& qkv) const {
  const int64_t width = qkv.size(1);  // gates, if any, are behind v
  const int64_t q_size = heads_ * head_dim_, kv_size = kv_heads_ * head_dim_;
  const int64_t turned_width = q_size + 2 * kv_size;
  const auto parameters = [](const std::optional<Normalisation>& norm) {
    return norm ? std::optional(norm->parameters()) : std::nullopt;
  };
  const auto q_norm = parameters(q_norm_);
  const auto k_norm = parameters(k_norm_);
  with_row_type(qkv.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(qkv);
    T* to = data_of<T>(pass.heads);
    const auto turn_heads = row_loops<T>().turn_heads;
    for_each_row(pass.tokens.count(), 2 * width, [&](int64_t i) {
      const Turn turn = pass.rotary ? pass.rotary->turn(i) : Turn{};
      const T* x = from + i * width;
      T* y = to + i * turned_width;
      turn_heads(y, x, heads_, head_dim_, q_norm ? &*q_norm : nullptr, turn);
      turn_heads(y + q_size, x + q_size, kv_heads_, head_dim_,
                 k_norm ? &*k_norm : nullptr, turn);
      const int64_t before_v = q_size + kv_size;
      std::memcpy(y + before_v, x + before_v,
                  static_cast<size_t>(kv_size) * sizeof(T));
    });
  });
}

// attended * sigmoid(gate) into pass.attended.
void Attention::gate(const Pass& pass, const Tensor& qkv,
                     const Tensor& attended) const {
  const int64_t width = heads_ * head_dim_;
  const int64_t before = qkv.size(1) - width;
  with_row_type(qkv.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* gates = data_of<T>(qkv) + before;
    const T* from = data_of<T>(attended);
    T* to = data_of<T>(pass.attended);
    const auto times_sigmoid = row_loops<T>().sigmoid;
    for_each_row(pass.tokens.count(), 4 * width, [&](int64_t i) {
      times_sigmoid(to + i * width, gates + i * qkv.size(1), from + i * width,
                    width);
    });
  });
}

Tensor Attention::mix(Pass& pass, int64_t layer, const Tensor& qkv) const {
  turn(pass, qkv);
  if (pass.kept.scalar_type() != qkv.scalar_type()) pass.kept.copy_(pass.heads);
  const KvView& view = pass.memory.update(layer, pass.k, pass.v);
  AttendOptions options = options_;
  options.role = pass.role;
  const Tensor attended =
      attend(pass.q, view, options).to(pass.arithmetic.dtype);
  if (gated_) {
    gate(pass, qkv, attended);
    return pass.attended;
  }
  const int64_t width = heads_ * head_dim_;
  if (!pass.attended.defined()) {
    return attended.transpose(1, 2).reshape({-1, width});
  }
  std::memcpy(pass.attended.data_ptr(), attended.const_data_ptr(),
              static_cast<size_t>(attended.numel()) * attended.element_size());
  return pass.attended;
}

GatedDelta::GatedDelta(const ModelConfig& config, Parts parts)
    : Mixer(std::move(parts.inputs), std::move(parts.output)),
      core_(config, parts.weights) {}

Tensor GatedDelta::mix(Pass& pass, int64_t layer, const Tensor& inputs) const {
  const Tensor mixed = pass.scratch(core_.outputs());
  core_.run(pass.tokens, inputs, pass.memory.state(layer), mixed,
            pass.memory.state_window(layer));
  return mixed;
}

FeedForward::FeedForward(const ModelConfig& config, Linear up, Linear down)
    : up_(std::move(up)),
      down_(std::move(down)),
      activation_(config.activation),
      gated_(config.gated_mlp) {}

template <typename T>
typename RowLoops<T>::Activate FeedForward::loop() const {
  switch (activation_) {
    case Activation::kGelu:
      return row_loops<T>().gelu;
    case Activation::kGeluTanh:
      return row_loops<T>().gelu_tanh;
    case Activation::kSilu:
      break;
  }
  return row_loops<T>().silu;
}
template RowLoops<float>::Activate FeedForward::loop<float>() const;

Tensor FeedForward::run(Pass& pass, int64_t layer) const {
  const Tensor up = run_linear(up_, pass, layer, LinearPlace::kUp, pass.normed);
  const int64_t width = pass.activated.size(1);
  with_row_type(up.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(up);
    T* to = data_of<T>(pass.activated);
    const auto activate = loop<T>();
    for_each_row(pass.tokens.count(), 4 * width, [&](int64_t i) {
      const T* gate = from + i * up.size(1);
      activate(to + i * width, gate, gated_ ? gate + width : nullptr, width);
    });
  });
  return run_linear(down_, pass, layer, LinearPlace::kDown, pass.activated);
}

}  // namespace kvcache::model
