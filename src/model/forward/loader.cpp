// src/model/forward/loader.cpp - the blocks of a decoder, made from its
// weights.
#include "src/model/forward/loader.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace kvcache::model {

Loader::Loader(const ModelConfig& config, const WeightSource& source,
               at::ScalarType dtype, const LoadOptions& options)
    : config_(config), source_(source), dtype_(dtype), options_(options) {
  for (const WeightInfo& info : source.tensors()) {
    int64_t values = 1;
    for (const int64_t size : info.shape) values *= size;
    all_values_ += values;
  }
}

PackedLinear Loader::head() {
  return linear({config_.tie_word_embeddings ? "token_embd" : "output"});
}

Layer Loader::layer(int64_t index) {
  const std::string prefix = c10::str("blk.", index, ".");
  TORCH_CHECK_NOT_IMPLEMENTED(
      config_.layer_types[static_cast<size_t>(index)] != LayerType::kLinear,
      "[Transformer] layer ", index, " of ", config_.source,
      " must be an attention layer but is linear attention, which this forward "
      "has not; use a model without it.");
  // In the order of use, and in braces: evaluated from left to right.
  return Layer{norm(prefix + "attn_norm"), attention(prefix),
               norm(prefix + "ffn_norm"), feed_forward(prefix)};
}

std::unique_ptr<Mixer> Loader::attention(const std::string& prefix) {
  Attention::Parts parts;
  if (config_.fused_qkv) {
    parts.qkv = linear({prefix + "attn_qkv"});
  } else {
    parts.qkv =
        linear({prefix + "attn_q", prefix + "attn_k", prefix + "attn_v"});
  }
  parts.output = linear({prefix + "attn_output"});
  if (config_.qk_norm) {
    parts.q_norm = norm(prefix + "attn_q_norm");
    parts.k_norm = norm(prefix + "attn_k_norm");
  }
  return std::make_unique<Attention>(config_, std::move(parts));
}

FeedForward Loader::feed_forward(const std::string& prefix) {
  std::vector<std::string> up;
  if (config_.gated_mlp) up.push_back(prefix + "ffn_gate");
  up.push_back(prefix + "ffn_up");
  PackedLinear first = linear(up);
  return {config_, std::move(first), linear({prefix + "ffn_down"})};
}

Normalisation Loader::norm(const std::string& name) {
  const std::string bias = name + ".bias";
  // Copies: what the source returns may lie on the mapped file.
  const Tensor weight = source_.read(name + ".weight", at::kFloat).clone();
  Tensor offset;
  if (source_.contains(bias)) offset = source_.read(bias, at::kFloat).clone();
  const int64_t values = weight.numel() * (offset.defined() ? 2 : 1);
  bytes_ += static_cast<size_t>(values) * sizeof(float);
  values_ += values;
  return {config_.norm, weight, offset, config_.norm_eps};
}

PackedLinear Loader::linear(const std::vector<std::string>& names) {
  const Tensor biases = stacked_biases(names);
  PackedLinear made(stacked(names), biases);
  const int64_t values =
      made.outputs() * made.inputs() + (biases.defined() ? biases.numel() : 0);
  bytes_ += static_cast<size_t>(values) * c10::elementSize(dtype_);
  values_ += values;
  probe(made);
  source_.release_pages();
  if (options_.progress) {
    options_.progress(std::min(
        1.0, static_cast<double>(values_) / static_cast<double>(all_values_)));
  }
  return made;
}

Tensor Loader::stacked(const std::vector<std::string>& names) const {
  if (names.size() == 1) return source_.read(names[0] + ".weight", dtype_);
  int64_t rows = 0, width = 0;
  for (const std::string& name : names) {
    const std::vector<int64_t>& shape = source_.shape(name + ".weight");
    rows += shape[0];
    width = shape[1];
  }
  Tensor all = at::empty({rows, width}, at::TensorOptions(dtype_));
  int64_t next = 0;
  for (const std::string& name : names) {
    const Tensor part = source_.read(name + ".weight", dtype_);
    all.narrow(0, next, part.size(0)).copy_(part);
    next += part.size(0);
  }
  return all;
}

Tensor Loader::stacked_biases(const std::vector<std::string>& names) const {
  std::vector<Tensor> biases;
  for (const std::string& name : names) {
    const std::string bias = name + ".bias";
    if (source_.contains(bias)) biases.push_back(source_.read(bias, dtype_));
  }
  if (biases.empty()) return {};
  TORCH_CHECK_VALUE(biases.size() == names.size(), "[Transformer] ",
                    config_.source, " has biases for ", biases.size(), " of ",
                    names.size(), " matrices from ", names[0],
                    " on; all of them or none must have one.");
  return at::cat(biases);
}

// Equal shapes run the same code: one of each is enough.
void Loader::probe(const PackedLinear& linear) {
  if (!row_exact_) return;
  if (!probed_.emplace(linear.outputs(), linear.inputs()).second) return;
  row_exact_ = linear.probe_row_exact();
  if (row_exact_ || !options_.log) return;
  options_.log(
      LogLevel::kWarning,
      c10::str("the ", linear.outputs(), " x ", linear.inputs(), " ", dtype_,
               " linear is not row-exact on this CPU: results "
               "may depend on how many rows run together"));
}

}  // namespace kvcache::model
