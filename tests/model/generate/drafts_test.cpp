// Prompt lookup: what is guessed, and that guesses change nothing but the cost.
#include "src/model/generate/drafts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/model/cache_factory.h"
#include "tests/model/generate/generate_fixture.h"
#include "tests/model/generate/toy_language_model.h"
#include "tests/support/random_model.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The longest end that stood before decides, and of equal ones the latest.
TEST(DraftTokens, FollowTheLatestPlaceOfTheLongestEnd) {
  const PromptLookup lookup{.drafts = 3};
  const auto draft = [&](std::vector<int64_t> text, int64_t most = 3) {
    return draft_tokens(text, lookup, most);
  };
  EXPECT_THAT(draft({1, 2, 3, 4, 5, 1, 2, 3}), ElementsAre(4, 5, 1));
  EXPECT_THAT(draft({1, 2, 7, 9, 2, 8, 1, 2}), ElementsAre(7, 9, 2));
  EXPECT_THAT(draft({2, 7, 2, 8, 2}), ElementsAre(8, 2));
  EXPECT_THAT(draft({2, 7, 2, 8, 2}, 1), ElementsAre(8));
  EXPECT_THAT(draft({5, 5, 5}), ElementsAre(5));
  EXPECT_THAT(draft({1, 2, 3}), IsEmpty());
  EXPECT_THAT(draft({1}), IsEmpty());
  EXPECT_THAT(draft({}), IsEmpty());
  EXPECT_THAT(draft({1, 1}, 0), IsEmpty());
}

// Tokens, log-probabilities and what the cache holds are those of plain
// decoding: greedy and sampled, for attention and for states.
TEST(Drafts, GuessesChangeNothingButTheCost) {
  for (const toy::Variant variant : toy::kVariants) {
    const ToyLanguageModel model(variant);
    for (const CacheKind kind :
         {CacheKind::kConcat, CacheKind::kPreallocated, CacheKind::kWindow}) {
      for (const double temperature : {0.0, 0.7}) {
        GenerateOptions options{
            .max_new_tokens = 40,
            .sampling = {.temperature = temperature, .seed = 3},
            .log_probs = 1};
        const std::vector<int64_t> prompt = {1, 2, 3, 1, 2, 3, 1};
        const auto plain_cache = make_cache(kind, model);
        const GenerateResult plain =
            generate(model, plain_cache.get(), prompt, options);
        options.lookup.drafts = 4;
        const auto cache = make_cache(kind, model);
        const GenerateResult got =
            generate(model, cache.get(), prompt, options);
        EXPECT_EQ(got.tokens, plain.tokens);
        EXPECT_EQ(got.log_probs, plain.log_probs);
        EXPECT_EQ(got.cache_length, plain.cache_length);
        EXPECT_EQ(toy::picture(*cache), toy::picture(*plain_cache));
        EXPECT_EQ(got.timings.decode_steps, plain.timings.decode_steps);
        EXPECT_GT(got.timings.drafted, 0);
        EXPECT_LE(got.timings.accepted, got.timings.drafted);
      }
    }
  }
}

// A hybrid model: where wrong drafts cost a replay, a window of states saves
// it, and the text is the same.
TEST(Drafts, AWindowOfStatesSavesTheReplay) {
  const auto model =
      kvcache::testing::random_model(kvcache::testing::hybrid_config());
  const std::vector<int64_t> prompt = {1, 2, 3, 1, 2, 3, 1};
  GenerateOptions options{.max_new_tokens = 60, .log_probs = 1};
  const auto plain_cache = make_cache(CacheKind::kPreallocated, *model);
  const GenerateResult plain =
      generate(*model, plain_cache.get(), prompt, options);
  options.lookup.drafts = 4;
  const auto run = [&] {
    const auto cache = make_cache(CacheKind::kPreallocated, *model);
    const GenerateResult got = generate(*model, cache.get(), prompt, options);
    EXPECT_EQ(got.tokens, plain.tokens);
    EXPECT_EQ(got.log_probs, plain.log_probs);
    EXPECT_EQ(toy::picture(*cache), toy::picture(*plain_cache));
    EXPECT_LT(got.timings.accepted, got.timings.drafted);
    return got.timings.replays;
  };
  EXPECT_EQ(run(), 0);
  options.lookup.speculation.window_bytes = 0;
  EXPECT_GT(run(), 0);
}

// A text that repeats itself is guessed right, in fewer forwards; the end token
// within drafts ends it there.
TEST(Drafts, ARepeatingTextTakesFewerSteps) {
  const auto model =
      FakeModel::scripted(64, 200, 4, {10, 11, 12, 13, 14}, {63});
  const auto cache = make_cache(CacheKind::kPreallocated, *model);
  GenerateOptions options{.max_new_tokens = 60, .lookup = {.drafts = 5}};
  const auto got =
      generate(*model, cache.get(), std::vector<int64_t>{1, 2, 3, 4}, options);
  EXPECT_EQ(got.tokens.size(), 60U);
  EXPECT_LT(model->steps, 25);
  EXPECT_GT(got.timings.accepted, 40);
  EXPECT_EQ(got.cache_length, 63);
}

TEST(Drafts, NeedACache) {
  const auto model = FakeModel::hashed(64, 200);
  EXPECT_EQ(error_of([&] {
              generate(*model, nullptr, std::vector<int64_t>{1},
                       {.lookup = {.drafts = 2}});
            }),
            "[generate] drafts need a cache, no recorded steps and 1 <= "
            "shortest <= longest but got drafts=2 shortest=1 longest=3; 0 "
            "drafts turn them off.");
}

}  // namespace
}  // namespace kvcache::model
