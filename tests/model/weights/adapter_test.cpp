// adapter_test.cpp - adapters from the files of PEFT: what is read, and what is
// refused, by name.
#include "kvcache/model/adapter.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "kvcache/model/safetensors.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::testing {
namespace {

using model::Adapter;
using model::load_adapter;
using model::ModelConfig;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

const fs::path kData = "tests/reference/data";

ModelConfig config_of(const std::string& model) {
  return model::config_from_json(kData / model);
}

json fields_of(const std::string& adapter) {
  std::ifstream file(kData / "adapters" / adapter / "adapter_config.json");
  return json::parse(file);
}

TEST(AdapterTest, HoldsBothHalvesOfEachLinear) {
  const Adapter adapter =
      load_adapter(kData / "adapters/llama_all", "any", config_of("llama"));
  EXPECT_EQ(adapter.name, "any");
  EXPECT_EQ(adapter.digest.size(), 32U);
  ASSERT_EQ(adapter.modules.size(), 2U * 7U);
  for (const auto& module : adapter.modules) {
    EXPECT_EQ(module.a.size(0), 4);
    EXPECT_EQ(module.b.size(1), 4);
    EXPECT_TRUE(module.a.is_contiguous() && module.b.is_contiguous());
    EXPECT_EQ(module.a.scalar_type(), at::kFloat);
  }
}

// B times alpha / sqrt(r); layers that are not named have none.
TEST(AdapterTest, ScalesAndLayersAreThoseOfTheFields) {
  const fs::path folder = kData / "adapters/llama_upper";
  const Adapter adapter = load_adapter(folder, "up", config_of("llama"));
  ASSERT_EQ(adapter.modules.size(), 2U);
  EXPECT_EQ(adapter.modules[0].weight, "blk.1.attn_q.weight");
  EXPECT_EQ(adapter.modules[1].weight, "blk.1.attn_v.weight");
  EXPECT_EQ(layer_of(adapter.modules[0]), 1);
  const model::SafetensorsFile file(folder / "adapter_model.safetensors");
  const std::string name = "base_model.model.model.layers.1.self_attn.q_proj.";
  const auto b = file.view(name + "lora_B.weight").mul(3 / std::sqrt(2.0));
  EXPECT_TRUE(at::allclose(adapter.modules[0].b, b));
  EXPECT_TRUE(adapter.modules[0].a.equal(file.view(name + "lora_A.weight")));
}

TEST(AdapterTest, TheDigestIsOfTheValues) {
  const auto digest = [](const char* name, const char* called) {
    return load_adapter(kData / "adapters" / name, called, config_of("llama"))
        .digest;
  };
  EXPECT_EQ(digest("llama_all", "a"), digest("llama_all", "b"));
  EXPECT_NE(digest("llama_all", "a"), digest("llama_upper", "a"));
}

// A copy of llama_upper that a test may spoil.
class SpoiltAdapterTest : public ::testing::Test {
 protected:
  SpoiltAdapterTest() {
    fs::copy(kData / "adapters/llama_upper", folder.path(),
             fs::copy_options::recursive);
    const model::SafetensorsFile file(weights());
    for (const auto& entry : file.entries()) {
      tensors.emplace_back(entry.name, file.view(entry.name).clone());
    }
  }
  fs::path weights() const {
    return folder.path() / "adapter_model.safetensors";
  }
  void write_tensors() const { model::write_safetensors(weights(), tensors); }
  void set(const std::string& key, const json& value) {
    fields[key] = value;
    folder.write("adapter_config.json", fields.dump());
  }
  std::string error() const {
    return error_text([&] { load_adapter(folder.path(), "x", config); });
  }
  at::Tensor& tensor(const std::string& end) {
    for (auto& [name, values] : tensors) {
      if (name.ends_with(end)) return values;
    }
    throw std::logic_error(end);
  }

  TempFolder folder;
  ModelConfig config = config_of("llama");
  json fields = fields_of("llama_upper");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
};

// Scales that differ in a digit which is not printed.
TEST_F(SpoiltAdapterTest, TheDigestIsOfTheScaleToo) {
  std::set<std::string> digests;
  for (const double alpha : {3.0, 3.00000001, 3.00000002}) {
    set("lora_alpha", alpha);
    digests.insert(load_adapter(folder.path(), "x", config).digest);
  }
  EXPECT_EQ(digests.size(), 3U);
}

TEST_F(SpoiltAdapterTest, ValuesAreFinite) {
  set("lora_alpha", 1e300);
  EXPECT_THAT(error(), AllOf(HasSubstr("lora_B.weight\" must be finite"),
                             HasSubstr("lora_alpha")));
  set("lora_alpha", 3);
  tensor("lora_A.weight")[0][0] = NAN;
  write_tensors();
  EXPECT_THAT(error(), HasSubstr("lora_A.weight\" must be finite"));
}

TEST_F(SpoiltAdapterTest, IsFineAsItIs) { EXPECT_EQ(error(), "no error"); }

TEST_F(SpoiltAdapterTest, FieldsThatAskForMoreAreNamed) {
  const std::pair<const char*, json> asked[] = {
      {"peft_type", "IA3"},
      {"bias", "all"},
      {"use_dora", true},
      {"lora_bias", true},
      {"modules_to_save", {"lm_head"}},
      {"rank_pattern", {{"q_proj", 8}}},
      {"alpha_pattern", {{"q_proj", 8}}},
      {"exclude_modules", {"k_proj"}},
      {"layer_replication", {{0, 1}}},
      {"trainable_token_indices", {1}},
      {"target_parameters", {"w"}},
      {"init_lora_weights", "pissa"},
      {"layers_pattern", "blocks"},
      {"something_of_next_year", 3},
      {"target_modules", ".*q_proj"}};
  for (const auto& [key, value] : asked) {
    SCOPED_TRACE(key);
    const json before = fields;
    set(key, value);
    EXPECT_THAT(error(), AllOf(HasSubstr("[load_adapter]"), HasSubstr(key),
                               HasSubstr("is not supported")));
    fields = before;
  }
}

TEST_F(SpoiltAdapterTest, FieldsThatAreNoneAreNamed) {
  const std::tuple<const char*, json, const char*> wrong[] = {
      {"r", 0, "r must be at least 1 but is 0"},
      {"r", "two", "key r must be a whole number"},
      {"r", nullptr, "key r is missing"},
      {"lora_alpha", "much", "key lora_alpha must be a number"},
      {"layers_to_transform", {1, 2}, "must be in [0, 2) but one is 2"},
      {"layers_to_transform", -1, "must be in [0, 2) but one is -1"},
      {"target_modules", {"q_proj", "c_attn"}, "but has \"c_attn\""},
      {"target_modules", {"lm_head"}, "(down_proj, gate_proj, k_proj"},
      {"target_modules", {"proj"}, "but has \"proj\""},
      {"target_modules", json::array(), "name none"},
      {"use_rslora", 1, "key use_rslora must be true or false"}};
  for (const auto& [key, value, text] : wrong) {
    SCOPED_TRACE(key + value.dump());
    const json before = fields;
    set(key, value);
    EXPECT_THAT(error(),
                AllOf(HasSubstr("[load_adapter]"),
                      HasSubstr("adapter_config.json"), HasSubstr(text)));
    fields = before;
  }
}

TEST_F(SpoiltAdapterTest, ShapesAreCheckedAgainstRankAndModel) {
  set("r", 3);
  EXPECT_THAT(error(), AllOf(HasSubstr("lora_A.weight"),
                             HasSubstr("must be [3, 32] but is [2, 32]"),
                             HasSubstr("must be [32, 3] but is [32, 2]")));
  set("r", 2);
  tensor("q_proj.lora_B.weight") = at::zeros({31, 2});
  write_tensors();
  EXPECT_THAT(error(), HasSubstr("must be [32, 2] but is [31, 2]"));
  tensor("q_proj.lora_B.weight") = at::zeros({32, 2}, at::kLong);
  write_tensors();
  EXPECT_THAT(error(), HasSubstr("must be floating-point but is Long"));
}

TEST_F(SpoiltAdapterTest, EveryTensorIsAccountedFor) {
  const auto all = tensors;
  tensors.erase(tensors.begin());
  write_tensors();
  EXPECT_THAT(error(), AllOf(HasSubstr(all[0].first), HasSubstr("is missing")));
  for (const char* more :
       {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_C.weight",
        "base_model.model.lm_head.lora_A.weight",
        "model.layers.1.self_attn.q_proj.lora_A.weight"}) {
    tensors = all;
    tensors.emplace_back(more, at::zeros({2, 32}));
    write_tensors();
    EXPECT_THAT(error(), AllOf(HasSubstr(more), HasSubstr("is unexpected")));
  }
}

TEST_F(SpoiltAdapterTest, FilesThatAreCutOrMissingAreRefused) {
  const auto size = fs::file_size(weights());
  for (const uintmax_t kept :
       {uintmax_t{0}, uintmax_t{7}, uintmax_t{200}, size - 1}) {
    write_tensors();
    fs::resize_file(weights(), kept);
    EXPECT_THAT(error(), AllOf(HasSubstr("adapter_model.safetensors"),
                               ::testing::Not("no error")))
        << kept;
  }
  fs::remove(weights());
  EXPECT_THAT(error(), HasSubstr("must have adapter_model.safetensors"));
  folder.write("adapter_config.json", "[]");
  write_tensors();
  EXPECT_THAT(error(), HasSubstr("must be an object"));
  folder.write("adapter_config.json", "{\"r\": 1");
  EXPECT_THAT(error(), HasSubstr("adapter_config.json"));
}

// Of another family, whose linears have other names, or of another size.
TEST_F(SpoiltAdapterTest, AnotherModelIsRefused) {
  config = config_of("gpt2");
  EXPECT_THAT(error(), HasSubstr("but has \"q_proj\""));
  config = config_of("qwen3");
  EXPECT_THAT(error(), HasSubstr("must be ["));
}

}  // namespace
}  // namespace kvcache::testing
