// weights_test.cpp - one model in two formats, and every tensor accounted for.
//
// Bug reports: K87 huggingface/transformers#31788, K90 vllm-project/vllm#53020,
// K91 ml-explore/mlx-lm#1298, and of K89 sgl-project/sglang#38363 the missing,
// renamed and added tensors. The rest of K89 is in hybrid_weights_test.cpp.

#include "kvcache/model/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/model/weights/tiny_llama.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::NamedTensors;
using ::testing::Not;
using testing::numbered;
using ::testing::SizeIs;
using testing::TempFolder;
using testing::tiny_llama_config;
using testing::tiny_llama_gguf;
using testing::tiny_llama_tensors;
using testing::write_tiny_llama;

class TinyLlama : public ::testing::Test {
 protected:
  OpenedModel open(const std::filesystem::path& path) {
    return open_model(path,
                      {.log = [this](LogLevel level, std::string_view line) {
                        EXPECT_EQ(level, LogLevel::kWarning);
                        log_.emplace_back(line);
                      }});
  }
  OpenedModel open_folder(const NamedTensors& tensors,
                          const std::string& config = tiny_llama_config()) {
    write_tiny_llama(folder_, tensors, config);
    return open(folder_.path());
  }
  OpenedModel open_gguf_file(const testing::GgufWriter& writer) {
    return open(folder_.write("model.gguf", writer.bytes()));
  }
  std::string folder_error(const NamedTensors& tensors,
                           const std::string& config = tiny_llama_config()) {
    return error_text([&] { open_folder(tensors, config); });
  }
  std::string gguf_error(const testing::GgufWriter& writer) {
    return error_text([&] { open_gguf_file(writer); });
  }
  TempFolder folder_;
  std::vector<std::string> log_;
};

void drop(NamedTensors& tensors, const std::string& name) {
  std::erase_if(tensors, [&](const auto& item) { return item.first == name; });
}

at::Tensor& tensor_of(NamedTensors& tensors, const std::string& name) {
  return std::find_if(tensors.begin(), tensors.end(),
                      [&](const auto& item) { return item.first == name; })
      ->second;
}

void expect_same_tensors(const WeightSource& a, const WeightSource& b) {
  ASSERT_EQ(a.tensors().size(), b.tensors().size());
  for (const WeightInfo& info : a.tensors()) {
    ASSERT_TRUE(b.contains(info.name)) << info.name;
    EXPECT_EQ(info.shape, b.shape(info.name)) << info.name;
    EXPECT_TRUE(
        a.read(info.name, at::kFloat).equal(b.read(info.name, at::kFloat)))
        << info.name;
  }
}

TEST_F(TinyLlama, IsTheSameFromBothFormats) {  // K87
  const OpenedModel a = open_folder(tiny_llama_tensors());
  const OpenedModel b = open_gguf_file(tiny_llama_gguf(tiny_llama_tensors()));
  expect_same_tensors(*a.weights, *b.weights);
  EXPECT_EQ(a.kind, FileKind::kSafetensors);
  EXPECT_EQ(b.kind, FileKind::kGguf);
  EXPECT_EQ(a.gguf, nullptr);
  ASSERT_NE(b.gguf, nullptr);
  EXPECT_FALSE(a.quantised || b.quantised);
  EXPECT_EQ(a.dtype, at::kFloat);
  EXPECT_EQ(b.dtype, at::kFloat);
  EXPECT_EQ(a.config.kv_heads, b.config.kv_heads);
  EXPECT_EQ(a.config.rope.theta, b.config.rope.theta);
  EXPECT_EQ(a.config.eos_ids, b.config.eos_ids);
  EXPECT_FALSE(b.config.tie_word_embeddings);
}

TEST_F(TinyLlama, BiasesOfQueryAndKeyAreReorderedToo) {  // K87
  const NamedTensors tensors = tiny_llama_tensors(true, true);
  // The files of Llama have a bias on the output projection as well.
  const OpenedModel a = open_folder(tensors, tiny_llama_config("false", R"(,
                                             "attention_bias": true)"));
  const OpenedModel b = open_gguf_file(tiny_llama_gguf(tensors));
  expect_same_tensors(*a.weights, *b.weights);
  EXPECT_TRUE(b.weights->contains("blk.1.attn_k.bias"));
  EXPECT_TRUE(b.config.qkv_bias && b.config.output_bias);
}

TEST_F(TinyLlama, RowsAreThoseOfTheWholeTensor) {
  write_tiny_llama(folder_, tiny_llama_tensors(), tiny_llama_config());
  folder_.write("model.gguf", tiny_llama_gguf(tiny_llama_tensors()).bytes());
  for (const char* name : {"", "model.gguf"}) {
    const OpenedModel model = open(folder_.path() / name);
    for (const char* tensor : {"token_embd.weight", "blk.1.attn_k.weight"}) {
      const at::Tensor whole = model.weights->read(tensor, at::kFloat);
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        at::Tensor rows = at::empty({3, 32}, dtype);
        model.weights->read_rows(tensor, 5, 3, rows);
        EXPECT_TRUE(rows.equal(whole.narrow(0, 5, 3).to(dtype))) << tensor;
      }
      model.weights->release_pages();
      at::Tensor row = at::empty({1, 32}, at::kFloat);
      model.weights->read_rows(tensor, 15, 1, row.data_ptr<float>());
      EXPECT_TRUE(row.equal(whole.narrow(0, 15, 1))) << tensor;
    }
  }
}

TEST_F(TinyLlama, ReadsInEachDtype) {
  const OpenedModel a = open_folder(tiny_llama_tensors());
  const OpenedModel b = open_gguf_file(tiny_llama_gguf(tiny_llama_tensors()));
  for (const auto* model : {&a, &b}) {
    const at::Tensor exact =
        model->weights->read("blk.0.ffn_up.weight", at::kFloat);
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const at::Tensor read =
          model->weights->read("blk.0.ffn_up.weight", dtype);
      EXPECT_EQ(read.scalar_type(), dtype);
      EXPECT_TRUE(read.is_contiguous());
      EXPECT_TRUE(read.equal(exact.to(dtype)));
    }
    EXPECT_THAT(
        error_text([&] {
          (void)model->weights->read("blk.0.ffn_up.weight", at::kInt);
        }),
        HasSubstr("dtype must be float32, bfloat16 or float16 but got Int"));
  }
}

TEST_F(TinyLlama, ATensorOutlivesItsModel) {
  at::Tensor table;
  {
    const OpenedModel model = open_folder(tiny_llama_tensors());
    table = model.weights->read("token_embd.weight", at::kFloat);
  }
  EXPECT_TRUE(table.equal(tiny_llama_tensors()[0].second));
}

TEST_F(TinyLlama, WrongNamesAndRowsAreErrors) {
  const OpenedModel model = open_folder(tiny_llama_tensors());
  const WeightSource& weights = *model.weights;
  at::Tensor out = at::empty({1, 32}, at::kFloat);
  EXPECT_EQ(error_text([&] { (void)weights.info("x"); }),
            "[WeightSource] no tensor \"x\" among 21; see tensors().");
  EXPECT_EQ(
      error_text([&] { weights.read_rows("token_embd.weight", 64, 1, out); }),
      "[WeightSource::read_rows] rows 64 to 65 of \"token_embd.weight\" must "
      "lie in 0 to 64.");
  EXPECT_THAT(
      error_text([&] { weights.read_rows("token_embd.weight", -1, 1, out); }),
      HasSubstr("rows -1 to 0"));
  EXPECT_THAT(
      error_text([&] { weights.read_rows("output_norm.weight", 0, 1, out); }),
      HasSubstr("must be a matrix but has the shape [32]"));
  EXPECT_THAT(
      error_text([&] { weights.read_rows("token_embd.weight", 0, 2, out); }),
      HasSubstr(
          "out must be [2, 32], contiguous float32, bfloat16 or float16"));
}

TEST_F(TinyLlama, TiedWithoutAHeadUsesTheEmbedding) {  // K90
  const OpenedModel model = open_folder(tiny_llama_tensors(/*head=*/false),
                                        tiny_llama_config("true"));
  EXPECT_TRUE(model.config.tie_word_embeddings);
  EXPECT_FALSE(model.weights->contains("output.weight"));
  EXPECT_THAT(model.weights->tensors(), SizeIs(20));
  const OpenedModel twin =
      open_gguf_file(tiny_llama_gguf(tiny_llama_tensors(/*head=*/false)));
  EXPECT_TRUE(twin.config.tie_word_embeddings);
  expect_same_tensors(*model.weights, *twin.weights);
}

TEST_F(TinyLlama, UntiedWithoutAHeadIsAnError) {  // K90
  EXPECT_EQ(folder_error(tiny_llama_tensors(/*head=*/false)),
            "[open_model] " + (folder_.path() / "config.json").string() +
                ": 1 tensor is missing: \"lm_head.weight\"; the files do not "
                "belong together or one is incomplete.");
}

TEST_F(TinyLlama, UntiedWithAHeadLoads) {  // K90
  const OpenedModel model = open_folder(tiny_llama_tensors());
  EXPECT_FALSE(model.config.tie_word_embeddings);
  EXPECT_TRUE(model.weights->contains("output.weight"));
}

TEST_F(TinyLlama, TiedWithAnEqualHeadLoadsWithoutIt) {  // K90, K91
  NamedTensors tensors = tiny_llama_tensors();
  tensor_of(tensors, "lm_head.weight") = tensors[0].second;
  const OpenedModel model = open_folder(tensors, tiny_llama_config("true"));
  EXPECT_TRUE(model.config.tie_word_embeddings);
  EXPECT_FALSE(model.weights->contains("output.weight"));
  EXPECT_THAT(model.weights->tensors(), SizeIs(20));
  EXPECT_THAT(log_, IsEmpty());
  // Equal in value is enough.
  tensor_of(tensors, "lm_head.weight") = tensors[0].second.to(at::kBFloat16);
  EXPECT_TRUE(open_folder(tensors, tiny_llama_config("true"))
                  .config.tie_word_embeddings);
}

TEST_F(TinyLlama, TiedWithADifferentHeadUsesItAndWarns) {  // K91
  const OpenedModel model =
      open_folder(tiny_llama_tensors(), tiny_llama_config("true"));
  EXPECT_FALSE(model.config.tie_word_embeddings);
  EXPECT_TRUE(model.weights->read("output.weight", at::kFloat)
                  .equal(tiny_llama_tensors().back().second));
  ASSERT_THAT(log_, SizeIs(1));
  EXPECT_EQ(log_[0], (folder_.path() / "config.json").string() +
                         ": tie_word_embeddings is true but lm_head.weight "
                         "differs from the embeddings; the file's head is "
                         "used.");
}

TEST_F(TinyLlama, AMissingTensorIsNamed) {  // K89
  NamedTensors tensors = tiny_llama_tensors();
  drop(tensors, "model.layers.1.self_attn.k_proj.weight");
  EXPECT_THAT(folder_error(tensors),
              HasSubstr("1 tensor is missing: "
                        "\"model.layers.1.self_attn.k_proj.weight\";"));
  EXPECT_THAT(gguf_error(tiny_llama_gguf(tensors)),
              HasSubstr("1 tensor is missing: \"blk.1.attn_k.weight\";"));
}

TEST_F(TinyLlama, ManyMissingTensorsAreCounted) {
  EXPECT_THAT(folder_error({}), HasSubstr("21 tensors are missing: "
                                          "\"model.embed_tokens.weight\", "));
  EXPECT_THAT(folder_error({}), HasSubstr(", ...;"));
}

TEST_F(TinyLlama, AnUnexpectedTensorIsNamed) {  // K89
  for (const char* name :
       {"extra.weight", "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight", "model.layers.x.weight",
        "model.layers.01.mlp.up_proj.weight", "model.norm.bias"}) {
    NamedTensors tensors = tiny_llama_tensors();
    tensors.emplace_back(name, numbered({2, 3}, 1));
    EXPECT_THAT(folder_error(tensors),
                HasSubstr("1 tensor is unexpected: \"" + std::string(name) +
                          "\" [2, 3];"));
    EXPECT_NE(gguf_error(tiny_llama_gguf(tensors)), "no error") << name;
  }
}

TEST_F(TinyLlama, ARenamedTensorIsMissingAndUnexpected) {  // K89
  NamedTensors tensors = tiny_llama_tensors();
  std::find_if(tensors.begin(), tensors.end(), [](const auto& item) {
    return item.first == "model.norm.weight";
  })->first = "model.norm2.weight";
  EXPECT_THAT(
      folder_error(tensors),
      AllOf(HasSubstr("1 tensor is missing: \"model.norm.weight\""),
            HasSubstr("1 tensor is unexpected: \"model.norm2.weight\"")));
}

TEST_F(TinyLlama, AShapeThatContradictsTheConfigurationIsNamed) {
  NamedTensors tensors = tiny_llama_tensors();
  tensor_of(tensors, "model.layers.0.self_attn.k_proj.weight") =
      numbered({32, 32}, 3);
  EXPECT_THAT(folder_error(tensors),
              HasSubstr("1 tensor is of another shape: "
                        "\"model.layers.0.self_attn.k_proj.weight\" is "
                        "[32, 32] but the configuration needs [16, 32];"));
  EXPECT_THAT(gguf_error(tiny_llama_gguf(tensors)),
              HasSubstr("\"blk.0.attn_k.weight\" is [32, 32] but the "
                        "configuration needs [16, 32];"));
  tensors = tiny_llama_tensors();
  tensor_of(tensors, "lm_head.weight") = numbered({63, 32}, 3);
  EXPECT_THAT(folder_error(tensors, tiny_llama_config("true")),
              HasSubstr("\"lm_head.weight\" is [63, 32] but the configuration "
                        "needs [64, 32]"));
}

TEST_F(TinyLlama, BuffersOfOldFilesAreIgnored) {
  NamedTensors tensors = tiny_llama_tensors();
  tensors.emplace_back("model.layers.0.self_attn.rotary_emb.inv_freq",
                       numbered({4}, 1));
  EXPECT_THAT(open_folder(tensors).weights->tensors(), SizeIs(21));
}

TEST_F(TinyLlama, NamesWithoutTheirRootAreKnown) {
  NamedTensors tensors = tiny_llama_tensors();
  for (auto& [name, tensor] : tensors)
    if (name.starts_with("model.")) name = name.substr(6);
  EXPECT_THAT(open_folder(tensors).weights->tensors(), SizeIs(21));
  tensors.emplace_back("model.norm.weight", numbered({32}, 1));
  EXPECT_THAT(folder_error(tensors), HasSubstr("are the same weight"));
}

TEST_F(TinyLlama, WeightsMustBeFloatingPoint) {
  NamedTensors tensors = tiny_llama_tensors();
  tensor_of(tensors, "model.norm.weight") = at::zeros({32}, at::kInt);
  EXPECT_THAT(folder_error(tensors),
              HasSubstr("tensor \"model.norm.weight\" is I32, but weights must "
                        "be floating-point"));
}

TEST_F(TinyLlama, PathsThatAreNoModelAreErrors) {
  const std::string at = folder_.path().string();
  EXPECT_EQ(error_text([&] { open(at + "/no"); }),
            "[open_model] " + at +
                "/no does not exist; give a folder with config.json and "
                "safetensors, or a .gguf file.");
  EXPECT_THAT(error_text([&] { open(at); }),
              HasSubstr("config.json must be readable but got: No such file"));
  folder_.write("config.json", tiny_llama_config());
  EXPECT_THAT(error_text([&] { open(at); }),
              HasSubstr("must contain model.safetensors or"));
  write_safetensors(at + "/model.safetensors", tiny_llama_tensors());
  EXPECT_THAT(error_text([&] { open(at + "/model.safetensors"); }),
              HasSubstr("is one file of a model; give its folder"));
  EXPECT_THAT(error_text([&] { open(at + "/config.json"); }),
              HasSubstr("must begin with GGUF but has"));
}

// The seeded models that the reference numbers are made with.
class BothFormats : public ::testing::TestWithParam<const char*> {};

TEST_P(BothFormats, HoldTheSameModel) {
  const std::filesystem::path folder =
      std::filesystem::path("tests/reference/data") / GetParam();
  const OpenedModel a = open_model(folder);
  const OpenedModel b = open_model(folder / "model.gguf");
  EXPECT_EQ(a.config.layers, b.config.layers);
  EXPECT_EQ(a.config.head_dim, b.config.head_dim);
  EXPECT_EQ(a.config.qk_norm, b.config.qk_norm);
  EXPECT_EQ(a.config.qkv_bias, b.config.qkv_bias);
  EXPECT_EQ(a.config.output_bias, b.config.output_bias);
  EXPECT_EQ(a.config.mlp_bias, b.config.mlp_bias);
  EXPECT_EQ(a.config.tie_word_embeddings, b.config.tie_word_embeddings);
  EXPECT_EQ(a.config.context_length, b.config.context_length);
  EXPECT_EQ(a.config.sliding_window, b.config.sliding_window);
  EXPECT_FLOAT_EQ(a.config.norm_eps, b.config.norm_eps);
  EXPECT_FLOAT_EQ(a.config.rope.theta, b.config.rope.theta);
  const std::vector<float> turns = inverse_frequencies(a.config.rope);
  const std::vector<float> twins = inverse_frequencies(b.config.rope);
  ASSERT_EQ(turns.size(), twins.size());
  for (size_t i = 0; i < turns.size(); ++i)
    EXPECT_FLOAT_EQ(turns[i], twins[i]) << i;
  expect_same_tensors(*a.weights, *b.weights);
}

INSTANTIATE_TEST_SUITE_P(Families, BothFormats,
                         ::testing::Values("llama", "llama_bias", "llama_rope3",
                                           "qwen2", "qwen3"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

TEST(Gpt2, ConvolutionWeightsAreTurnedToRowsOfOutputs) {
  // GGUF stores these in half precision, and rows of outputs.
  const std::filesystem::path folder = "tests/reference/data/gpt2";
  const OpenedModel a = open_model(folder);
  const OpenedModel b = open_model(folder / "model.gguf");
  ASSERT_EQ(a.weights->tensors().size(), b.weights->tensors().size());
  for (const WeightInfo& info : a.weights->tensors()) {
    ASSERT_EQ(info.shape, b.weights->shape(info.name)) << info.name;
    const at::Tensor read = a.weights->read(info.name, at::kHalf);
    EXPECT_TRUE(read.is_contiguous());
    EXPECT_TRUE(read.equal(b.weights->read(info.name, at::kHalf))) << info.name;
  }
  EXPECT_THAT(a.weights->shape("blk.0.attn_qkv.weight"), ElementsAre(96, 32));
  at::Tensor row = at::empty({1, 32}, at::kFloat);
  a.weights->read_rows("blk.0.attn_qkv.weight", 95, 1, row);
  EXPECT_TRUE(row.equal(
      a.weights->read("blk.0.attn_qkv.weight", at::kFloat).narrow(0, 95, 1)));
}

TEST(Gpt2, NamesWithoutRootAndOldBuffersAreKnown) {
  const std::filesystem::path source = "tests/reference/data/gpt2";
  const SafetensorsFolder file(source);
  NamedTensors tensors;
  for (const std::string& name : file.names())
    tensors.emplace_back(name.substr(std::string("transformer.").size()),
                         file.view(name));
  tensors.emplace_back("h.0.attn.bias", at::zeros({1, 1, 4, 4}, at::kByte));
  tensors.emplace_back("h.0.attn.masked_bias", at::zeros({}, at::kFloat));
  const TempFolder folder;
  write_safetensors(folder.path() / "model.safetensors", tensors);
  std::filesystem::copy_file(source / "config.json",
                             folder.path() / "config.json");
  expect_same_tensors(*open_model(folder.path()).weights,
                      *open_model(source).weights);
}

TEST(QuantisedModel, SaysSoAndIsCloseToItsSource) {
  const std::filesystem::path folder = "tests/reference/data/llama";
  const OpenedModel a = open_model(folder);
  const OpenedModel b = open_model(folder / "model-q8_0.gguf");
  EXPECT_TRUE(b.quantised);
  EXPECT_EQ(b.dtype, at::kFloat);
  for (const WeightInfo& info : a.weights->tensors()) {
    const at::Tensor want = a.weights->read(info.name, at::kFloat);
    const at::Tensor got = b.weights->read(info.name, at::kFloat);
    // Half a step of q8_0, 1 / 254 of the largest value of a block, and the
    // rounding of the step to half precision, 1 / 2048.
    const float bound =
        want.abs().max().item<float>() * (1.0F / 254.0F + 1.0F / 2048.0F);
    EXPECT_LE(want.sub(got).abs().max().item<float>(), bound) << info.name;
  }
}

}  // namespace
}  // namespace kvcache::model
