// sampler_test.cpp - special values, filters, reproducible draws.

#include "kvcache/model/sampler.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tests/support/error_text.h"

namespace kvcache::model {
namespace {

using kvcache::testing::error_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kNanDouble = std::numeric_limits<double>::quiet_NaN();

std::string refusal(const SamplingOptions& options) {
  return error_text([&] { Sampler sampler(options); });
}

// Which tokens turn up in 2,000 draws, and how often.
std::map<int64_t, int> draws(SamplingOptions options,
                             std::span<const float> logits) {
  options.seed = 7;
  Sampler sampler(options);
  std::map<int64_t, int> count;
  for (int i = 0; i < 2000; ++i) ++count[sampler.sample(logits)];
  return count;
}

std::set<int64_t> support(const SamplingOptions& options,
                          std::span<const float> logits) {
  std::set<int64_t> ids;
  for (const auto& [id, unused] : draws(options, logits)) ids.insert(id);
  return ids;
}

// log of chances 0.4, 0.3, 0.2, 0.1 for tokens 2, 0, 3, 1.
const std::vector<float> kFour = {std::log(0.3F), std::log(0.1F),
                                  std::log(0.4F), std::log(0.2F)};

TEST(SamplerTest, TemperatureZeroTakesTheLowestOfEqualBestTokens) {
  const std::vector<float> logits = {1, 3, 3, -2, 3};
  EXPECT_EQ(Sampler().sample(logits), 1);
  EXPECT_EQ(Sampler().sample(std::vector<float>{5, 5, 5}), 0);
  EXPECT_EQ(Sampler({.seed = 3}).sample(logits), 1);
}

// K106: a temperature next to zero overflows a plain division.
TEST(SamplerTest, TinyTemperatureIsAsGoodAsZero) {
  for (const double temperature : {1e-30, 1e-300, 1e-320}) {
    const auto ids = support({.temperature = temperature}, kFour);
    EXPECT_THAT(ids, ElementsAre(2)) << temperature;
  }
  // Equal best tokens share the draws.
  const std::vector<float> two = {3, -1, 3};
  EXPECT_THAT(support({.temperature = 1e-30}, two), ElementsAre(0, 2));
}

TEST(SamplerTest, HugeTemperatureIsUniform) {
  for (const auto& [id, count] : draws({.temperature = 1e300}, kFour)) {
    EXPECT_NEAR(count, 500, 100) << id;
  }
}

TEST(SamplerTest, RefusesIllegalOptionsByNameAndValue) {
  EXPECT_EQ(refusal({.temperature = -1}),
            "[Sampler] temperature must be a number of at least 0 but got "
            "-1.");
  EXPECT_THAT(refusal({.temperature = kNanDouble}),
              HasSubstr("temperature must be a number of at least 0 but got"));
  EXPECT_THAT(refusal({.temperature = HUGE_VAL}), HasSubstr("got inf"));
  EXPECT_EQ(refusal({.top_k = -1}),
            "[Sampler] top_k must be at least 0 but got -1; 0 keeps every "
            "token.");
  EXPECT_EQ(refusal({.top_p = 1.5}),
            "[Sampler] top_p must be between 0 and 1 but got 1.5.");
  EXPECT_THAT(refusal({.top_p = -0.1}), HasSubstr("got -0.1"));
  EXPECT_THAT(refusal({.top_p = kNanDouble}), HasSubstr("top_p must be"));
  EXPECT_THAT(refusal({.min_p = 2}), HasSubstr("min_p must be"));
  EXPECT_EQ(refusal({.repetition_penalty = 0}),
            "[Sampler] repetition_penalty must be above 0 but got 0; 1 is no "
            "penalty.");
  EXPECT_THAT(refusal({.repetition_penalty = kNanDouble}),
              HasSubstr("repetition_penalty must be"));
}

TEST(SamplerTest, RefusesLogitsThatAreNotFinite) {
  const std::string text = error_text([] {
    Sampler().sample(std::vector<float>{1, kNan, 2});
  });
  EXPECT_EQ(text,
            "[Sampler] logits must be finite but got nan for token 1 "
            "(non-finite logits); check the weights, or try float32.");
  for (const auto& row :
       {std::vector<float>{1, kInf, 2}, std::vector<float>{-kInf, -kInf, -kInf},
        std::vector<float>{1, 2, -kInf}}) {
    for (const double temperature : {0.0, 1.0}) {
      EXPECT_THAT(error_text([&] {
                    Sampler({.temperature = temperature}).sample(row);
                  }),
                  HasSubstr("non-finite logits"));
    }
  }
  EXPECT_THAT(error_text([] { Sampler().sample({}); }),
              HasSubstr("logits must not be empty"));
}

TEST(SamplerTest, EqualLogitsAreDrawnEvenly) {
  const std::vector<float> equal(4, 0.5F);
  const auto counts = draws({.temperature = 1}, equal);
  ASSERT_EQ(counts.size(), 4U);
  for (const auto& [id, count] : counts) EXPECT_NEAR(count, 500, 100) << id;
  EXPECT_THAT(support({.temperature = 1, .top_k = 1}, equal), ElementsAre(0));
  EXPECT_THAT(support({.temperature = 1, .top_p = 0}, equal), ElementsAre(0));
}

TEST(SamplerTest, DrawsFollowTheChances) {
  const auto counts = draws({.temperature = 1}, kFour);
  EXPECT_NEAR(counts.at(2), 800, 100);
  EXPECT_NEAR(counts.at(0), 600, 100);
  EXPECT_NEAR(counts.at(3), 400, 100);
  EXPECT_NEAR(counts.at(1), 200, 100);
}

TEST(SamplerTest, TopKKeepsTheBest) {
  EXPECT_THAT(support({.temperature = 1, .top_k = 1}, kFour), ElementsAre(2));
  EXPECT_THAT(support({.temperature = 1, .top_k = 2}, kFour),
              ElementsAre(0, 2));
  for (const int64_t all : {0, 4, 5, 1000000}) {
    EXPECT_EQ(support({.temperature = 1, .top_k = all}, kFour).size(), 4U);
  }
}

TEST(SamplerTest, TopPKeepsTheTokenThatCrossesIt) {
  const auto kept = [](double p) {
    return support({.temperature = 1, .top_p = p}, kFour);
  };
  EXPECT_THAT(kept(0), ElementsAre(2));
  EXPECT_THAT(kept(0.39), ElementsAre(2));
  EXPECT_THAT(kept(0.41), ElementsAre(0, 2));
  EXPECT_THAT(kept(0.75), ElementsAre(0, 2, 3));
  EXPECT_EQ(kept(1).size(), 4U);
}

TEST(SamplerTest, TopPCountsWhatTopKHasLeft) {
  // Of 0.4 and 0.3 the best holds 0.57.
  EXPECT_THAT(support({.temperature = 1, .top_k = 2, .top_p = 0.55}, kFour),
              ElementsAre(2));
  EXPECT_THAT(support({.temperature = 1, .top_k = 2, .top_p = 0.6}, kFour),
              ElementsAre(0, 2));
}

TEST(SamplerTest, MinPIsAShareOfTheBest) {
  const auto kept = [](double p) {
    return support({.temperature = 1, .min_p = p}, kFour);
  };
  EXPECT_EQ(kept(0).size(), 4U);
  EXPECT_THAT(kept(0.3), ElementsAre(0, 2, 3));
  EXPECT_THAT(kept(0.7), ElementsAre(0, 2));
  EXPECT_THAT(kept(1), ElementsAre(2));
}

TEST(SamplerTest, RepetitionPenaltyDividesPositiveAndMultipliesNegative) {
  const std::vector<float> logits = {4, 3, -1, -1.5F};
  const std::vector<int64_t> seen = {0, 0, 2};  // twice counts once
  Sampler sampler({.repetition_penalty = 2});
  EXPECT_EQ(sampler.sample(logits, seen), 1);
  const std::vector<float> negative = {-1, -1.5F};
  EXPECT_EQ(sampler.sample(negative, std::vector<int64_t>{0}), 1);
  EXPECT_EQ(Sampler({.repetition_penalty = 1}).sample(logits, seen), 0);
  // A penalty below 1 asks for repetition, at any size without overflow.
  EXPECT_EQ(Sampler({.repetition_penalty = 1e-300})
                .sample(logits, std::vector<int64_t>{1}),
            1);
  EXPECT_THAT(
      error_text([&] { sampler.sample(logits, std::vector<int64_t>{4}); }),
      HasSubstr("must be in [0, 4) but the history holds 4"));
}

TEST(SamplerTest, SameSeedSameTokens) {
  const auto run = [](std::optional<uint64_t> seed) {
    Sampler sampler({.temperature = 1, .top_p = 0.9, .seed = seed});
    std::vector<int64_t> ids;
    for (int i = 0; i < 50; ++i) ids.push_back(sampler.sample(kFour));
    return ids;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
  EXPECT_NE(run(std::nullopt), run(std::nullopt));
  // Fixed for good: the engine and the mapping to [0, 1) are our own choice,
  // so no platform may change these.
  Sampler sampler({.temperature = 1, .seed = 42});
  std::vector<int64_t> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(sampler.sample(kFour));
  EXPECT_THAT(ids, ElementsAre(2, 2, 2, 0, 3, 0, 2, 1));
  Sampler reported({.temperature = 1});
  EXPECT_NE(reported.seed(), Sampler({.temperature = 1}).seed());
}

TEST(SamplerTest, LogProbsAreLogSoftmaxOfTheRawLogits) {
  const at::Tensor row = log_probs(kFour);
  for (size_t i = 0; i < kFour.size(); ++i) {
    EXPECT_NEAR(row.const_data_ptr<float>()[i], kFour[i], 1e-6);
  }
  const auto best = top_log_probs(row, 2);
  ASSERT_EQ(best.size(), 2U);
  EXPECT_EQ(best[0].first, 2);
  EXPECT_EQ(best[1].first, 0);
  EXPECT_EQ(top_log_probs(row, 99).size(), 4U);
  EXPECT_EQ(top_log_probs(log_probs(std::vector<float>(3, 1)), 1)[0].first, 0);
}

}  // namespace
}  // namespace kvcache::model
