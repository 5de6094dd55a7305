// hybrid_weights_test.cpp - the text model of qwen3_5 from safetensors and from
// llama.cpp's GGUF.
//
// Bug reports: K85 antirez/gguf-tools#27 (sizes of 0), K89
// sgl-project/sglang#38363 (several layout conventions, unknown tensors).

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvcache/model/safetensors.h"
#include "kvcache/model/weights.h"
#include "tests/support/error_text.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_text;
using testing::GgufWriter;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using testing::TempFolder;

const std::string kData = "tests/reference/data/";
// exp of float32 differs by a last bit between instruction sets, and the
// converter ran on another machine.
constexpr double kDecayTolerance = 1e-6;

class Hybrid : public ::testing::Test {
 protected:
  OpenOptions options() {
    return {.log = [this](LogLevel, std::string_view line) {
      log_.emplace_back(line);
    }};
  }
  TempFolder folder_;
  std::vector<std::string> log_;
};

// Each of the seeded models, from both kinds of files.
class HybridFormats : public ::testing::TestWithParam<const char*> {};

// K89: the converter adds 1 to the norms, reorders the value heads and stores
// -exp(A_log); this is what it must come to.
TEST_P(HybridFormats, HoldTheSameModel) {
  const std::filesystem::path folder = kData + GetParam();
  const OpenedModel a = open_model(folder);
  const OpenedModel b = open_model(folder / "model.gguf");
  EXPECT_EQ(a.config.norm, Norm::kRmsPlusOne);
  EXPECT_EQ(b.config.norm, Norm::kRms);
  EXPECT_EQ(a.config.layer_types, b.config.layer_types);
  EXPECT_EQ(a.config.heads, b.config.heads);
  EXPECT_EQ(a.config.head_dim, b.config.head_dim);
  EXPECT_EQ(a.config.rope.rotary_dim, b.config.rope.rotary_dim);
  EXPECT_EQ(a.config.rope.theta, b.config.rope.theta);
  EXPECT_EQ(a.config.qkv_bias, b.config.qkv_bias);
  EXPECT_EQ(a.config.tie_word_embeddings, b.config.tie_word_embeddings);
  ASSERT_TRUE(a.config.linear_attention && b.config.linear_attention);
  EXPECT_EQ(a.config.linear_attention->key_heads,
            b.config.linear_attention->key_heads);
  EXPECT_EQ(a.config.linear_attention->value_head_dim,
            b.config.linear_attention->value_head_dim);
  ASSERT_EQ(a.weights->tensors().size(), b.weights->tensors().size());
  for (const WeightInfo& info : a.weights->tensors()) {
    SCOPED_TRACE(info.name);
    ASSERT_TRUE(b.weights->contains(info.name));
    EXPECT_EQ(info.shape, b.weights->shape(info.name));
    at::Tensor want = a.weights->read(info.name, at::kFloat);
    const at::Tensor got = b.weights->read(info.name, at::kFloat);
    EXPECT_TRUE(got.is_contiguous());
    if (info.name.ends_with("ssm_a")) {
      EXPECT_LT(want.sub(got).abs().max().item<double>(), kDecayTolerance);
      EXPECT_TRUE(got.lt(0).all().item<bool>());
      continue;
    }
    const bool plus_one = info.name.ends_with("norm.weight") &&
                          !info.name.ends_with("ssm_norm.weight");
    if (plus_one) want = want.add(1.0);
    EXPECT_TRUE(got.equal(want));
  }
}

INSTANTIATE_TEST_SUITE_P(Ratios, HybridFormats,
                         ::testing::Values("qwen3_5", "qwen3_5_three",
                                           "qwen3_5_seeing"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

TEST_F(Hybrid, RowsAndDtypesAreThoseOfTheWholeTensor) {
  for (const char* file : {"qwen3_5_three", "qwen3_5_three/model.gguf"}) {
    const OpenedModel model = open_model(kData + file);
    for (const char* name :
         {"blk.0.attn_qkv.weight", "blk.0.ssm_out.weight",
          "blk.0.ssm_alpha.weight", "blk.0.ssm_conv1d.weight"}) {
      const at::Tensor whole = model.weights->read(name, at::kFloat);
      at::Tensor rows = at::ones({3, whole.size(1)}, at::kBFloat16);
      model.weights->read_rows(name, whole.size(0) - 3, 3, rows);
      EXPECT_TRUE(
          rows.equal(whole.narrow(0, whole.size(0) - 3, 3).to(at::kBFloat16)))
          << file << name;
      EXPECT_TRUE(model.weights->read(name, at::kBFloat16)
                      .equal(whole.to(at::kBFloat16)));
    }
    const at::Tensor decay = model.weights->read("blk.0.ssm_a", at::kFloat);
    EXPECT_TRUE(model.weights->read("blk.0.ssm_a", at::kHalf)
                    .equal(decay.to(at::kHalf)));
  }
}

// A row whose values say which head they belong to: value head h of key head
// h / 3 must come out as h, whatever the order in the file.
TEST_F(Hybrid, ValueHeadsStandBesideTheirKeyHead) {
  const SafetensorsFolder file(kData + "qwen3_5_three");
  const OpenedModel model = open_model(kData + "qwen3_5_three/model.gguf");
  const at::Tensor bias =
      file.view("model.layers.0.linear_attn.dt_bias").to(at::kFloat);
  EXPECT_TRUE(model.weights->read("blk.0.ssm_dt.bias", at::kFloat).equal(bias));
  const at::Tensor stored = at::arange(6).view({2, 3}).t().reshape({6});
  const GgufFile gguf(kData + "qwen3_5_three/model.gguf");
  std::vector<float> raw(6);
  gguf.read_rows(*gguf.find("blk.0.ssm_dt.bias"), 0, 1, raw.data());
  for (int64_t i = 0; i < 6; ++i)
    EXPECT_EQ(raw[static_cast<size_t>(i)],
              bias[stored[i].item<int64_t>()].item<float>());
}

TEST_F(Hybrid, TheTowerAndTheDraftingLayersAreLeftOut) {
  const OpenedModel a = open_model(kData + "qwen3_5_seeing", options());
  ASSERT_THAT(log_, SizeIs(1));
  EXPECT_EQ(log_[0], kData +
                         "qwen3_5_seeing/config.json: left out are tensors "
                         "that text does not need: 1 of model.visual.*, 15 of "
                         "mtp.*.");
  log_.clear();
  const OpenedModel b =
      open_model(kData + "qwen3_5_seeing/model.gguf", options());
  EXPECT_THAT(log_, ElementsAre(HasSubstr("15 tensors of layers that only "
                                          "draft are left out.")));
  EXPECT_EQ(a.config.layers, 3);
  EXPECT_EQ(b.config.layers, 3);
  EXPECT_TRUE(a.config.tie_word_embeddings && b.config.tie_word_embeddings);
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

class HybridTensors : public Hybrid {
 protected:
  HybridTensors() : source_(kData + "qwen3_5") {
    for (const std::string& name : source_.names())
      tensors_.emplace_back(name, source_.view(name));
    std::filesystem::copy_file(kData + "qwen3_5/config.json",
                               folder_.path() / "config.json");
  }
  std::string folder_error() {
    write_safetensors(folder_.path() / "model.safetensors", tensors_);
    return error_text([&] { open_model(folder_.path(), options()); });
  }
  at::Tensor& at(const std::string& name) {
    for (auto& [key, tensor] : tensors_)
      if (key == name) return tensor;
    throw std::out_of_range(name);
  }
  SafetensorsFolder source_;
  NamedTensors tensors_;
};

TEST_F(HybridTensors, AMissingRenamedOrAddedOneIsNamed) {  // K89
  const std::string layer = "model.layers.1.linear_attn.";
  for (const char* name : {"A_log", "dt_bias", "conv1d.weight", "norm.weight",
                           "in_proj_qkv.weight", "out_proj.weight"}) {
    NamedTensors all = tensors_;
    for (auto& [key, tensor] : tensors_)
      if (key == layer + name) key += "2";
    EXPECT_THAT(
        folder_error(),
        AllOf(HasSubstr("1 tensor is missing: \"" + layer + name),
              HasSubstr("1 tensor is unexpected: \"" + layer + name + "2\"")));
    tensors_ = all;
  }
  for (const char* name :
       {"model.layers.3.linear_attn.A_log",
        "model.layers.0.self_attn.q_proj."
        "weight",
        "model.layers.0.linear_attn.conv1d.bias",
        "model.layers.4.mlp.up_proj."
        "weight",
        "model.layers.0.linear_attn.in_proj_ba.weight", "mtq.fc.weight"}) {
    NamedTensors all = tensors_;
    tensors_.emplace_back(name, at::ones({4}));
    EXPECT_THAT(folder_error(), HasSubstr("1 tensor is unexpected: \"" +
                                          std::string(name) + "\" [4];"));
    tensors_ = all;
  }
  EXPECT_EQ(folder_error(), "no error");
  EXPECT_THAT(log_, IsEmpty());
}

TEST_F(HybridTensors, AShapeThatContradictsTheConfigurationIsNamed) {
  const std::string conv = "model.layers.0.linear_attn.conv1d.weight";
  at(conv) = at::ones({64, 2, 4});
  EXPECT_THAT(folder_error(),
              HasSubstr("\"" + conv +
                        "\" is [64, 2, 4] but the configuration "
                        "needs [64, 4]"));
  at(conv) = at::ones({64, 4});  // as some converters of checkpoints write it
  EXPECT_EQ(folder_error(), "no error");
  at("model.layers.0.linear_attn.A_log") = at::ones({2});
  EXPECT_THAT(folder_error(), HasSubstr("is [2] but the configuration needs "
                                        "[4]"));
}

TEST_F(HybridTensors, BothRootsAreKnown) {
  for (auto& [name, tensor] : tensors_)
    if (name.starts_with("model."))
      name = "model.language_model." + name.substr(6);
  EXPECT_EQ(folder_error(), "no error");
  tensors_.emplace_back("model.norm.weight", at::ones({32}));
  EXPECT_THAT(folder_error(), HasSubstr("are the same weight"));
}

// The fixture's tensors under keys that each test makes anew.
class HybridGguf : public Hybrid {
 protected:
  HybridGguf() : source_(kData + "qwen3_5/model.gguf") {
    writer_.text("general.architecture", "qwen35");
    for (const auto& [key, value] :
         std::vector<std::pair<const char*, uint32_t>>{
             {"block_count", 4},
             {"context_length", 128},
             {"embedding_length", 32},
             {"feed_forward_length", 32},
             {"attention.head_count", 2},
             {"attention.head_count_kv", 1},
             {"attention.key_length", 16},
             {"rope.dimension_count", 4},
             {"ssm.conv_kernel", 4},
             {"ssm.state_size", 8},
             {"ssm.group_count", 2},
             {"ssm.time_step_rank", 4},
             {"ssm.inner_size", 32}})
      writer_.u32("qwen35." + std::string(key), value);
    writer_.f32("qwen35.attention.layer_norm_rms_epsilon", 1e-6F);
    for (const GgufTensor& tensor : source_.tensors())
      writer_.tensor(
          tensor.name, {tensor.shape.rbegin(), tensor.shape.rend()},
          std::string(reinterpret_cast<const char*>(tensor.data.data()),
                      tensor.data.size()));
  }
  OpenedModel open(const GgufWriter& writer) {
    return open_model(folder_.write("f.gguf", writer.bytes()), options());
  }
  std::string gguf_error(const GgufWriter& writer) {
    return error_text([&] { open(writer); });
  }
  GgufFile source_;
  GgufWriter writer_;
};

TEST_F(HybridGguf, LayersAreFlaggedOrCounted) {
  EXPECT_EQ(open(writer_).config.layer_types.back(), LayerType::kFull);
  GgufWriter writer = writer_;
  writer.u32("qwen35.full_attention_interval", 0);
  EXPECT_THAT(gguf_error(writer),
              HasSubstr("full_attention_interval must be above 0 but is 0"));
  writer = writer_;
  writer.array<uint8_t>("qwen35.attention.recurrent_layers", testing::kBool,
                        {1, 1, 1});
  EXPECT_THAT(gguf_error(writer),
              HasSubstr("recurrent_layers must have an entry for each of 4 "
                        "layers but has 3"));
  writer = writer_;
  writer.array<uint32_t>("qwen35.attention.recurrent_layers", testing::kU32,
                         {1, 1, 1, 0});
  EXPECT_THAT(gguf_error(writer),
              HasSubstr("must be an array of bools but is an array of u32"));
  // Other layers than the tensors belong to.
  writer = writer_;
  writer.array<uint8_t>("qwen35.attention.recurrent_layers", testing::kBool,
                        {1, 1, 0, 1});
  EXPECT_THAT(gguf_error(writer), HasSubstr("15 tensors are missing: "));
}

TEST_F(HybridGguf, SizesAreBounded) {  // K85
  for (const char* key :
       {"ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
        "ssm.time_step_rank", "ssm.inner_size"}) {
    const std::string name = "qwen35." + std::string(key);
    for (const uint32_t value : {0U, 4294967295U}) {
      GgufWriter writer = writer_;
      writer.without(name).u32(name, value);
      EXPECT_THAT(gguf_error(writer), HasSubstr(key)) << value;
    }
    GgufWriter writer = writer_;
    EXPECT_THAT(gguf_error(writer.without(name)),
                HasSubstr("key \"" + name + "\" is missing"));
  }
  GgufWriter writer = writer_;
  writer.without("qwen35.ssm.inner_size").u32("qwen35.ssm.inner_size", 33);
  EXPECT_THAT(gguf_error(writer),
              HasSubstr("ssm.inner_size 33 must be a multiple of "
                        "ssm.time_step_rank 4"));
  for (const uint32_t value : {4U, 4294967295U}) {
    writer = writer_;
    writer.u32("qwen35.nextn_predict_layers", value);
    EXPECT_THAT(gguf_error(writer),
                HasSubstr("nextn_predict_layers must be 0 to 3 but is"));
  }
  writer = writer_;
  writer.u32("qwen35.expert_count", 8);
  EXPECT_THAT(gguf_error(writer), HasSubstr("expert_count"));
  writer = writer_;
  writer.without("general.architecture");
  writer.text("general.architecture", "qwen35moe");
  EXPECT_THAT(gguf_error(writer),
              HasSubstr("general.architecture \"qwen35moe\" is not supported"));
}

TEST_F(HybridGguf, AMissingRenamedOrAddedTensorIsNamed) {  // K89
  for (const char* name : {"blk.1.ssm_a", "blk.1.post_attention_norm.weight",
                           "blk.1.ssm_dt.bias", "blk.3.attn_q_norm.weight"}) {
    GgufWriter writer = writer_;
    for (GgufWriter::Tensor& tensor : writer.tensors)
      if (tensor.name == name) tensor.name += "2";
    EXPECT_THAT(gguf_error(writer),
                AllOf(HasSubstr("1 tensor is missing: \"" + std::string(name)),
                      HasSubstr("1 tensor is unexpected: \"" +
                                std::string(name) + "2\"")));
  }
  for (const char* name : {"blk.4.ffn_up.weight", "blk.3.ssm_a", "mtp.fc"}) {
    GgufWriter writer = writer_;
    writer.floats(name, {4}, {1, 2, 3, 4});
    EXPECT_THAT(gguf_error(writer), HasSubstr("1 tensor is unexpected: \"" +
                                              std::string(name) + "\" [4];"));
  }
  EXPECT_THAT(open(writer_).weights->tensors(), SizeIs(56));
  EXPECT_THAT(log_, IsEmpty());
}

}  // namespace
}  // namespace kvcache::model
