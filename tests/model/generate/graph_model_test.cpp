// graph_model.h: sampling by ops is Sampler's, and generate() over recorded
// steps gives the tokens of plain ones.
#include "kvcache/model/graph_model.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/preallocated_cache.h"
#include "tests/model/generate/fake_model.h"

namespace kvcache::model {
namespace {

const std::vector<SamplingOptions> kAsked = {
    {},
    {.temperature = 1},
    {.temperature = 0.3, .top_k = 5},
    {.temperature = 1.5, .top_p = 0.7},
    {.temperature = 0.9, .min_p = 0.1},
    {.temperature = 2, .top_k = 20, .top_p = 0.9, .min_p = 0.02},
    {.temperature = 0.8, .top_p = 0.0},
    {.temperature = 1, .top_k = 1},
    {.repetition_penalty = 1.7},
    {.temperature = 1.1, .top_k = 9, .repetition_penalty = 0.6}};

// One row for each of kAsked, all in one step, over steps of a replay.
TEST(GraphSampling, ChoosesWhatTheHostsSamplerChooses) {
  constexpr int64_t kVocabulary = 50, kSteps = 6;
  const auto rows = static_cast<int64_t>(kAsked.size());
  at::manual_seed(1);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    GraphSampling sampling({.rows = rows,
                            .steps = kSteps,
                            .vocab_size = kVocabulary,
                            .draws = true,
                            .filters = true,
                            .penalties = true});
    std::vector<Sampler> host;
    std::vector<std::vector<int64_t>> history;
    for (int64_t row = 0; row < rows; ++row) {
      SamplingOptions options = kAsked[static_cast<size_t>(row)];
      options.seed = seed + static_cast<uint64_t>(row);
      host.emplace_back(options);
      history.push_back({3, row, 3, 49});
      Sampler drawn(options);
      sampling.set_row(row, options, drawn, history.back());
    }
    for (int64_t step = 0; step < kSteps; ++step) {
      const Tensor logits = at::randn({rows, kVocabulary}).mul(3);
      const Tensor live = at::ones({rows}, at::kBool);
      const Tensor got = sampling.sample(logits, live, step);
      for (int64_t row = 0; row < rows; ++row) {
        const std::span<const float> values(
            logits.const_data_ptr<float>() + row * kVocabulary, kVocabulary);
        auto& seen = history[static_cast<size_t>(row)];
        const int64_t want =
            host[static_cast<size_t>(row)].sample(values, seen);
        ASSERT_EQ(got[row].item<int64_t>(), want)
            << "seed " << seed << " row " << row << " step " << step;
        seen.push_back(want);
      }
    }
  }
}

TEST(GraphSampling, OfEqualLogitsTheLowestId) {
  GraphSampling sampling({.vocab_size = 4});
  const Tensor logits = at::randn({1, 4}).fill_(2);
  const Tensor live = at::ones({1}, at::kBool);
  EXPECT_EQ(sampling.sample(logits, live, 0).item<int64_t>(), 0);
}

TEST(GraphSampling, RefusesWhatItWasNotMadeFor) {
  GraphSampling sampling({.vocab_size = 4, .draws = true});
  Sampler sampler({.seed = 1});
  EXPECT_THROW(sampling.set_row(0, {.temperature = 1, .top_k = 2}, sampler, {}),
               c10::Error);
  EXPECT_THROW(sampling.set_row(0, {.repetition_penalty = 2}, sampler, {}),
               c10::Error);
  sampling.set_row(0, {.top_k = 2}, sampler, {});  // of a greedy row: no filter
}

struct Asked {
  SamplingOptions sampling;
  std::vector<int64_t> ends = {};
  bool ignore_eos = false;
  int64_t new_tokens = 40;
};

const std::vector<Asked> kTexts = {
    {{}},
    {{}, {7, 3}},
    {{.temperature = 0.7, .top_p = 0.9, .seed = 4}, {5}},
    {{.temperature = 1, .seed = 9}, {2, 6, 8}, true},
    {{.temperature = 1.2, .top_k = 4, .repetition_penalty = 1.3, .seed = 2}},
    {{}, {}, false, 1},
    {{}, {}, false, 9}};

// One and many tokens a replay, recorded and not, across buckets, twice over
// the same graphs.
TEST(GraphRunner, GenerateGivesTheTokensOfPlainSteps) {
  for (const Asked& asked : kTexts) {
    const auto model = FakeModel::hashed(12, 512, asked.ends);
    const GenerateOptions plain{.max_new_tokens = asked.new_tokens,
                                .sampling = asked.sampling,
                                .ignore_eos = asked.ignore_eos,
                                .log_probs = 2};
    for (const int64_t steps : {1, 4, 8, 32}) {
      for (const bool recorded : {true, false}) {
        WindowCache window(model->cache_spec(1, 64),
                           {.buckets = {8, 16, 32, 64}});
        GraphRunner runner(
            *model, window,
            {.backend = recorded ? eager_graphs() : nullptr,
             .steps_per_replay = steps,
             .sampling = asked.sampling,
             .end_tokens =
                 asked.ignore_eos ? std::vector<int64_t>{} : asked.ends});
        for (const int64_t first : {1, 2}) {
          const std::vector<int64_t> prompt = {first, 4, 1, 10, 11};
          PreallocatedCache cache(model->cache_spec(1, 64));
          const auto want = generate(*model, &cache, prompt, plain);
          GenerateOptions options = plain;
          options.graphs = &runner;
          window.reset();
          const auto got = generate(*model, &window, prompt, options);
          EXPECT_EQ(got.tokens, want.tokens) << steps << " a replay";
          EXPECT_EQ(got.log_probs, want.log_probs);
          EXPECT_EQ(got.best, want.best);
          EXPECT_EQ(got.finish_reason, want.finish_reason);
          EXPECT_EQ(got.cache_length, want.cache_length);
          EXPECT_EQ(window.lengths()[0], cache.lengths()[0]);
        }
      }
    }
  }
}

// A hook that throws, and a stop in the middle of a replay: the cache holds
// what was shown.
TEST(GraphRunner, TheCacheHoldsWhatWasShown) {
  const auto model = FakeModel::hashed(12, 512);
  WindowCache window(model->cache_spec(1, 64));
  GraphRunner runner(*model, window, {.steps_per_replay = 8});
  const GenerateOptions options{.max_new_tokens = 40, .graphs = &runner};
  const std::vector<int64_t> prompt = {1, 2, 3};
  int seen = 0;
  const GenerateHooks throwing{.on_token = [&](const GeneratedToken&) {
    if (++seen == 4) throw std::runtime_error("planned");
  }};
  EXPECT_THROW(generate(*model, &window, prompt, options, throwing),
               std::runtime_error);
  EXPECT_EQ(window.lengths()[0], 3 + 3);
  window.reset();
  std::stop_source stop;
  const GenerateHooks stopping{.on_token =
                                   [&](const GeneratedToken&) {
                                     if (++seen == 10) stop.request_stop();
                                   },
                               .stop = stop.get_token()};
  const auto result = generate(*model, &window, prompt, options, stopping);
  EXPECT_EQ(result.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(window.lengths()[0],
            3 + static_cast<int64_t>(result.tokens.size()) - 1);
}

TEST(GraphRunner, RefusesAnotherCache) {
  const auto model = FakeModel::hashed(12, 512);
  WindowCache window(model->cache_spec(1, 64));
  WindowCache other(model->cache_spec(1, 64));
  GraphRunner runner(*model, window);
  const std::vector<int64_t> prompt = {1, 2, 3};
  EXPECT_THROW(generate(*model, &other, prompt, {.graphs = &runner}),
               c10::Error);
  WindowCache rows(model->cache_spec(2, 64));
  EXPECT_THROW(GraphRunner(*model, rows), c10::Error);
}

}  // namespace
}  // namespace kvcache::model
