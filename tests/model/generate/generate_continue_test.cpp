// generate_continue_test.cpp - what ends a generation early, and what can go on
// after it: cancellation, errors, conversations.

#include <atomic>
#include <thread>

#include "tests/model/generate/generate_fixture.h"

namespace kvcache::model {
namespace {

using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

INSTANTIATE_TEST_SUITE_P(Kinds, GenerateTest, testing::ValuesIn(kKinds),
                         [](const auto& info) {
                           return std::string(to_string(info.param));
                         });
TEST_P(GenerateTest, CancelsBetweenSteps) {
  const auto model = FakeModel::hashed(64, 400);
  const auto cache = cache_for(*model);
  std::stop_source source;
  int seen = 0;
  const auto result =
      generate(*model, cache.get(), counting(5), {.max_new_tokens = 50},
               {.on_token =
                    [&](const GeneratedToken&) {
                      if (++seen == 3) source.request_stop();
                    },
                .stop = source.get_token()});
  EXPECT_EQ(result.finish_reason, FinishReason::kCancelled);
  EXPECT_THAT(result.tokens, SizeIs(3));
  EXPECT_EQ(result.cache_length, cached() ? 5 + 3 - 1 : 0);
  if (cache) {
    EXPECT_THAT(cache->validate(), IsEmpty());
  }

  // Before the first step, and between two chunks of a prefill.
  const auto none =
      generate(*model, nullptr, counting(5), {}, {.stop = source.get_token()});
  EXPECT_EQ(none.finish_reason, FinishReason::kCancelled);
  EXPECT_THAT(none.tokens, IsEmpty());
  if (!cached()) return;
  const auto fresh = cache_for(*model);
  std::stop_source chunks;
  const auto part = generate(*model, fresh.get(), counting(10), {.chunk = 4},
                             {.on_prefill =
                                  [&](int64_t done, int64_t total) {
                                    EXPECT_EQ(total, 10);
                                    if (done == 8) chunks.request_stop();
                                  },
                              .stop = chunks.get_token()});
  EXPECT_EQ(part.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(part.cache_length, 8);
  // The same call again takes it up from there.
  const auto rest =
      generate(*model, fresh.get(), counting(10), {.max_new_tokens = 4});
  EXPECT_EQ(rest.reused, 8);
  EXPECT_EQ(
      rest.tokens,
      generate(*model, nullptr, counting(10), {.max_new_tokens = 4}).tokens);
}

TEST_P(GenerateTest, AnErrorLeavesACacheThatGoesOn) {
  const auto model = FakeModel::hashed(64, 400);
  const auto oracle =
      generate(*model, nullptr, counting(5), {.max_new_tokens = 8});
  const auto cache = cache_for(*model);
  model->fail_after = model->steps + 3;
  EXPECT_EQ(error_of([&] {
              generate(*model, cache.get(), counting(5), {.max_new_tokens = 8});
            }),
            "[FakeModel] told to.");
  model->fail_after = -1;
  if (!cache) return;
  EXPECT_EQ(cache->lengths()[0], 5 + 2);  // the step that failed left no trace
  EXPECT_THAT(cache->validate(), IsEmpty());
  auto text = counting(5);
  text.insert(text.end(), oracle.tokens.begin(), oracle.tokens.begin() + 3);
  const auto rest = generate(*model, cache.get(), text, {.max_new_tokens = 5});
  EXPECT_EQ(rest.reused, 7);
  EXPECT_THAT(rest.tokens,
              ElementsAreArray(std::span(oracle.tokens).subspan(3)));
}

TEST_P(GenerateTest, AHookThatThrowsEndsIt) {
  const auto model = FakeModel::scripted(3, 100, 1, {1, 2});
  const auto cache = cache_for(*model);
  int calls = 0;
  EXPECT_EQ(error_of([&] {
              generate(*model, cache.get(), std::vector<int64_t>{0},
                       {.tokenizer = std::make_shared<FakeTokenizer>(
                            std::vector<std::string>{"a", "b", "\xF0"})},
                       {.on_text = [&](std::string_view) {
                         ++calls;
                         throw std::runtime_error("full disk");
                       }});
            }),
            "full disk");
  EXPECT_EQ(calls, 1);
  if (cache) {
    EXPECT_EQ(cache->lengths()[0], 1);
    EXPECT_THAT(cache->validate(), IsEmpty());
  }
}

TEST_P(GenerateTest, NonFiniteLogitsAreAnError) {
  FakeModel model(4, 50, [](FakeModel::History history) {
    std::vector<float> row(4, 1);
    if (history.size() == 4) row[2] = std::numeric_limits<float>::quiet_NaN();
    return row;
  });
  const auto cache = cache_for(model);
  EXPECT_THAT(error_of([&] {
                generate(model, cache.get(), std::vector<int64_t>{0, 1});
              }),
              HasSubstr("got nan for token 2 (non-finite logits)"));
}

// K04: the cache that was given is the one that is filled.
TEST(GenerateCacheTest, FillsTheCallersCache) {
  const auto model = FakeModel::hashed(64, 100);
  for (const CacheKind kind : {CacheKind::kConcat, CacheKind::kPreallocated}) {
    const auto cache = make_cache(kind, *model);
    std::vector<int64_t> text;
    for (int64_t i = 1; i <= 5; ++i) {
      text.push_back(i);
      const auto result = generate(*model, cache.get(), text,
                                   {.max_new_tokens = 1, .log_probs = 0});
      EXPECT_EQ(cache->lengths()[0], i);
      const auto oracle = generate(*model, nullptr, text,
                                   {.max_new_tokens = 1, .log_probs = 0});
      EXPECT_EQ(result.tokens, oracle.tokens);
      EXPECT_EQ(result.log_probs, oracle.log_probs);
    }
    EXPECT_EQ(error_of([&] { generate(*model, cache.get(), text); }),
              "[generate] the cache already holds 5 tokens of a text of 5; the "
              "last one must be left to compute, so truncate() the cache.");
  }
}

TEST(GenerateCacheTest, RefusesACacheOfAnotherShape) {
  const auto model = FakeModel::hashed(64, 100);
  const auto rows = make_cache(CacheKind::kConcat, *model, {.rows = 2});
  EXPECT_EQ(error_of([&] { generate(*model, rows.get(), counting(3)); }),
            "[generate] the cache must have 1 row(s) but got 2.");
}

// K06: the last sampled token is not yet in the cache when a text goes on.
TEST_P(GenerateTest, AConversationFeedsTheLastTokenToo) {
  for (const bool by_end_token : {false, true}) {
    const auto oracle_model = FakeModel::hashed(64, 400);
    const auto first =
        generate(*oracle_model, nullptr, counting(6), {.max_new_tokens = 4});
    // End by the fourth token or by the length limit.
    const auto model = FakeModel::hashed(64, 400);
    GenerateOptions options = {.max_new_tokens = by_end_token ? 9 : 4};
    if (by_end_token) options.stop_tokens = {first.tokens[3]};
    Conversation conversation(model, cache_for(*model));
    const auto one = conversation.generate(counting(6), options);
    EXPECT_EQ(one.tokens, first.tokens);
    EXPECT_EQ(one.finish_reason,
              by_end_token ? FinishReason::kStop : FinishReason::kLength);
    ASSERT_THAT(conversation.tokens(), SizeIs(10));
    if (cached()) {
      EXPECT_EQ(conversation.cache()->lengths()[0], 9);
    }

    const auto two = conversation.extend(std::vector<int64_t>{60, 61, 62},
                                         {.max_new_tokens = 1, .log_probs = 0});
    auto all = counting(6);
    all.insert(all.end(), first.tokens.begin(), first.tokens.end());
    all.insert(all.end(), {60, 61, 62});
    const auto oracle = generate(*oracle_model, nullptr, all,
                                 {.max_new_tokens = 1, .log_probs = 0});
    EXPECT_EQ(two.tokens, oracle.tokens);
    EXPECT_EQ(two.log_probs, oracle.log_probs);
    EXPECT_EQ(two.reused, cached() ? 9 : 0);
    EXPECT_EQ(two.timings.prefill_tokens, cached() ? 4 : 13);
    all.push_back(two.tokens[0]);
    EXPECT_THAT(conversation.tokens(), ElementsAreArray(all));
  }
}

TEST_P(GenerateTest, AConversationKeepsWhatTheNewTextShares) {
  const auto model = FakeModel::hashed(64, 400);
  Conversation conversation(model, cache_for(*model));
  conversation.generate(counting(10), {.max_new_tokens = 3});
  auto other = counting(10);
  other[7] = 63;
  const auto result = conversation.generate(other, {.max_new_tokens = 3});
  EXPECT_EQ(result.reused, cached() ? 7 : 0);
  EXPECT_EQ(result.tokens,
            generate(*model, nullptr, other, {.max_new_tokens = 3}).tokens);
  // The same text again: its last token is left to compute.
  const auto same = conversation.generate(other, {.max_new_tokens = 3});
  EXPECT_EQ(same.reused, cached() ? 9 : 0);
  EXPECT_EQ(same.tokens, result.tokens);
  // A shorter one.
  const auto shorter =
      conversation.generate(std::span(other).first(4), {.max_new_tokens = 2});
  EXPECT_EQ(shorter.reused, cached() ? 3 : 0);
  conversation.reset();
  EXPECT_THAT(conversation.tokens(), IsEmpty());
  EXPECT_EQ(conversation.generate(other, {.max_new_tokens = 3}).tokens,
            result.tokens);
}

TEST_P(GenerateTest, AConversationSurvivesBadArgumentsAndErrors) {
  const auto model = FakeModel::hashed(64, 20);
  Conversation conversation(model, cache_for(*model));
  const auto first = conversation.generate(counting(6), {.max_new_tokens = 4});
  const std::vector<int64_t> before(conversation.tokens().begin(),
                                    conversation.tokens().end());
  EXPECT_THAT(error_of([&] { conversation.generate(counting(21)); }),
              HasSubstr("21 tokens is longer than the context of 20"));
  EXPECT_THAT(error_of([&] { conversation.generate({}); }),
              HasSubstr("must not be empty"));
  EXPECT_THAT(error_of([&] { conversation.extend(std::vector<int64_t>{99}); }),
              HasSubstr("id 10 is 99"));
  EXPECT_THAT(conversation.tokens(), ElementsAreArray(before));

  model->fail_after = model->steps + 2;
  EXPECT_THAT(error_of([&] { conversation.extend(counting(2)); }),
              HasSubstr("told to"));
  model->fail_after = -1;
  if (cached()) {
    // 10 tokens and 2 more were fed, then one new one.
    EXPECT_THAT(conversation.tokens(), SizeIs(13));
    EXPECT_EQ(conversation.cache()->lengths()[0], 13);
  } else {
    EXPECT_THAT(conversation.tokens(), ElementsAreArray(before));
  }
  auto again = before;
  again.insert(again.end(), {0, 1});
  EXPECT_EQ(conversation.generate(again, {.max_new_tokens = 3}).tokens,
            generate(*model, nullptr, again, {.max_new_tokens = 3}).tokens);
}

TEST_P(GenerateTest, SameSeedSameText) {
  const auto model = FakeModel::hashed(64, 400);
  const auto run = [&](uint64_t seed) {
    const auto cache = cache_for(*model);
    return generate(*model, cache.get(), counting(4),
                    {.max_new_tokens = 20,
                     .sampling = {.temperature = 0.8, .seed = seed}})
        .tokens;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(GenerateThreadsTest, OneModelServesManyCachesAtOnce) {
  const auto model = FakeModel::hashed(64, 400);
  const auto oracle =
      generate(*model, nullptr, counting(9), {.max_new_tokens = 30});
  std::atomic<int> equal = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const auto other = FakeModel::hashed(64, 400);
        const auto cache = make_cache(CacheKind::kPreallocated, *other);
        equal +=
            generate(*other, cache.get(), counting(9), {.max_new_tokens = 30})
                .tokens == oracle.tokens;
      });
    }
  }
  EXPECT_EQ(equal, 4);
}

TEST(CacheFactoryTest, NamesAndKinds) {
  for (const CacheKind kind : kKinds) {
    EXPECT_EQ(cache_kind(to_string(kind)), kind);
  }
  EXPECT_EQ(cache_kind("state"), CacheKind::kState);
  EXPECT_EQ(cache_kind("paged"), std::nullopt);
  const auto model = FakeModel::hashed(64, 2000);
  EXPECT_EQ(default_cache_kind(*model), CacheKind::kPreallocated);
  EXPECT_EQ(make_cache(CacheKind::kNone, *model), nullptr);
  EXPECT_EQ(make_cache(CacheKind::kPreallocated, *model)->capacity(), 2000);
  EXPECT_EQ(
      make_cache(CacheKind::kConcat, *model, {.capacity = 5})->spec().capacity,
      std::nullopt);
  const auto grown = make_cache(CacheKind::kPreallocated, *model,
                                {.capacity = 1500, .grow = true});
  const auto small = grown->memory().k.reserved;
  generate(*model, grown.get(), counting(600), {.max_new_tokens = 1});
  EXPECT_GT(grown->memory().k.reserved, small);
  EXPECT_EQ(grown->capacity(), 1500);
}

}  // namespace
}  // namespace kvcache::model
