// random_model.h - a model of a real one's shape with random weights: as much
// work, and nothing to say.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <map>
#include <memory>

#include "kvcache/model/transformer.h"

namespace kvcache::bench {

// bfloat16; norms near what trained ones are.
class RandomWeights final : public model::WeightSource {
 public:
  explicit RandomWeights(const model::ModelConfig& config) {
    at::Generator random = at::detail::createCPUGenerator(7);
    for (const auto& [name, shape] : model::expected_tensors(config)) {
      at::Tensor values = at::empty(shape, at::kFloat);
      if (name.ends_with("ssm_a")) {
        values.uniform_(-4, -0.01, random);  // -exp(A_log)
      } else if (shape.size() == 1) {
        values.uniform_(-0.1, 0.1, random);
      } else {
        const double width = std::sqrt(1.0 / static_cast<double>(shape[1]));
        values.uniform_(-width, width, random);
      }
      values_[name] = values.to(at::kBFloat16);
      model::WeightInfo info;
      info.name = info.name_in_file = name;
      info.shape = shape;
      info.dtype = at::kBFloat16;
      info.type_name = "BF16";
      add(info);
    }
  }
  void release_pages() const noexcept override {}

 private:
  at::Tensor do_read(const model::WeightInfo& info,
                     c10::ScalarType dtype) const override {
    return values_.at(info.name).to(dtype);
  }
  void do_read_rows(const model::WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    const at::Tensor rows =
        values_.at(info.name).narrow(0, first, count).to(at::kFloat);
    std::copy_n(rows.const_data_ptr<float>(), rows.numel(), out);
  }

  std::map<std::string, at::Tensor> values_;
};

// Of Qwen3.5-0.8B's shape (proto: 18 gated delta and 6 attention layers), with
// a smaller vocabulary, so that it fits beside others.
inline model::ModelConfig hybrid_config() {
  model::ModelConfig config;
  config.architecture = "qwen35";
  config.source = "random hybrid";
  config.vocab_size = 32768;
  config.hidden_size = 1024;
  config.layers = 24;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 256;
  config.intermediate_size = 3584;
  config.context_length = 8192;
  config.norm = model::Norm::kRmsPlusOne;
  config.qk_norm = true;
  config.output_gate = true;
  config.tie_word_embeddings = true;
  config.rope.theta = 1e7;
  config.rope.rotary_dim = 64;
  for (int64_t i = 0; i < config.layers; ++i) {
    config.layer_types.push_back(i % 4 == 3 ? model::LayerType::kFull
                                            : model::LayerType::kLinear);
  }
  config.linear_attention = model::LinearAttentionConfig{16, 16, 128, 128, 4};
  return config;
}

inline std::shared_ptr<const model::Transformer> random_hybrid(
    at::ScalarType dtype) {
  const model::ModelConfig config = hybrid_config();
  return std::make_shared<model::Transformer>(
      config, std::make_shared<RandomWeights>(config),
      model::LoadOptions{.dtype = dtype});
}

}  // namespace kvcache::bench
