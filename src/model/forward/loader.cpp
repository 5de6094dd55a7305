// src/model/forward/loader.cpp - the weights of a decoder, one piece at a time.
#include "src/model/forward/loader.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace kvcache::model {
namespace {

std::string prefix_of(int64_t layer) { return c10::str("blk.", layer, "."); }

}  // namespace

Loader::Loader(const ModelConfig& config, const WeightSource& source,
               at::ScalarType dtype, const LoadOptions& options,
               bool stays_packed)
    : config_(config),
      source_(source),
      dtype_(dtype),
      options_(options),
      stays_packed_(stays_packed) {
  for (const WeightInfo& info : source.tensors()) {
    int64_t values = 1;
    for (const int64_t size : info.shape) values *= size;
    all_values_ += values;
  }
}

std::string Loader::head_name() const {
  return config_.tie_word_embeddings ? "token_embd" : "output";
}

LinearWeights Loader::head() { return linear({head_name()}); }

LinearWeights Loader::qkv(int64_t layer) {
  const std::string prefix = prefix_of(layer);
  if (config_.output_gate) return gated_qkv(prefix);
  if (config_.fused_qkv) return linear({prefix + "attn_qkv"});
  return linear({prefix + "attn_q", prefix + "attn_k", prefix + "attn_v"});
}

LinearWeights Loader::attention_output(int64_t layer) {
  return linear({prefix_of(layer) + "attn_output"});
}

LinearWeights Loader::delta_inputs(int64_t layer) {
  const std::string prefix = prefix_of(layer);
  return linear({prefix + "attn_qkv", prefix + "attn_gate", prefix + "ssm_beta",
                 prefix + "ssm_alpha"});
}

LinearWeights Loader::delta_output(int64_t layer) {
  return linear({prefix_of(layer) + "ssm_out"});
}

DeltaWeights Loader::delta(int64_t layer) {
  const std::string prefix = prefix_of(layer) + "ssm_";
  // In braces: evaluated from left to right.
  return {copy(prefix + "conv1d.weight"), copy(prefix + "a"),
          copy(prefix + "dt.bias"), copy(prefix + "norm.weight")};
}

LinearWeights Loader::up(int64_t layer) {
  const std::string prefix = prefix_of(layer);
  if (!config_.gated_mlp) return linear({prefix + "ffn_up"});
  return linear({prefix + "ffn_gate", prefix + "ffn_up"});
}

LinearWeights Loader::down(int64_t layer) {
  return linear({prefix_of(layer) + "ffn_down"});
}

NormWeights Loader::attention_norm(int64_t layer) {
  return norm(prefix_of(layer) + "attn_norm");
}

NormWeights Loader::q_norm(int64_t layer) {
  return norm(prefix_of(layer) + "attn_q_norm");
}

NormWeights Loader::k_norm(int64_t layer) {
  return norm(prefix_of(layer) + "attn_k_norm");
}

NormWeights Loader::feed_forward_norm(int64_t layer) {
  return norm(prefix_of(layer) + "ffn_norm");
}

NormWeights Loader::norm(const std::string& name) {
  const std::string bias = name + ".bias";
  NormWeights made{copy(name + ".weight"), {}};
  if (config_.norm == Norm::kRmsPlusOne) made.weight.add_(1.0);
  if (source_.contains(bias)) made.bias = copy(bias);
  return made;
}

// A copy: what the source returns may lie on the mapped file.
Tensor Loader::copy(const std::string& name) {
  Tensor made = source_.read(name, at::kFloat).clone();
  bytes_ += static_cast<size_t>(made.numel()) * sizeof(float);
  values_ += made.numel();
  return made;
}

Tensor Loader::gates_apart(const Tensor& rows) const {
  const Tensor heads = rows.view({config_.heads, 2, config_.head_dim, -1});
  return at::cat({heads.select(1, 0), heads.select(1, 1)})
      .view({2, config_.query_size(), -1});
}

LinearWeights Loader::gated_qkv(const std::string& prefix) {
  const auto stack = [&](const std::string& kind) {
    const Tensor q =
        gates_apart(source_.read(prefix + "attn_q" + kind, dtype_));
    const auto rows = [&](const char* name) {
      return source_.read(prefix + name + kind, dtype_).view({-1, q.size(2)});
    };
    return at::cat({q[0], rows("attn_k"), rows("attn_v"), q[1]});
  };
  LinearWeights made;
  if (stays_packed_) {
    made.rows = gated_rows(prefix);
  } else {
    made.weight = stack(".weight");
  }
  if (config_.qkv_bias) made.bias = stack(".bias").view({-1});
  count(made);
  return made;
}

// The same rows as those of gates_apart() and below.
std::vector<RowPiece> Loader::gated_rows(const std::string& prefix) const {
  const std::string q = prefix + "attn_q.weight";
  std::vector<RowPiece> rows;
  const auto heads = [&](int64_t which) {
    for (int64_t head = 0; head < config_.heads; ++head) {
      rows.push_back(
          {q, (2 * head + which) * config_.head_dim, config_.head_dim});
    }
  };
  heads(0);
  for (const char* name : {"attn_k.weight", "attn_v.weight"}) {
    rows.push_back({prefix + name, 0, source_.shape(prefix + name).at(0)});
  }
  heads(1);
  return rows;
}

LinearWeights Loader::linear(const std::vector<std::string>& names) {
  LinearWeights made;
  made.bias = stacked_biases(names);
  if (!stays_packed_) {
    made.weight = stacked(names);
  } else {
    for (const std::string& name : names) {
      const std::string matrix = name + ".weight";
      made.rows.push_back({matrix, 0, source_.shape(matrix).at(0)});
    }
  }
  count(made);
  return made;
}

void Loader::count(const LinearWeights& weights) {
  int64_t values = weights.weight.defined() ? weights.weight.numel() : 0;
  if (weights.bias.defined()) values += weights.bias.numel();
  for (const RowPiece& piece : weights.rows) {
    values_ += piece.count * source_.shape(piece.name).at(1);
  }
  bytes_ += static_cast<size_t>(values) * c10::elementSize(dtype_);
  values_ += values;
}

void Loader::finished() const {
  source_.release_pages();
  if (!options_.progress) return;
  options_.progress(std::min(
      1.0, static_cast<double>(values_) / static_cast<double>(all_values_)));
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

}  // namespace kvcache::model
