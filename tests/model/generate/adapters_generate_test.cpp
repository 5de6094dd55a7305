// adapters_generate_test.cpp - texts that run with adapters: alone, together,
// over recorded steps, taken up from what others left, and as routes of
// choices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/model/batcher.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/choice_runner.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/graph_model.h"
#include "kvcache/model/prefix_cache.h"
#include "kvcache/model/score.h"
#include "kvcache/model/verify.h"
#include "tests/support/error_text.h"
#include "tests/support/random_model.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using kvcache::testing::error_text;
using kvcache::testing::hybrid_config;
using kvcache::testing::random_adapter;
using kvcache::testing::random_model;
using kvcache::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tokens = std::vector<int64_t>;

const Tokens kPrompt = {5, 60, 17, 3, 3, 41, 9, 22, 0, 63, 8, 8};

// Two adapters of all layers, one of the upper two; in place of the hybrid's
// layers attention alone, if asked for.
std::shared_ptr<const Transformer> model_of(bool hybrid) {
  ModelConfig config = hybrid_config();
  if (!hybrid) {
    config.linear_attention.reset();
    config.layer_types.assign(4, LayerType::kFull);
  }
  return random_model(config)->with_adapters(
      {random_adapter(config, "fr", 3), random_adapter(config, "de", 6)});
}

std::shared_ptr<const Transformer> upper_model() {
  const ModelConfig config = hybrid_config();
  return random_model(config)->with_adapters(
      {random_adapter(config, "fr", 3, 2), random_adapter(config, "de", 6, 1)});
}

GenerateOptions with(const std::string& adapter, int64_t from = 0) {
  GenerateOptions options{
      .max_new_tokens = 6, .ignore_eos = true, .chunk = 4, .log_probs = 1};
  options.adapter = adapter;
  options.adapter_from = from;
  return options;
}

GenerateResult answer(const LanguageModel& model, CacheKind kind,
                      const GenerateOptions& options,
                      const Tokens& prompt = kPrompt) {
  const auto cache = make_cache(kind, model, {.capacity = 40});
  return generate(model, cache.get(), prompt, options);
}

void expect_same(const GenerateResult& got, const GenerateResult& wanted) {
  EXPECT_EQ(got.tokens, wanted.tokens);
  EXPECT_EQ(got.log_probs, wanted.log_probs);
}

class AdapterTextTest : public ::testing::TestWithParam<bool> {
 protected:
  const std::shared_ptr<const Transformer> model = model_of(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Models, AdapterTextTest, ::testing::Bool(),
                         [](const auto& info) {
                           return std::string(info.param ? "Hybrid"
                                                         : "Attention");
                         });

// Any memory gives the bits of none at all, from any first token on.
TEST_P(AdapterTextTest, EveryCacheGivesTheTextOfNone) {
  const auto base = answer(*model, CacheKind::kNone, with(""));
  for (const auto& [name, from] : std::vector<std::pair<std::string, int64_t>>{
           {"fr", 0}, {"de", 0}, {"fr", 7}, {"de", 14}, {"fr", 1000}}) {
    SCOPED_TRACE(name + std::to_string(from));
    const auto wanted = answer(*model, CacheKind::kNone, with(name, from));
    if (from < 1000) {
      EXPECT_NE(wanted.log_probs, base.log_probs);
    } else {
      expect_same(wanted, base);
    }
    for (const CacheKind kind :
         {CacheKind::kConcat, CacheKind::kPreallocated, CacheKind::kWindow}) {
      expect_same(answer(*model, kind, with(name, from)), wanted);
    }
  }
}

TEST_P(AdapterTextTest, RecordedStepsReadTheAdapterOfTheText) {
  WindowCache cache(model->cache_spec(1, 40), {});
  GraphRunner graphs(*model, cache, {.steps_per_replay = 2});
  for (const char* name : {"fr", "", "de"}) {
    GenerateOptions options = with(name, 13);
    options.graphs = &graphs;
    cache.reset();
    const auto got = generate(*model, &cache, kPrompt, options);
    expect_same(got, answer(*model, CacheKind::kNone, with(name, 13)));
  }
}

TEST_P(AdapterTextTest, DraftsAreCheckedWithIt) {
  const Tokens prompt = {1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2};
  GenerateOptions options = with("fr");
  options.max_new_tokens = 20;
  const auto wanted = answer(*model, CacheKind::kPreallocated, options, prompt);
  options.lookup.drafts = 3;
  expect_same(answer(*model, CacheKind::kPreallocated, options, prompt),
              wanted);
}

// Rows of other adapters, with and without, that come and go.
TEST_P(AdapterTextTest, ABatchGivesEachItsOwn) {
  for (const CacheKind kind :
       {CacheKind::kConcat, CacheKind::kPreallocated, CacheKind::kWindow}) {
    const bool window = kind == CacheKind::kWindow;
    Batcher batcher(
        model,
        make_cache(kind, *model, {.rows = 3, .capacity = 40, .slots = true}),
        {.graphs = window ? eager_graphs() : nullptr});
    const std::vector<std::pair<std::string, int64_t>> asked = {
        {"fr", 0}, {"", 0}, {"de", 0}, {"fr", 9}, {"de", 14}, {"", 0}};
    for (size_t i = 0; i < asked.size(); ++i) {
      GenerateOptions options = with(asked[i].first, asked[i].second);
      options.max_new_tokens = 4 + static_cast<int64_t>(i);
      batcher.submit({.tokens = kPrompt, .options = options});
    }
    batcher.run();
    for (const BatchResult& result : batcher.take_finished()) {
      const auto& [name, from] = asked[result.id - 1];
      GenerateOptions options = with(name, from);
      options.max_new_tokens = 3 + static_cast<int64_t>(result.id);
      ASSERT_EQ(result.status, BatchStatus::kFinished) << result.error;
      expect_same(result.result, answer(*model, CacheKind::kNone, options));
    }
  }
}

TEST(AdapterBatchTest, AnUnknownNameIsThatRequestsError) {
  const auto model = model_of(false);
  Batcher batcher(model, make_cache(CacheKind::kConcat, *model, {.rows = 2}));
  batcher.submit({.tokens = kPrompt, .options = with("it")});
  batcher.submit({.tokens = kPrompt, .options = with("fr")});
  batcher.run();
  for (const BatchResult& result : batcher.take_finished()) {
    if (result.id == 2) {
      EXPECT_EQ(result.status, BatchStatus::kFinished);
      continue;
    }
    EXPECT_EQ(result.status, BatchStatus::kRefused);
    EXPECT_EQ(result.refusal, RefusalReason::kBadOptions);
    EXPECT_THAT(result.error,
                HasSubstr("must be one of the model's (fr, de) but got it"));
  }
}

// What one adapter left is nothing to another; what came before it began is the
// model's own, and everybody's.
TEST_P(AdapterTextTest, ThePrefixCacheKeepsThemApart) {
  for (const bool batched : {false, true}) {
    auto store = std::make_shared<CheckpointStore>(
        StoreOptions{.max_bytes = 1 << 22, .min_prefix = 2});
    PrefixOptions prefix_options{.block = 4, .chunk = 4};
    prefix_options.placement.stride = 4;
    const auto prefix =
        std::make_shared<PrefixCache>(model, store, prefix_options);
    const auto warm = [&](const std::string& name, int64_t from) {
      GenerateOptions options = with(name, from);
      options.prefix = prefix;
      if (!batched) return answer(*model, CacheKind::kPreallocated, options);
      Batcher batcher(model, make_cache(CacheKind::kPreallocated, *model,
                                        {.rows = 1, .capacity = 40}));
      batcher.submit({.tokens = kPrompt, .options = options});
      batcher.run();
      return batcher.take_finished()[0].result;
    };
    // In turns, so that each could be mistaken for the one before.
    const std::vector<std::tuple<std::string, int64_t, int64_t>> asked = {
        {"fr", 0, 0}, {"", 0, 0},   {"de", 0, 0},  {"fr", 0, 12}, {"de", 0, 12},
        {"", 0, 12},  {"fr", 8, 8}, {"fr", 8, 12}, {"de", 8, 8}};
    for (const auto& [name, from, reused] : asked) {
      SCOPED_TRACE(name + std::to_string(from));
      const auto got = warm(name, from);
      expect_same(got, answer(*model, CacheKind::kNone, with(name, from)));
      EXPECT_EQ(got.reused, reused);
    }
  }
}

// Of the same adapter, whatever it is called, and of no other.
TEST(AdapterFolderTest, SavedTextsAreOfTheAdaptersDigest) {
  const TempFolder folder;
  const ModelConfig config = hybrid_config();
  const auto run = [&](const std::string& name, uint64_t seed,
                       const char* digest) {
    Adapter adapter = random_adapter(config, std::to_string(seed), 3);
    adapter.name = name;
    adapter.digest = digest;
    const auto model = random_model(config)->with_adapters({adapter});
    PrefixOptions options{.block = 4, .chunk = 4};
    options.folder.path = folder.path();
    const auto prefix = std::make_shared<PrefixCache>(
        model,
        std::make_shared<CheckpointStore>(
            StoreOptions{.max_bytes = 1 << 22, .min_prefix = 2}),
        options);
    GenerateOptions asked = with(name);
    asked.prefix = prefix;
    const auto got = answer(*model, CacheKind::kPreallocated, asked);
    expect_same(got, answer(*model, CacheKind::kNone, with(name)));
    prefix->save();
    return got.reused;
  };
  EXPECT_EQ(run("fr", 1, "one"), 0);
  EXPECT_EQ(run("french", 1, "one"), 12);
  EXPECT_EQ(run("fr", 2, "two"), 0);
  bool named = false;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const CheckpointFile file(entry.path());
    named = named || file.identity().at("adapter") == "two from 0";
  }
  EXPECT_TRUE(named);
}

// A conversation that changes its adapter keeps what both have alike.
TEST_P(AdapterTextTest, AConversationForgetsWhatAnotherComputed) {
  Conversation talk(model, make_cache(CacheKind::kConcat, *model));
  Tokens text = kPrompt;
  for (const auto& [name, from, most] :
       std::vector<std::tuple<std::string, int64_t, int64_t>>{{"fr", 0, 0},
                                                              {"fr", 0, 99},
                                                              {"de", 0, 0},
                                                              {"", 0, 0},
                                                              {"de", 9, 9},
                                                              {"fr", 5, 5}}) {
    SCOPED_TRACE(name + std::to_string(from));
    const auto got = talk.generate(text, with(name, from));
    expect_same(got, answer(*model, CacheKind::kNone, with(name, from), text));
    EXPECT_LE(got.reused, most);
    EXPECT_TRUE(most < 99 || got.reused > 0);
    text.assign(talk.tokens().begin(), talk.tokens().end());
    text.resize(20, 4);
  }
}

TEST_P(AdapterTextTest, ScoresAndVerifies) {
  const ScoreOptions options{.chunk = 4, .adapter = "de", .adapter_from = 3};
  const auto wanted = score(*model, nullptr, kPrompt, options);
  const auto cache =
      make_cache(CacheKind::kPreallocated, *model, {.capacity = 40});
  EXPECT_EQ(score(*model, cache.get(), kPrompt, options), wanted);
  EXPECT_NE(score(*model, nullptr, kPrompt), wanted);
  const auto report = verify_reuse(
      *model, kPrompt, {.chunk = 4, .new_tokens = 3, .adapter = "fr"});
  EXPECT_EQ(report.first_difference, "");
  EXPECT_THAT(
      error_text([&] { score(*model, nullptr, kPrompt, {.adapter = "it"}); }),
      AllOf(HasSubstr("[score]"), HasSubstr("(fr, de) but got it")));
  EXPECT_THAT(
      error_text([&] { answer(*model, CacheKind::kNone, with("fr", -1)); }),
      HasSubstr("adapter_from must be at least 0 but got -1"));
}

// Choices: routes over one lower part, held against the whole model.
ChoiceOptions small_choices() {
  return {.letters = {0, 1, 2, 3},
          .lengths = {4, 8, 16},
          .spans = {16, 32, 64},
          .min_prefix = 4,
          .stride = 8,
          .tail = 2,
          .align = 1,
          .block = 4,
          .memo_entries = 0};
}

std::vector<float> expected(const Transformer& model, const Tokens& ids,
                            const std::string& adapter) {
  std::vector<float> logits;
  double sum = 0;
  for (const int64_t letter : small_choices().letters) {
    Tokens text = ids;
    text.push_back(letter);
    const ScoreOptions options{.adapter = adapter};
    logits.push_back(std::exp(score(model, nullptr, text, options).back()));
    sum += logits.back();
  }
  for (float& value : logits) value = static_cast<float>(value / sum);
  return logits;
}

constexpr float kTolerance = 1e-5F;  // of a softmax over few, by way of one
                                     // over all

ChoiceRequest question(const Tokens& suffix, std::optional<int64_t> route) {
  ChoiceRequest request{.ids = kPrompt,
                        .state_len = static_cast<int64_t>(kPrompt.size()),
                        .option_counts = {4},
                        .route = route};
  request.ids.insert(request.ids.end(), suffix.begin(), suffix.end());
  request.slots = {static_cast<int64_t>(request.ids.size()) - 1};
  return request;
}

TEST(AdapterChoiceTest, RoutesAreTheAdapters) {
  const auto model = upper_model();
  const auto routed = make_routed(model);
  EXPECT_EQ(routed->split(), 1);  // "de" begins there
  EXPECT_THAT(routed->routes(), ::testing::ElementsAre(1, 2));
  ChoiceRunner runner(routed,
                      std::make_shared<CheckpointStore>(
                          StoreOptions{.max_bytes = 1 << 22, .min_prefix = 1}),
                      small_choices());
  const std::string names[] = {"", "fr", "de"};
  for (const int64_t route : {1, 2, 0, 2, 1, 0, -1, 1}) {
    SCOPED_TRACE(route);
    const auto request =
        question({7, 9}, route < 0 ? std::nullopt : std::optional(route));
    const auto result = runner.answer(request);
    EXPECT_EQ(result.route, std::max<int64_t>(route, 0));
    EXPECT_THAT(
        result.probabilities[0],
        ::testing::Pointwise(
            ::testing::FloatNear(kTolerance),
            expected(*model, request.ids, names[std::max<int64_t>(route, 0)])));
  }
  EXPECT_GT(runner.info().store.hits, 0);
  EXPECT_THAT(error_text([&] { runner.answer(question({7}, 3)); }),
              HasSubstr("route 3 must be loaded"));
}

TEST(AdapterChoiceTest, AnAdapterOfAllLayersRunsAlone) {
  const auto model = model_of(true);
  EXPECT_THAT(error_text([&] { make_routed(model); }),
              HasSubstr("must leave layer 0 as it is but adapter fr"));
  const auto store = std::make_shared<CheckpointStore>(
      StoreOptions{.max_bytes = 1 << 22, .min_prefix = 1});
  for (const char* name : {"fr", "de"}) {
    ChoiceRunner runner(make_routed(model, name), store, small_choices());
    for (int i = 0; i < 2; ++i) {
      ChoiceRequest request = question({7, 9}, {});
      request.space.adapter = name;
      const auto result = runner.answer(request);
      EXPECT_EQ(result.reuse, i == 0 ? ReuseClass::kCold : ReuseClass::kHit);
      EXPECT_THAT(result.probabilities[0],
                  ::testing::Pointwise(::testing::FloatNear(kTolerance),
                                       expected(*model, request.ids, name)));
    }
  }
}

}  // namespace
}  // namespace kvcache::model
