// smollm2_weights_test.cpp - the real GGUF: every tensor, sums, loading time.

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "kvcache/model/weights.h"
#include "tests/support/model_path.h"

namespace kvcache::model {
namespace {

using ::testing::ElementsAre;

class Smollm2 : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::smollm2_path();
    if (path_.empty()) GTEST_SKIP() << testing::kNoModel;
  }
  std::filesystem::path path_;
};

TEST_F(Smollm2, IsDescribedByItsMetadata) {
  const OpenedModel model = open_model(path_);
  const ModelConfig& config = model.config;
  EXPECT_EQ(config.architecture, "llama");
  EXPECT_EQ(config.layers, 30);
  EXPECT_EQ(config.hidden_size, 576);
  EXPECT_EQ(config.heads, 9);
  EXPECT_EQ(config.kv_heads, 3);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.intermediate_size, 1536);
  EXPECT_EQ(config.context_length, 8192);
  EXPECT_EQ(config.vocab_size, 49152);
  EXPECT_EQ(config.rope.theta, 100000.0);
  EXPECT_FLOAT_EQ(config.norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_THAT(config.eos_ids, ElementsAre(2));
  EXPECT_EQ(config.bos_id, 1);
  EXPECT_TRUE(model.quantised);
}

TEST_F(Smollm2, HasItsTensors) {
  const OpenedModel model = open_model(path_);
  const auto& tensors = model.weights->tensors();
  EXPECT_EQ(tensors.size(), 272U);
  const auto of_type = [&](const char* type) {
    return std::count_if(
        tensors.begin(), tensors.end(),
        [&](const WeightInfo& info) { return info.type_name == type; });
  };
  EXPECT_EQ(of_type("q4_1"), 210);
  EXPECT_EQ(of_type("f32"), 61);
  EXPECT_EQ(of_type("q8_0"), 1);
  EXPECT_EQ(model.weights->shape("blk.29.ffn_down.weight"),
            (std::vector<int64_t>{576, 1536}));
}

TEST_F(Smollm2, HasTheNumbersOfTheReference) {
  // The Python package gguf 0.19.0: sums in float64 of the dequantised values.
  struct Sums {
    const char* name;
    double sum;
    double magnitude;
  };
  const Sums all[] = {{"token_embd.weight", -15353.0444942, 2802153.61981},
                      {"blk.0.attn_q.weight", 59.2232208252, 63395.3987274},
                      {"blk.12.ffn_down.weight", 145.068008423, 134791.430496},
                      {"blk.29.attn_k.weight", 87.8924179077, 11157.162529},
                      {"blk.7.attn_v.weight", 61.6945800781, 14284.740387},
                      {"output_norm.weight", 1038.33203125, 1045.09765625}};
  const OpenedModel model = open_model(path_);
  for (const Sums& want : all) {
    const at::Tensor values =
        model.weights->read(want.name, at::kFloat).to(at::kDouble);
    EXPECT_NEAR(values.sum().item<double>(), want.sum, 1e-9 * want.magnitude)
        << want.name;
    EXPECT_NEAR(values.abs().sum().item<double>(), want.magnitude,
                1e-9 * want.magnitude)
        << want.name;
  }
}

TEST_F(Smollm2, HasItsHeadsInHalfRotationOrder) {
  // Rows of blk.29.attn_k.weight after numpy's reshape(3, 32, 2, 576)
  // .swapaxes(1, 2), at places that the reordering moves.
  const OpenedModel model = open_model(path_);
  const at::Tensor keys =
      model.weights->read("blk.29.attn_k.weight", at::kFloat);
  EXPECT_EQ(keys[1][0].item<float>(), 0.05859375F);
  EXPECT_EQ(keys[33][0].item<float>(), 0.1531982421875F);
  EXPECT_EQ(keys[69][2].item<float>(), 0.068359375F);
  EXPECT_EQ(keys[191][575].item<float>(), 0.081939697265625F);
}

TEST_F(Smollm2, ReadsARowOfTheEmbeddingAlone) {
  const OpenedModel model = open_model(path_);
  at::Tensor row = at::empty({1, 576}, at::kFloat);
  model.weights->read_rows("token_embd.weight", 28, 1, row);
  EXPECT_EQ(row[0][0].item<float>(), 0.015872955322265625F);
  EXPECT_EQ(row[0][3].item<float>(), 0.126983642578125F);
}

TEST_F(Smollm2, OpensAsFastAsTheParserAlone) {  // K82
  // ggml-org/llama.cpp#19856 guarded the texts and made loading very slow. The
  // check must stay small beside ggml's own parse of the same bytes.
  const auto now = [] { return std::chrono::steady_clock::now(); };
  using Milliseconds = std::chrono::duration<double, std::milli>;
  const MappedFile file(path_);
  check_gguf(file.bytes(), "warm");
  double check_ms = 1e9;
  double open_ms = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = now();
    check_gguf(file.bytes(), "timed");
    const auto middle = now();
    const GgufFile opened(path_);
    const auto end = now();
    check_ms = std::min(check_ms, Milliseconds(middle - start).count());
    open_ms = std::min(open_ms, Milliseconds(end - middle).count());
  }
  std::cout << "check " << check_ms << " ms, open (check included) " << open_ms
            << " ms\n";
  EXPECT_LT(check_ms, 0.5 * open_ms);
}

}  // namespace
}  // namespace kvcache::model
