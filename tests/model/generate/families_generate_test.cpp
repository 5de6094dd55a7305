// families_generate_test.cpp - generation, scores and beams of a tiny model of
// each family: what transformers gives, and the same bits from every cache.

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "kvcache/model/beam_search.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/score.h"
#include "kvcache/model/session.h"
#include "kvcache/model/transformer.h"

namespace kvcache::model {
namespace {

using nlohmann::json;
using testing::ElementsAreArray;
using testing::SizeIs;

constexpr CacheKind kKinds[] = {CacheKind::kNone, CacheKind::kConcat,
                                CacheKind::kPreallocated};
// float32 sums of another order than transformers': logits differ by 1e-5.
constexpr double kLogProbTolerance = 1e-4;

json read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

// One thread: the models are so small that threads only wait for each other.
std::shared_ptr<const Transformer> tiny(const std::string& name,
                                        at::ScalarType dtype) {
  at::set_num_threads(1);
  return load_model("tests/reference/data/" + name, {.dtype = dtype});
}

class FamiliesTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Models, FamiliesTest,
                         testing::Values("gpt2", "llama", "llama_bias",
                                         "llama_rope3", "mistral", "qwen2",
                                         "qwen3", "qwen3_5", "qwen3_5_three",
                                         "qwen3_5_seeing"),
                         [](const auto& info) { return info.param; });

TEST_P(FamiliesTest, GreedyTextsAndScoresAreTransformers) {
  const auto model = tiny(GetParam(), at::kFloat);
  const json expected = read_json(std::string("tests/reference/data/") +
                                  GetParam() + "/expected.json");
  for (const json& prompt : expected["prompts"]) {
    const std::vector<int64_t> tokens = prompt["tokens"];
    const std::vector<int64_t> greedy = prompt["greedy"]["tokens"];
    const std::vector<double> chances = prompt["greedy"]["log_probs"];
    for (const CacheKind kind : kKinds) {
      const auto cache = make_cache(kind, *model);
      const auto result =
          generate(*model, cache.get(), tokens,
                   {.max_new_tokens = static_cast<int64_t>(greedy.size()),
                    .ignore_eos = true,
                    .log_probs = 0});
      EXPECT_EQ(result.tokens, greedy) << prompt["name"] << to_string(kind);
      for (size_t i = 0; i < chances.size(); ++i) {
        EXPECT_NEAR(result.log_probs[i], chances[i], kLogProbTolerance);
      }
    }
    const std::vector<double> wanted = prompt["log_probs"];
    const auto scores = score(*model, nullptr, tokens);
    ASSERT_EQ(scores.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_NEAR(scores[i], wanted[i], kLogProbTolerance);
    }
  }
}

TEST_P(FamiliesTest, KindsAndChunksGiveTheSameBits) {
  const json expected = read_json(std::string("tests/reference/data/") +
                                  GetParam() + "/expected.json");
  const std::vector<int64_t> tokens = expected["prompts"].back()["tokens"];
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = tiny(GetParam(), dtype);
    const GenerateOptions options = {
        .max_new_tokens = 24,
        .sampling = {.temperature = 0.9, .top_k = 20, .seed = 3},
        .ignore_eos = true,
        .log_probs = 0};
    const auto scores = score(*model, nullptr, tokens);
    const auto text = generate(*model, nullptr, tokens, options);
    for (const CacheKind kind :
         {CacheKind::kConcat, CacheKind::kPreallocated}) {
      for (const int64_t chunk : {1, 7, 16, 256}) {
        const auto what = testing::Message() << to_string(kind) << " " << dtype
                                             << " chunk " << chunk;
        auto cache = make_cache(kind, *model);
        EXPECT_EQ(score(*model, cache.get(), tokens, {.chunk = chunk}), scores)
            << what;
        cache = make_cache(kind, *model);
        GenerateOptions chunked = options;
        chunked.chunk = chunk;
        const auto result = generate(*model, cache.get(), tokens, chunked);
        EXPECT_EQ(result.tokens, text.tokens) << what;
        EXPECT_EQ(result.log_probs, text.log_probs) << what;
      }
    }
  }
}

TEST_P(FamiliesTest, PlainBeamsAreTransformers) {
  const json expected = read_json(std::string("tests/reference/data/") +
                                  GetParam() + "/expected.json");
  if (!expected.contains("beam")) GTEST_SKIP() << "two families have beams";
  const auto model = tiny(GetParam(), at::kFloat);
  for (const json& beam : expected["beam"]) {
    std::vector<int64_t> tokens;
    for (const json& prompt : expected["prompts"]) {
      if (prompt["name"] == beam["prompt"])
        tokens = prompt["tokens"].get<std::vector<int64_t>>();
    }
    const BeamOptions options = {.beams = beam["beams"],
                                 .max_new_tokens = beam["new_tokens"],
                                 .length_penalty = 0,
                                 .ignore_eos = true};
    for (const CacheKind kind : kKinds) {
      const auto cache = make_cache(kind, *model, {.rows = options.beams});
      const auto beams = beam_search(*model, cache.get(), tokens, options);
      ASSERT_THAT(beams, SizeIs(beam["results"].size()));
      for (size_t i = 0; i < beams.size(); ++i) {
        EXPECT_THAT(
            beams[i].tokens,
            ElementsAreArray(
                beam["results"][i]["tokens"].get<std::vector<int64_t>>()))
            << to_string(kind);
        EXPECT_NEAR(beams[i].score, beam["results"][i]["score"].get<double>(),
                    10 * kLogProbTolerance);
      }
    }
  }
}

// behaviour of a session on real models: the cropped window is the stateless
// forward of that window.
TEST_P(FamiliesTest, ASessionCropsAndRecomputes) {
  const auto model = tiny(GetParam(), at::kFloat);
  CacheSession session(model, {.context = 32});
  std::vector<int64_t> text;
  for (int64_t i = 0; i < 40; ++i) text.push_back(3 + (i * 11) % 60);
  const auto all = at::from_blob(text.data(), {1, 40}, at::kLong);
  session.prefill(all.narrow(1, 0, 20));
  for (int64_t i = 20; i < 32; ++i) session.decode(all.narrow(1, i, 1));
  EXPECT_THROW(session.decode(all.narrow(1, 32, 1)), c10::Error);
  for (const int64_t keep : {1, 16, 32}) {
    EXPECT_TRUE(at::equal(session.recompute_window(all, keep),
                          model->forward(all.narrow(1, 40 - keep, keep))));
  }
}

EarlyStop early_stop(const std::string& name) {
  if (name == "true") return EarlyStop::kAlways;
  return name == "never" ? EarlyStop::kNever : EarlyStop::kHeuristic;
}

// data/beams.json is made by make_beams.py.
TEST(BeamReferenceTest, BeamsWithEndTokensAreTransformers) {
  const json cases = read_json("tests/model/generate/data/beams.json");
  EXPECT_GT(cases.size(), 40U);
  std::map<std::string, std::shared_ptr<const Transformer>> models;
  for (const json& test : cases) {
    auto& model = models[test["model"]];
    if (!model) model = tiny(test["model"], at::kFloat);
    const std::vector<int64_t> prompt = test["prompt"];
    const BeamOptions options = {
        .beams = test["beams"],
        .max_new_tokens = test["new_tokens"],
        .length_penalty = test["length_penalty"],
        .early_stop = early_stop(test["early_stopping"]),
        .stop_tokens = test["ends"],
        .ignore_eos = true};
    for (const CacheKind kind : kKinds) {
      const auto cache = make_cache(kind, *model, {.rows = options.beams});
      const auto beams = beam_search(*model, cache.get(), prompt, options);
      ASSERT_THAT(beams, SizeIs(test["results"].size()));
      for (size_t i = 0; i < beams.size(); ++i) {
        const json& wanted = test["results"][i];
        EXPECT_EQ(json(beams[i].tokens), wanted["tokens"])
            << test << " " << to_string(kind) << " beam " << i;
        EXPECT_NEAR(beams[i].score, wanted["score"].get<double>(),
                    100 * kLogProbTolerance)
            << test;
        EXPECT_EQ(beams[i].finish_reason == FinishReason::kStop,
                  wanted["ended"].get<bool>());
      }
    }
  }
}

}  // namespace
}  // namespace kvcache::model
