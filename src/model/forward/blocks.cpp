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

template <typename T>
typename RowLoops<T>::Activate loop_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return row_loops<T>().gelu;
    case Activation::kGeluTanh:
      return row_loops<T>().gelu_tanh;
    case Activation::kSilu:
      break;
  }
  return row_loops<T>().silu;
}

// `x` through a linear, and what the adapters of its tokens add.
Tensor run_linear(const PackedLinear& linear, const Pass& pass, int64_t layer,
                  LinearPlace place, const Tensor& x) {
  Tensor y = linear(x);
  if (pass.adapters != nullptr) pass.adapters->add(layer, place, x, y);
  return y;
}

}  // namespace

Tensor scratch(int64_t tokens, int64_t width, at::ScalarType dtype) {
  const int64_t rows = PackedLinear::padded_rows(tokens);
  Tensor made = at::empty({rows, width}, at::TensorOptions(dtype));
  const auto row_bytes =
      static_cast<size_t>(width) * static_cast<size_t>(made.element_size());
  std::memset(static_cast<char*>(made.data_ptr()) +
                  static_cast<size_t>(tokens) * row_bytes,
              0, static_cast<size_t>(rows - tokens) * row_bytes);
  return made;
}

Pass::Pass(const ModelConfig& config, std::span<const float> frequencies,
           const TokenSpans& of, LayerMemory& layers, Role of_role,
           at::ScalarType dtype)
    : tokens(of), memory(layers), role(of_role) {
  if (!frequencies.empty()) rotary.emplace(tokens.positions, frequencies);
  const int64_t q_size = config.query_size(), kv_size = config.kv_size();
  const int64_t count = tokens.count();
  hidden = scratch(count, config.hidden_size, at::kFloat);
  normed = scratch(count, config.hidden_size, dtype);
  heads = scratch(count, q_size + 2 * kv_size, dtype);
  q = head_view(heads, tokens, 0, config.heads, config.head_dim);
  k = head_view(heads, tokens, q_size, config.kv_heads, config.head_dim);
  v = head_view(heads, tokens, q_size + kv_size, config.kv_heads,
                config.head_dim);
  if (count != normed.size(0) || config.output_gate) {
    attended = scratch(count, q_size, dtype);
  }
  activated = scratch(count, config.intermediate_size, dtype);
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

Attention::Attention(const ModelConfig& config, Parts parts)
    : parts_(std::move(parts)),
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
  const auto q_norm = parameters(parts_.q_norm);
  const auto k_norm = parameters(parts_.k_norm);
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

Tensor Attention::run(Pass& pass, int64_t layer) const {
  const Tensor qkv = run_linear(parts_.qkv, pass, layer,
                                LinearPlace::kMixerInputs, pass.normed);
  const auto output = [&](const Tensor& x) {
    return run_linear(parts_.output, pass, layer, LinearPlace::kMixerOutput, x);
  };
  turn(pass, qkv);
  const KvView& view = pass.memory.update(layer, pass.k, pass.v);
  AttendOptions options = options_;
  options.role = pass.role;
  const Tensor attended = attend(pass.q, view, options);
  if (gated_) {
    gate(pass, qkv, attended);
    return output(pass.attended);
  }
  const int64_t width = heads_ * head_dim_;
  if (!pass.attended.defined()) {
    return output(attended.transpose(1, 2).reshape({-1, width}));
  }
  std::memcpy(pass.attended.data_ptr(), attended.const_data_ptr(),
              static_cast<size_t>(attended.numel()) * attended.element_size());
  return output(pass.attended);
}

GatedDelta::GatedDelta(const ModelConfig& config, Parts parts)
    : inputs_(std::move(parts.inputs)),
      output_(std::move(parts.output)),
      core_(config, parts.weights) {}

Tensor GatedDelta::run(Pass& pass, int64_t layer) const {
  const Tensor inputs =
      run_linear(inputs_, pass, layer, LinearPlace::kMixerInputs, pass.normed);
  const Tensor mixed =
      scratch(pass.tokens.count(), core_.outputs(), inputs.scalar_type());
  core_.run(pass.tokens, inputs, pass.memory.state(layer), mixed);
  return run_linear(output_, pass, layer, LinearPlace::kMixerOutput, mixed);
}

FeedForward::FeedForward(const ModelConfig& config, PackedLinear up,
                         PackedLinear down)
    : up_(std::move(up)),
      down_(std::move(down)),
      activation_(config.activation),
      gated_(config.gated_mlp) {}

Tensor FeedForward::run(Pass& pass, int64_t layer) const {
  const Tensor up = run_linear(up_, pass, layer, LinearPlace::kUp, pass.normed);
  const int64_t width = pass.activated.size(1);
  with_row_type(up.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(up);
    T* to = data_of<T>(pass.activated);
    const auto activate = loop_of<T>(activation_);
    for_each_row(pass.tokens.count(), 4 * width, [&](int64_t i) {
      const T* gate = from + i * up.size(1);
      activate(to + i * width, gate, gated_ ? gate + width : nullptr, width);
    });
  });
  return run_linear(down_, pass, layer, LinearPlace::kDown, pass.activated);
}

}  // namespace kvcache::model
