// beam_search_test.cpp - beams over every cache against exhaustive search and
// cases worked out by hand.

#include "kvcache/model/beam_search.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "kvcache/model/cache_factory.h"
#include "tests/model/generate/fake_model.h"
#include "tests/support/error_text.h"

namespace kvcache::model {
namespace {

using kvcache::testing::error_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr CacheKind kKinds[] = {CacheKind::kNone, CacheKind::kConcat,
                                CacheKind::kPreallocated};
const std::vector<int64_t> kPrompt = {1, 0, 2};

std::vector<Beam> search(const LanguageModel& model, CacheKind kind,
                         const BeamOptions& options) {
  const auto cache = make_cache(kind, model, {.rows = options.beams});
  return beam_search(model, cache.get(), kPrompt, options);
}

// Log-probabilities of a text after the prompt, by hand.
double score_of(int64_t vocab, const std::vector<int64_t>& tokens) {
  auto text = kPrompt;
  double sum = 0;
  for (const int64_t id : tokens) {
    const auto row = FakeModel::mixed(vocab, text);
    double total = 0;
    for (const float logit : row) total += std::exp(double(logit));
    sum += row[static_cast<size_t>(id)] - std::log(total);
    text.push_back(id);
  }
  return sum;
}

TEST(BeamSearchTest, WideEnoughBeamsFindTheBestTexts) {
  const auto model = FakeModel::hashed(3, 50);
  // All 27 texts of three tokens; nine beams lose none of the second step.
  std::vector<std::pair<double, std::vector<int64_t>>> all;
  for (int64_t i = 0; i < 27; ++i) {
    const std::vector<int64_t> tokens = {i / 9, i / 3 % 3, i % 3};
    all.emplace_back(-score_of(3, tokens), tokens);
  }
  std::sort(all.begin(), all.end());
  for (const CacheKind kind : kKinds) {
    const auto beams = search(
        *model, kind, {.beams = 9, .max_new_tokens = 3, .length_penalty = 0});
    ASSERT_THAT(beams, SizeIs(9));
    for (size_t i = 0; i < 9; ++i) {
      EXPECT_EQ(beams[i].tokens, all[i].second) << to_string(kind) << i;
      EXPECT_NEAR(beams[i].score, -all[i].first, 1e-5);
      EXPECT_EQ(beams[i].finish_reason, FinishReason::kLength);
    }
  }
}

TEST(BeamSearchTest, OneBeamIsGreedy) {
  const auto model = FakeModel::hashed(40, 60);
  const auto greedy =
      generate(*model, nullptr, kPrompt, {.max_new_tokens = 20});
  for (const CacheKind kind : kKinds) {
    const auto beams = search(*model, kind, {.beams = 1, .max_new_tokens = 20});
    ASSERT_THAT(beams, SizeIs(1));
    EXPECT_EQ(beams[0].tokens, greedy.tokens);
  }
}

TEST(BeamSearchTest, KindsGiveTheSameBits) {
  const auto model = FakeModel::hashed(20, 60, {7, 11});
  for (const EarlyStop stop :
       {EarlyStop::kHeuristic, EarlyStop::kAlways, EarlyStop::kNever}) {
    const BeamOptions options = {
        .beams = 4, .max_new_tokens = 15, .early_stop = stop, .chunk = 2};
    const auto oracle = search(*model, CacheKind::kNone, options);
    ASSERT_THAT(oracle, SizeIs(4));
    for (const CacheKind kind :
         {CacheKind::kConcat, CacheKind::kPreallocated}) {
      const auto beams = search(*model, kind, options);
      ASSERT_THAT(beams, SizeIs(4));
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(beams[i].tokens, oracle[i].tokens);
        EXPECT_EQ(beams[i].score, oracle[i].score);
        EXPECT_EQ(beams[i].finish_reason, oracle[i].finish_reason);
      }
    }
  }
}

// Chances of the next token by what came after the prompt. Token 0 ends.
FakeModel table(std::map<std::vector<int64_t>, std::vector<double>> chances) {
  return {3,
          50,
          [chances](FakeModel::History history) {
            const std::vector<int64_t> after(
                history.begin() + static_cast<std::ptrdiff_t>(kPrompt.size()),
                history.end());
            std::vector<float> row;
            for (const double p : chances.at(after)) {
              row.push_back(static_cast<float>(std::log(p)));
            }
            return row;
          },
          {0}};
}

TEST(BeamSearchTest, AnEndTokenFinishesABeam) {
  // One token: end 0.5, 1 0.3, 2 0.2. Then 1 ends with 0.9, 2 with 0.1.
  const auto model = table({{{}, {0.5, 0.3, 0.2}},
                            {{1}, {0.9, 0.06, 0.04}},
                            {{2}, {0.1, 0.45, 0.45}},
                            {{1, 1}, {0.4, 0.3, 0.3}},
                            {{1, 2}, {0.4, 0.3, 0.3}},
                            {{2, 1}, {0.8, 0.1, 0.1}},
                            {{2, 2}, {0.2, 0.4, 0.4}}});
  for (const CacheKind kind : kKinds) {
    const auto beams = search(
        model, kind, {.beams = 2, .max_new_tokens = 3, .length_penalty = 0});
    ASSERT_THAT(beams, SizeIs(2));
    EXPECT_THAT(beams[0].tokens, ElementsAre(0));
    EXPECT_NEAR(beams[0].score, std::log(0.5), 1e-6);
    EXPECT_THAT(beams[1].tokens, ElementsAre(1, 0));
    EXPECT_NEAR(beams[1].score, std::log(0.3 * 0.9), 1e-6);
    EXPECT_EQ(beams[1].finish_reason, FinishReason::kStop);

    // Divided by their lengths, the longer one wins.
    const auto divided = search(model, kind, {.beams = 2, .max_new_tokens = 3});
    EXPECT_THAT(divided[0].tokens, ElementsAre(1, 0));
    EXPECT_NEAR(divided[0].score, std::log(0.3 * 0.9) / 2, 1e-6);

    const auto on = search(
        model, kind, {.beams = 2, .max_new_tokens = 1, .ignore_eos = true});
    EXPECT_THAT(on[0].tokens, ElementsAre(0));
    EXPECT_EQ(on[0].finish_reason, FinishReason::kLength);
  }
}

TEST(BeamSearchTest, StopTokensInAnyOrderEndABeamThatIgnoresEos) {
  const auto model = FakeModel::scripted(12, 60, kPrompt.size(), {4, 5, 6});
  for (const int64_t stop : {9, 5, 1}) {
    const auto beams = beam_search(*model, nullptr, kPrompt,
                                   {.beams = 1,
                                    .max_new_tokens = 3,
                                    .stop_tokens = {9, stop, 5, 1},
                                    .ignore_eos = true});
    EXPECT_THAT(beams[0].tokens, ElementsAre(4, 5));
    EXPECT_EQ(beams[0].finish_reason, FinishReason::kStop);
  }
}

TEST(BeamSearchTest, LeavesTheOpenBeamsInTheCache) {
  const auto model = FakeModel::hashed(20, 60);
  const auto cache = make_cache(CacheKind::kConcat, *model, {.rows = 3});
  beam_search(*model, cache.get(), kPrompt, {.beams = 3, .max_new_tokens = 5});
  EXPECT_THAT(cache->lengths(), ElementsAre(7, 7, 7));
  EXPECT_THAT(cache->validate(), IsEmpty());
}

TEST(BeamSearchTest, CanBeCancelled) {
  const auto model = FakeModel::hashed(20, 60);
  std::stop_source source;
  source.request_stop();
  EXPECT_THAT(beam_search(*model, nullptr, kPrompt,
                          {.beams = 2, .stop = source.get_token()}),
              IsEmpty());
  EXPECT_EQ(model->steps, 0);
}

TEST(BeamSearchTest, RefusesBadArgumentsBeforeAnyWork) {
  const auto model = FakeModel::hashed(20, 10);
  const auto refused = [&](const BeamOptions& options) {
    return error_text([&] { beam_search(*model, nullptr, kPrompt, options); });
  };
  EXPECT_EQ(refused({.beams = 0}),
            "[beam_search] beams must be 1 to 65536 but got 0.");
  EXPECT_EQ(refused({.beams = int64_t{1} << 62}),
            "[beam_search] beams must be 1 to 65536 but got "
            "4611686018427387904.");
  EXPECT_EQ(refused({.max_new_tokens = 8}),
            "[beam_search] prompt of 3 tokens and 8 new ones exceed the "
            "context of 10 tokens; ask for at most 7 new ones.");
  EXPECT_THAT(refused({.length_penalty = std::nan("")}),
              HasSubstr("length_penalty must be a number"));
  const auto cache = make_cache(CacheKind::kConcat, *model, {.rows = 2});
  EXPECT_EQ(error_text([&] {
              beam_search(*model, cache.get(), kPrompt, {.beams = 3});
            }),
            "[beam_search] the cache must have 3 row(s) but got 2.");
  const auto used = make_cache(CacheKind::kConcat, *model);
  generate(*model, used.get(), kPrompt, {.max_new_tokens = 1});
  EXPECT_EQ(error_text([&] {
              beam_search(*model, used.get(), kPrompt, {.beams = 1});
            }),
            "[beam_search] the cache must be empty but row 0 holds 3 tokens; "
            "reset() it.");
  EXPECT_EQ(model->steps, 1);
}

}  // namespace
}  // namespace kvcache::model
