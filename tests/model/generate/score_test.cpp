// score_test.cpp - log-probabilities of a given text.

#include "kvcache/model/score.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <cmath>

#include "kvcache/model/cache_factory.h"
#include "tests/model/generate/fake_model.h"
#include "tests/support/error_text.h"

namespace kvcache::model {
namespace {

using kvcache::testing::error_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<int64_t> kText = {5, 9, 2, 63, 0, 0, 17, 31, 8, 44, 1};

TEST(ScoreTest, IsTheLogSoftmaxOfEachNextToken) {
  const auto model = FakeModel::hashed(64, 100);
  const auto scores = score(*model, nullptr, kText);
  ASSERT_EQ(scores.size(), kText.size() - 1);
  for (size_t i = 0; i < scores.size(); ++i) {
    const auto row = FakeModel::mixed(64, std::span(kText).first(i + 1));
    double sum = 0;
    for (const float logit : row) sum += std::exp(double(logit));
    EXPECT_NEAR(scores[i],
                row[static_cast<size_t>(kText[i + 1])] - std::log(sum), 1e-5);
  }
}

TEST(ScoreTest, KindsAndChunksGiveTheSameBits) {
  const auto model = FakeModel::hashed(64, 100);
  const auto oracle = score(*model, nullptr, kText);
  for (const CacheKind kind : {CacheKind::kConcat, CacheKind::kPreallocated}) {
    for (const int64_t chunk : {1, 2, 9, 10, 11, 256}) {
      const auto cache = make_cache(kind, *model);
      int64_t last = 0;
      EXPECT_EQ(score(*model, cache.get(), kText,
                      {.chunk = chunk,
                       .progress =
                           [&](int64_t done, int64_t total) {
                             EXPECT_EQ(total, 10);
                             last = done;
                           }}),
                oracle)
          << to_string(kind) << " " << chunk;
      EXPECT_EQ(last, 10);
      EXPECT_EQ(cache->lengths()[0], 10);
    }
  }
}

TEST(ScoreTest, OneTokenHasNoScoreAndNoWork) {
  const auto model = FakeModel::hashed(64, 100);
  EXPECT_THAT(score(*model, nullptr, std::vector<int64_t>{3}), IsEmpty());
  EXPECT_EQ(model->steps, 0);
}

TEST(ScoreTest, ATextMayFillTheContext) {
  const auto model = FakeModel::hashed(64, 11);
  const auto cache =
      make_cache(CacheKind::kPreallocated, *model, {.capacity = 10});
  EXPECT_EQ(score(*model, cache.get(), kText).size(), 10U);
}

TEST(ScoreTest, RefusesBadArgumentsBeforeAnyWork) {
  const auto model = FakeModel::hashed(64, 10);
  const auto refused = [&](const std::vector<int64_t>& text, Cache* cache,
                           ScoreOptions options = {}) {
    return error_text([&] { score(*model, cache, text, options); });
  };
  EXPECT_EQ(refused({}, nullptr),
            "[score] there must be at least one token but got none.");
  EXPECT_EQ(refused(kText, nullptr),
            "[score] text of 11 tokens is longer than the context of 10 "
            "tokens; shorten it.");
  EXPECT_EQ(refused({1, 64}, nullptr),
            "[score] token ids must be in [0, 64) but id 1 is 64.");
  EXPECT_THAT(refused({1, 2}, nullptr, {.chunk = 0}),
              HasSubstr("chunk must be at least 1"));
  const auto small =
      make_cache(CacheKind::kPreallocated, *model, {.capacity = 2});
  EXPECT_EQ(refused({1, 2, 3, 4}, small.get()),
            "[score] text of 4 tokens needs room for 3 but the cache's "
            "capacity is 2.");
  EXPECT_EQ(model->steps, 0);
  score(*model, small.get(), std::vector<int64_t>{1, 2});
  EXPECT_EQ(refused({1, 2}, small.get()),
            "[score] the cache must be empty but holds 1 tokens; reset() it.");
}

TEST(ScoreTest, NonFiniteLogitsAreAnError) {
  FakeModel model(4, 50, [](FakeModel::History) {
    return std::vector<float>{1, HUGE_VALF, 1, 1};
  });
  EXPECT_THAT(error_text([&] {
                score(model, nullptr, std::vector<int64_t>{0, 1});
              }),
              HasSubstr("got inf for token 1 (non-finite logits)"));
}

}  // namespace
}  // namespace kvcache::model
