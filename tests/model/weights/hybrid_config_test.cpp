// hybrid_config_test.cpp - the configuration of qwen3_5's text model.
//
// Bug report: K85 antirez/gguf-tools#27 (sizes of 0).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kvcache/model/config.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::error_text;
using ::testing::HasSubstr;
using testing::TempFolder;

class HybridConfig : public ::testing::Test {
 protected:
  ModelConfig read(const std::string& text) {
    folder_.write("config.json", text);
    return config_from_json(folder_.path());
  }
  std::string error(const std::string& text) {
    return error_text([&] { read(text); });
  }
  TempFolder folder_;
};

// The text part of a file, with `more` behind it.
std::string text_config(const std::string& more,
                        const std::string& type = "qwen3_5_text") {
  return R"({"model_type": ")" + type + R"(", "vocab_size": 64,
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 16,
    "intermediate_size": 48, "max_position_embeddings": 128)" +
         more + "}";
}

std::string seeing(const std::string& text, const std::string& more = "") {
  return R"({"model_type": "qwen3_5", "text_config": )" + text +
         R"(, "vision_config": {"depth": 1})" + more + "}";
}

TEST_F(HybridConfig, HasTheDefaultsOfItsClass) {
  const ModelConfig config = read(text_config(""));
  EXPECT_EQ(config.norm, Norm::kRmsPlusOne);
  EXPECT_TRUE(config.qk_norm && config.output_gate && config.gated_mlp);
  EXPECT_FALSE(config.qkv_bias || config.output_bias ||
               config.tie_word_embeddings);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.rope.rotary_dim, 64);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_THAT(config.layer_types,
              ElementsAre(LayerType::kLinear, LayerType::kLinear,
                          LayerType::kLinear, LayerType::kFull));
  ASSERT_TRUE(config.linear_attention.has_value());
  EXPECT_EQ(config.linear_attention->key_heads, 16);
  EXPECT_EQ(config.linear_attention->value_heads, 32);
  EXPECT_EQ(config.linear_attention->key_head_dim, 128);
  EXPECT_EQ(config.linear_attention->value_head_dim, 128);
  EXPECT_EQ(config.linear_attention->conv_kernel, 4);
  EXPECT_EQ(config.linear_attention->conv_channels(), 8192);
}

TEST_F(HybridConfig, LayersAreListedOrCounted) {
  EXPECT_THAT(
      read(text_config(R"(, "full_attention_interval": 2)")).layer_types,
      ElementsAre(LayerType::kLinear, LayerType::kFull, LayerType::kLinear,
                  LayerType::kFull));
  EXPECT_THAT(
      read(text_config(R"(, "full_attention_interval": 1)")).layer_types,
      Each(LayerType::kFull));
  // The list wins, as in transformers.
  EXPECT_THAT(read(text_config(R"(, "full_attention_interval": 2,
      "layer_types": ["full_attention", "linear_attention",
                      "linear_attention", "linear_attention"])"))
                  .layer_types,
              ElementsAre(LayerType::kFull, LayerType::kLinear,
                          LayerType::kLinear, LayerType::kLinear));
  EXPECT_THAT(error(text_config(R"(, "full_attention_interval": 0)")),
              HasSubstr("full_attention_interval must be above 0 but is 0"));
  EXPECT_THAT(error(text_config(R"(, "layer_types": ["full_attention"])")),
              HasSubstr("layer_types must have 4 entries but has 1"));
  EXPECT_THAT(error(text_config(R"(, "layer_types": [])")),
              HasSubstr("layer_types must have 4 entries but has 0"));
  EXPECT_THAT(error(text_config(R"(, "layer_types": ["sliding_attention"])")),
              HasSubstr("layer_types \"sliding_attention\" is not supported; "
                        "supported are full_attention and linear_attention."));
}

TEST_F(HybridConfig, TurnsAPartOfEachHead) {
  const auto turned = [&](const std::string& more) {
    return read(text_config(", \"head_dim\": 16" + more)).rope.rotary_dim;
  };
  EXPECT_EQ(turned(""), 4);
  EXPECT_EQ(turned(R"(, "partial_rotary_factor": 0.5)"), 8);
  EXPECT_EQ(turned(R"(, "rope_parameters": {"rope_theta": 7.0})"), 4);
  EXPECT_EQ(turned(R"(, "partial_rotary_factor": 0.125, "rope_parameters": {
                    "partial_rotary_factor": 1, "mrope_section": [11, 11, 10],
                    "mrope_interleaved": true, "rope_theta": 7.0})"),
            16);
  for (const char* bad : {"0", "-0.25", "1.5", "1e999"}) {
    EXPECT_NE(
        error(text_config(", \"partial_rotary_factor\": " + std::string(bad))),
        "no error")
        << bad;
  }
  EXPECT_THAT(error(text_config(R"(, "partial_rotary_factor": 1.5)")),
              HasSubstr("partial_rotary_factor must be above 0 and at most 1 "
                        "but is 1.5; correct the file."));
  EXPECT_THAT(error(text_config(R"(, "head_dim": 4)")),
              HasSubstr("rotary_dim (rope.dimension_count) must be even and 2 "
                        "to head_dim 4 but is 1"));
}

TEST_F(HybridConfig, OfAModelThatSeesTheTextPartIsRead) {
  const ModelConfig config =
      read(seeing(text_config(R"(, "eos_token_id": 7, "bos_token_id": null)"),
                  R"(, "tie_word_embeddings": true, "eos_token_id": [8, 7],
                     "bos_token_id": 3, "hidden_size": 999)"));
  EXPECT_EQ(config.hidden_size, 32);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_THAT(config.eos_ids, ElementsAre(7, 8));
  EXPECT_EQ(config.bos_id, 3);
  EXPECT_TRUE(read(seeing(text_config(R"(, "tie_word_embeddings": true)"),
                          R"(, "tie_word_embeddings": false)"))
                  .tie_word_embeddings);
  EXPECT_FALSE(read(seeing(text_config(""))).tie_word_embeddings);
  EXPECT_THAT(error(R"({"model_type": "qwen3_5"})"),
              HasSubstr("key text_config is missing"));
  EXPECT_THAT(error(R"({"model_type": "qwen3_5", "text_config": [1]})"),
              HasSubstr("key text_config must be an object"));
  EXPECT_THAT(error(seeing(text_config("", "qwen3_5_moe_text"))),
              HasSubstr("model_type of text_config \"qwen3_5_moe_text\" is not "
                        "supported; it must be qwen3_5_text."));
}

TEST_F(HybridConfig, WhatTheForwardHasNotIsAnError) {
  for (const char* type : {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next",
                           "qwen3_5_vision", "qwen3_5x"}) {
    EXPECT_THAT(error(text_config("", type)),
                HasSubstr("model_type \"" + std::string(type) +
                          "\" is not supported; supported are"));
  }
  EXPECT_THAT(error(text_config(R"(, "hidden_act": "gelu")")),
              HasSubstr("hidden_act \"gelu\" is not supported; the "
                        "convolutions of this family have silu."));
  EXPECT_THAT(error(text_config(R"(, "attn_output_gate": false)")),
              HasSubstr("attn_output_gate \"false\" is not supported"));
  EXPECT_THAT(error(text_config(R"(, "num_experts": 8)")),
              HasSubstr("num_experts \"8\" is not supported; use a dense"));
  EXPECT_THAT(error(seeing(text_config(R"(, "quantization_config": {})"))),
              HasSubstr("quantization_config \"present\" is not supported"));
  EXPECT_THAT(error(seeing(text_config(""), R"(, "quantization_config": {})")),
              HasSubstr("quantization_config \"present\" is not supported"));
}

TEST_F(HybridConfig, SizesAreBounded) {  // K85
  const auto with = [&](const std::string& key, const std::string& value) {
    return error(text_config(", \"" + key + "\": " + value));
  };
  for (const char* key :
       {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
        "linear_value_head_dim", "linear_conv_kernel_dim"}) {
    for (const char* value : {"0", "-1", "9223372036854775807"})
      EXPECT_THAT(
          with(key, value),
          AllOf(HasSubstr(key), HasSubstr(std::string(" but is ") + value)));
    for (const char* value : {"1e3", "\"4\"", "4.5", "[]", "{}", "true"})
      EXPECT_THAT(with(key, value),
                  HasSubstr("key " + std::string(key) + " must be"));
  }
  EXPECT_THAT(with("linear_conv_kernel_dim", "1"),
              HasSubstr("linear_conv_kernel_dim (ssm.conv_kernel) must be 2 to "
                        "16 but is 1"));
  EXPECT_THAT(with("linear_conv_kernel_dim", "17"), HasSubstr("but is 17"));
  EXPECT_THAT(with("linear_key_head_dim", "1025"),
              HasSubstr("must be 1 to 1024 but is 1025"));
  EXPECT_THAT(with("linear_num_value_heads", "24"),
              HasSubstr("linear_num_value_heads 24 must be a multiple of "
                        "linear_num_key_heads 16"));
}

}  // namespace
}  // namespace kvcache::model
