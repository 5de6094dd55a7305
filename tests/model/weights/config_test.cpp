// config_test.cpp - one configuration from the words of every family.

#include "kvcache/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kvcache/model/gguf.h"
#include "tests/model/weights/tiny_llama.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::error_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TempFolder;

class ConfigJson : public ::testing::Test {
 protected:
  ModelConfig read(const std::string& text) {
    folder_.write("config.json", text);
    return config_from_json(folder_.path(),
                            {.log = [this](LogLevel, std::string_view line) {
                              log_.emplace_back(line);
                            }});
  }
  std::string error(const std::string& text) {
    return error_text([&] { read(text); });
  }
  // A model of `type` with the sizes that every family but gpt2 needs.
  static std::string sized(const std::string& type, const std::string& more) {
    return R"({"model_type": ")" + type + R"(", "vocab_size": 64,
      "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
      "intermediate_size": 48, "max_position_embeddings": 128)" +
           more + "}";
  }
  TempFolder folder_;
  std::vector<std::string> log_;
};

TEST_F(ConfigJson, Gpt2) {
  const ModelConfig config =
      read(R"({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32,
               "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": null,
               "layer_norm_epsilon": 1e-5, "eos_token_id": 63})");
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.intermediate_size, 128);
  EXPECT_EQ(config.context_length, 32);
  EXPECT_EQ(config.norm, Norm::kLayer);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.positions, Positions::kLearned);
  EXPECT_EQ(config.activation, Activation::kGeluTanh);
  EXPECT_FALSE(config.gated_mlp);
  EXPECT_TRUE(config.fused_qkv && config.qkv_bias && config.output_bias &&
              config.mlp_bias && config.tie_word_embeddings);
  EXPECT_THAT(config.eos_ids, ElementsAre(63));
}

TEST_F(ConfigJson, LlamaWithItsDefaults) {
  const ModelConfig config = read(sized("llama", ""));
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.norm, Norm::kRms);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_EQ(config.rope.rotary_dim, 8);
  EXPECT_EQ(config.rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(config.activation, Activation::kSilu);
  EXPECT_TRUE(config.gated_mlp);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias ||
               config.qk_norm || config.tie_word_embeddings);
  EXPECT_THAT(config.layer_types, Each(LayerType::kFull));
  EXPECT_EQ(config.layer_types.size(), 3U);
  EXPECT_THAT(config.eos_ids, IsEmpty());
  EXPECT_FALSE(config.bos_id.has_value());
}

TEST_F(ConfigJson, LlamaWithBiases) {
  const ModelConfig config =
      read(sized("llama", R"(, "attention_bias": true, "mlp_bias": true)"));
  EXPECT_TRUE(config.qkv_bias && config.output_bias && config.mlp_bias);
}

TEST_F(ConfigJson, MistralSlidesOnEveryLayer) {
  EXPECT_EQ(read(sized("mistral", R"(, "sliding_window": 16)")).sliding_window,
            16);
  EXPECT_THAT(read(sized("mistral", R"(, "sliding_window": 16)")).layer_types,
              Each(LayerType::kSliding));
  EXPECT_EQ(read(sized("mistral", "")).sliding_window, 4096);
  const ModelConfig full =
      read(sized("mistral", R"(, "sliding_window": null)"));
  EXPECT_FALSE(full.sliding_window.has_value());
  EXPECT_THAT(full.layer_types, Each(LayerType::kFull));
}

TEST_F(ConfigJson, Qwen2SlidesAboveAFirstLayer) {
  const ModelConfig off =
      read(sized("qwen2", R"(, "sliding_window": 4, "max_window_layers": 1)"));
  EXPECT_FALSE(off.sliding_window.has_value());
  EXPECT_THAT(off.layer_types, Each(LayerType::kFull));
  EXPECT_TRUE(off.qkv_bias);
  EXPECT_FALSE(off.output_bias);
  const ModelConfig on = read(sized("qwen2", R"(, "use_sliding_window": true,
                              "sliding_window": 4, "max_window_layers": 1)"));
  EXPECT_EQ(on.sliding_window, 4);
  EXPECT_THAT(on.layer_types, ElementsAre(LayerType::kFull, LayerType::kSliding,
                                          LayerType::kSliding));
  const ModelConfig listed =
      read(sized("qwen2", R"(, "use_sliding_window": true, "sliding_window": 4,
      "layer_types": ["sliding_attention", "full_attention",
                      "full_attention"])"));
  EXPECT_EQ(listed.layer_types[0], LayerType::kSliding);
}

TEST_F(ConfigJson, Qwen3HasNormsAndItsOwnHeadSize) {
  const ModelConfig config = read(sized("qwen3", ""));
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.rope.rotary_dim, 128);
  EXPECT_EQ(read(sized("qwen3", R"(, "head_dim": 16)")).head_dim, 16);
}

TEST_F(ConfigJson, RopeScalingInOldAndNewWords) {
  const ModelConfig old =
      read(sized("llama", R"(, "rope_theta": 500000.0, "rope_scaling": {
        "type": "linear", "factor": 2.0})"));
  EXPECT_EQ(old.rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(old.rope.theta, 500000.0);
  EXPECT_EQ(old.rope.factor, 2.0);
  const ModelConfig now = read(sized("llama", R"(, "rope_parameters": {
        "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64})"));
  EXPECT_EQ(now.rope.scaling, RopeScaling::kLlama3);
  EXPECT_EQ(now.rope.theta, 500000.0);
  EXPECT_EQ(now.rope.factor, 8.0);
  EXPECT_EQ(now.rope.original_context, 64);
  EXPECT_EQ(read(sized("llama", R"(, "rope_scaling": null)")).rope.scaling,
            RopeScaling::kNone);
  EXPECT_THAT(
      error(sized("llama", R"(, "rope_scaling": {"type": "yarn"})")),
      HasSubstr("rope_scaling type \"yarn\" is not supported; supported "
                "are default, linear and llama3."));
  EXPECT_THAT(error(sized("llama", R"(, "rope_scaling": {"type": "linear"})")),
              HasSubstr("key factor is missing"));
  EXPECT_THAT(error(sized("llama", R"(, "rope_parameters": {"full_attention":
                                        {"rope_type": "default"}})")),
              HasSubstr("\"full_attention\" is not supported"));
  EXPECT_THAT(
      error(sized("llama", R"(, "rope_parameters": {"rope_type": "llama3",
        "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
        "original_max_position_embeddings": 64})")),
      HasSubstr("high_freq_factor 4 must be above low_freq_factor 4"));
}

TEST_F(ConfigJson, EndTokensOfBothFilesCount) {
  // K105 NVIDIA/TensorRT-Model-Connect#640: only the scalar was read.
  folder_.write("generation_config.json", R"({"eos_token_id": [5, 9]})");
  EXPECT_THAT(read(sized("llama", R"(, "eos_token_id": 5)")).eos_ids,
              ElementsAre(5, 9));
  EXPECT_THAT(read(sized("llama", R"(, "eos_token_id": [7, 8])")).eos_ids,
              ElementsAre(7, 8, 5, 9));
  EXPECT_THAT(read(sized("llama", R"(, "eos_token_id": null)")).eos_ids,
              ElementsAre(5, 9));
  folder_.write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_THAT(read(sized("llama", "")).eos_ids, IsEmpty());
  EXPECT_THAT(log_, IsEmpty());
}

TEST_F(ConfigJson, EndTokensOutsideTheVocabularyAreDroppedWithAWarning) {
  const ModelConfig config = read(
      sized("llama", R"(, "eos_token_id": [64, 3], "bos_token_id": 50256)"));
  EXPECT_THAT(config.eos_ids, ElementsAre(3));
  EXPECT_FALSE(config.bos_id.has_value());
  ASSERT_EQ(log_.size(), 2U);
  EXPECT_THAT(log_[0], HasSubstr("eos_token_id 64 is outside the vocabulary of "
                                 "64; it is ignored."));
  EXPECT_THAT(error(sized("llama", R"(, "eos_token_id": -1)")),
              HasSubstr("eos_token_id must not be negative but is -1"));
  EXPECT_THAT(error(sized("llama", R"(, "eos_token_id": "5")")),
              HasSubstr("key eos_token_id must be a whole number but is"));
  std::string many = "0";
  for (int i = 0; i < 1024; ++i) many += ",0";
  EXPECT_THAT(error(sized("llama", ", \"eos_token_id\": [" + many + "]")),
              HasSubstr("eos_token_id must name at most 1024 tokens but there "
                        "are 1025; correct the file."));
}

TEST_F(ConfigJson, NumbersThatContradictAreNamed) {  // K85
  const std::string path = (folder_.path() / "config.json").string();
  EXPECT_EQ(error(sized("llama", R"(, "num_key_value_heads": 3)")),
            "[ModelConfig] " + path +
                ": num_attention_heads 4 must be a multiple of "
                "num_key_value_heads 3; the file is damaged or of a model that "
                "is not supported.");
  for (const char* key : {"num_key_value_heads", "head_dim"}) {
    for (const char* value : {"0", "-1", "9223372036854775807"}) {
      EXPECT_THAT(
          error(sized("llama", ", \"" + std::string(key) + "\": " + value)),
          AllOf(HasSubstr(key), HasSubstr(value)));
    }
  }
  const std::vector<std::string> keys{
      "vocab_size",          "hidden_size",       "num_hidden_layers",
      "num_attention_heads", "intermediate_size", "max_position_embeddings"};
  for (const std::string& key : keys) {
    for (const char* value : {"0", "-4", "9223372036854775807", "1e3", "\"4\"",
                              "4.5", "18446744073709551615", "[]"}) {
      std::string text = sized("llama", "");
      const size_t at = text.find(':', text.find("\"" + key + "\"")) + 1;
      text.replace(at, text.find_first_of(",}", at) - at, value);
      EXPECT_NE(error(text), "no error") << key << " " << value;
    }
    std::string text = sized("llama", "");
    text.replace(text.find(key), key.size(), "x");
    EXPECT_THAT(error(text), HasSubstr("key " + key + " is missing"));
  }
  EXPECT_THAT(error(sized("llama", R"(, "head_dim": 7)")),
              HasSubstr("head_dim (attention.key_length) must be even"));
  EXPECT_THAT(error(sized("mistral", R"(, "sliding_window": 0)")),
              HasSubstr("sliding_window must be above 0 but is 0"));
  EXPECT_THAT(error(sized("qwen2", R"(, "layer_types": ["full_attention"])")),
              HasSubstr("layer_types must have 3 entries but has 1"));
  EXPECT_THAT(error(sized("qwen2", R"(, "layer_types": ["sliding_attention",
                     "full_attention", "full_attention"])")),
              HasSubstr("has sliding layers but there is no sliding_window"));
  EXPECT_THAT(
      error(sized("llama", R"(, "rope_theta": 0)")),
      HasSubstr("rope_theta (rope.freq_base) must be above 0 but is 0"));
  EXPECT_THAT(error(sized("llama", R"(, "rms_norm_eps": -1)")),
              HasSubstr("the epsilon of the norms must be 0 to 1 but is -1"));
}

TEST_F(ConfigJson, WhatIsNotSupportedIsNamed) {
  EXPECT_THAT(error(sized("bert", "")),
              HasSubstr("model_type \"bert\" is not supported; supported are "
                        "gpt2, llama, mistral, qwen2, qwen3 and the text "
                        "model of qwen3_5."));
  EXPECT_THAT(error("{}"), HasSubstr("model_type \"\" is not supported"));
  EXPECT_THAT(error(sized("llama", R"(, "hidden_act": "relu6")")),
              HasSubstr("hidden_act \"relu6\" is not supported"));
  EXPECT_THAT(error(sized("llama", R"(, "quantization_config": {})")),
              HasSubstr("quantization_config \"present\" is not supported"));
  EXPECT_THAT(error(sized("qwen2", R"(, "layer_types": ["x", "x", "x"])")),
              HasSubstr("layer_types \"x\" is not supported"));
  EXPECT_THAT(error(sized("llama", R"(, "partial_rotary_factor": 0.5)")),
              HasSubstr("partial_rotary_factor"));
}

TEST_F(ConfigJson, ADamagedFileIsAnError) {
  EXPECT_THAT(error("{"), HasSubstr("must be JSON but got"));
  EXPECT_THAT(error("[]"), HasSubstr("must be a JSON object"));
  EXPECT_THAT(error(sized("llama", "") + std::string("\0{", 2)),
              HasSubstr("must be JSON but byte "));
  EXPECT_THAT(error(R"({"model_type": "llama", "model_type": "gpt2"})"),
              HasSubstr("key \"model_type\" stands twice in one object"));
  EXPECT_THAT(error(R"({"a":)" + std::string(100'000, '[')),
              HasSubstr("nesting must not exceed 64 levels"));
  folder_.write("generation_config.json", "[]");
  EXPECT_THAT(error(sized("llama", "")),
              HasSubstr("generation_config.json must be a JSON object"));
  std::filesystem::remove(folder_.path() / "config.json");
  EXPECT_THAT(error_text([&] { config_from_json(folder_.path()); }),
              HasSubstr("config.json must be readable but got: No such file"));
}

TEST(ConfigGguf, EveryEndTokenCounts) {  // K105
  const TempFolder folder;
  testing::GgufWriter writer =
      testing::tiny_llama_gguf(testing::tiny_llama_tensors());
  writer.u32("tokenizer.ggml.eot_token_id", 9);
  writer.u32("tokenizer.ggml.eom_token_id", 5);
  const GgufFile file(folder.write("f.gguf", writer.bytes()));
  const ModelConfig config = config_from_gguf(file);
  EXPECT_THAT(config.eos_ids, ElementsAre(5, 9));
  EXPECT_EQ(config.bos_id, 1);
}

TEST(ConfigGguf, RopeScalingAndDivisors) {
  const TempFolder folder;
  testing::GgufWriter writer =
      testing::tiny_llama_gguf(testing::tiny_llama_tensors());
  writer.text("llama.rope.scaling.type", "linear");
  writer.f32("llama.rope.scaling.factor", 4.0F);
  writer.floats("rope_freqs.weight", {4}, {1, 2, 4, 8});
  const GgufFile file(folder.write("f.gguf", writer.bytes()));
  const RopeConfig rope = config_from_gguf(file).rope;
  EXPECT_EQ(rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(rope.factor, 4.0);
  EXPECT_THAT(rope.divisors, ElementsAre(1, 2, 4, 8));
  for (const std::vector<float>& bad :
       {std::vector<float>{1, 1, 1, 0}, {1, 1, 1, NAN}, {1, 1, 1, -1}}) {
    writer.tensors.pop_back();
    writer.floats("rope_freqs.weight", {4}, bad);
    const GgufFile broken(folder.write("g.gguf", writer.bytes()));
    EXPECT_THAT(error_text([&] { config_from_gguf(broken); }),
                HasSubstr("values of rope_freqs.weight must be above 0"));
  }
  writer.tensors.pop_back();
  writer.floats("rope_freqs.weight", {3}, {1, 1, 1});
  const GgufFile broken(folder.write("h.gguf", writer.bytes()));
  EXPECT_THAT(error_text([&] { config_from_gguf(broken); }),
              HasSubstr("rope_freqs.weight must have 4 values but has the "
                        "shape [3]"));
}

TEST(InverseFrequencies, FollowTheirDefinition) {
  RopeConfig rope{.theta = 10000.0, .rotary_dim = 8};
  EXPECT_THAT(inverse_frequencies(rope),
              ElementsAre(1.0F, 0.1F, 0.01F, 0.001F));
  rope.divisors = {1, 2, 4, 8};
  EXPECT_THAT(inverse_frequencies(rope),
              ElementsAre(1.0F, 0.05F, 0.0025F, 0.000125F));
  rope.divisors.clear();
  rope.scaling = RopeScaling::kLinear;
  rope.factor = 4.0;
  EXPECT_THAT(inverse_frequencies(rope),
              ElementsAre(0.25F, 0.025F, 0.0025F, 0.00025F));
}

TEST(InverseFrequencies, OfLlama3AreThoseOfTransformers) {
  // transformers 5.24.0, ROPE_INIT_FUNCTIONS["llama3"], head size 8, theta
  // 500000, original context 64: one short wave, one blended, two long ones.
  const RopeConfig rope{.theta = 500000.0,
                        .rotary_dim = 8,
                        .scaling = RopeScaling::kLlama3,
                        .factor = 8.0,
                        .low_freq_factor = 0.25,
                        .high_freq_factor = 4.0,
                        .original_context = 64};
  const std::vector<float> want = {1.0F, 0.00586824957F, 0.000176776681F,
                                   6.64786967e-06F};
  const std::vector<float> got = inverse_frequencies(rope);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 1e-6F * want[i]) << i;
}

}  // namespace
}  // namespace kvcache::model
