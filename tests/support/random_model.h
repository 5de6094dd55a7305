// support/random_model.h - models of random weights in memory, hybrids first of
// all: T-HY of the case files, of any sizes.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kvcache/model/transformer.h"

namespace kvcache::testing {

// Every tensor that a configuration asks for, the same in each run.
class RandomWeights final : public model::WeightSource {
 public:
  explicit RandomWeights(const model::ModelConfig& config, uint64_t seed = 1)
      : random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    for (const model::ExpectedTensor& want : model::expected_tensors(config)) {
      values_.emplace(want.name, made(want, config));
      model::WeightInfo info;
      info.name = info.name_in_file = want.name;
      info.shape = want.shape;
      add(std::move(info));
    }
  }
  void release_pages() const noexcept override {}

 private:
  Tensor normal(at::IntArrayRef shape) {
    return at::randn(shape, random_, at::TensorOptions(at::kFloat));
  }
  // Rows of length about 1, decays that forget in 1 to some 50 tokens, norms
  // about 1.
  Tensor made(const model::ExpectedTensor& want,
              const model::ModelConfig& config) {
    const auto is = [&](const char* end) { return want.name.ends_with(end); };
    if (is("ssm_a")) {
      return at::rand(want.shape, random_, at::TensorOptions(at::kFloat))
          .add_(0.02)
          .neg_();
    }
    if (is("norm.weight")) {
      const bool apart =
          config.norm == model::Norm::kRmsPlusOne && !is("ssm_norm.weight");
      return normal(want.shape).mul_(0.2).add_(apart ? 0.0 : 1.0);
    }
    if (want.shape.size() == 1 || is("token_embd.weight")) {
      return normal(want.shape);
    }
    return normal(want.shape)
        .mul_(1.0 / std::sqrt(static_cast<double>(want.shape[1])));
  }
  Tensor do_read(const model::WeightInfo& info,
                 c10::ScalarType dtype) const override {
    return values_.at(info.name).to(dtype);
  }
  void do_read_rows(const model::WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    const Tensor rows = values_.at(info.name).narrow(0, first, count);
    std::copy_n(rows.const_data_ptr<float>(), rows.numel(), out);
  }

  at::Generator random_;
  std::map<std::string, Tensor> values_;
};

// T-HY: linear, linear, linear, full; 2 key and 4 value heads of 8.
inline model::ModelConfig hybrid_config() {
  model::ModelConfig config;
  config.architecture = "random hybrid";
  config.source = "memory";
  config.vocab_size = 64;
  config.hidden_size = 32;
  config.layers = 4;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 16;
  config.intermediate_size = 32;
  config.context_length = 128;
  config.norm = model::Norm::kRmsPlusOne;
  config.rope.rotary_dim = 4;
  config.qk_norm = true;
  config.output_gate = true;
  const auto linear = model::LayerType::kLinear;
  config.layer_types = {linear, linear, linear, model::LayerType::kFull};
  config.linear_attention = model::LinearAttentionConfig{.key_heads = 2,
                                                         .value_heads = 4,
                                                         .key_head_dim = 8,
                                                         .value_head_dim = 8,
                                                         .conv_kernel = 4};
  return config;
}

inline std::shared_ptr<const model::Transformer> random_model(
    const model::ModelConfig& config, at::ScalarType dtype = at::kFloat,
    model::ForwardKind forward = model::ForwardKind::kAuto,
    model::WeightPacking packing = model::WeightPacking::kNone) {
  return std::make_shared<const model::Transformer>(
      config, std::make_shared<RandomWeights>(config),
      model::LoadOptions{
          .dtype = dtype, .packing = packing, .forward = forward});
}

// A random adapter of every linear from layer `first` on.
inline model::Adapter random_adapter(const model::ModelConfig& config,
                                     const std::string& name, int64_t rank,
                                     int64_t first = 0) {
  const auto random =
      at::make_generator<at::CPUGeneratorImpl>(std::hash<std::string>()(name));
  const auto some = [&](int64_t rows, int64_t columns) {
    return at::randn({rows, columns}, random, at::TensorOptions(at::kFloat))
        .mul_(0.2);
  };
  model::Adapter adapter{name, "digest of " + name, {}};
  for (const auto& want : model::expected_tensors(config)) {
    if (!want.name.starts_with("blk.") || want.shape.size() != 2 ||
        want.name.ends_with("conv1d.weight")) {
      continue;
    }
    model::AdapterModule module{want.name, some(rank, want.shape[1]),
                                some(want.shape[0], rank)};
    if (layer_of(module) >= first) adapter.modules.push_back(std::move(module));
  }
  return adapter;
}

}  // namespace kvcache::testing
