// generate_test.cpp - the loop over every cache: limits, end tokens, stop
// strings, cancellation, errors, continuing.

#include "kvcache/model/generate.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "kvcache/model/cache_factory.h"
#include "tests/model/generate/fake_model.h"

namespace kvcache::model {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr CacheKind kKinds[] = {CacheKind::kNone, CacheKind::kConcat,
                                CacheKind::kPreallocated};

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    const auto* torch = dynamic_cast<const c10::Error*>(&error);
    return torch ? torch->what_without_backtrace() : error.what();
  }
  return "nothing was thrown";
}

std::vector<int64_t> counting(int64_t count) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) ids[static_cast<size_t>(i)] = i % 60;
  return ids;
}

class GenerateTest : public testing::TestWithParam<CacheKind> {
 protected:
  std::unique_ptr<Cache> cache_for(const LanguageModel& model) const {
    return make_cache(GetParam(), model);
  }
  bool cached() const { return GetParam() != CacheKind::kNone; }
};

INSTANTIATE_TEST_SUITE_P(Kinds, GenerateTest, testing::ValuesIn(kKinds),
                         [](const auto& info) {
                           return std::string(to_string(info.param));
                         });

TEST_P(GenerateTest, MakesTheTokensThatTheWholeTextAsksFor) {
  const auto model = FakeModel::hashed(64, 400);
  const auto prompt = counting(7);
  const auto cache = cache_for(*model);
  const auto result =
      generate(*model, cache.get(), prompt,
               {.max_new_tokens = 20, .chunk = 3, .log_probs = 2});
  // The oracle, by hand.
  auto text = prompt;
  for (int i = 0; i < 20; ++i) {
    text.push_back(Sampler().sample(FakeModel::mixed(64, text)));
  }
  EXPECT_THAT(result.tokens,
              ElementsAreArray(std::span(text).subspan(prompt.size())));
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  EXPECT_THAT(result.log_probs, SizeIs(20));
  ASSERT_THAT(result.best, SizeIs(20));
  EXPECT_THAT(result.best[3], SizeIs(2));
  EXPECT_EQ(result.best[3][0].first, result.tokens[3]);
  EXPECT_EQ(result.best[3][0].second, result.log_probs[3]);
  EXPECT_EQ(result.cache_length, cached() ? 7 + 20 - 1 : 0);
  EXPECT_EQ(result.timings.prefill_tokens, 7);
  EXPECT_EQ(result.timings.decode_steps, 19);
}

TEST(GenerateIdentityTest, KindsAndChunksGiveTheSameBits) {
  const auto model = FakeModel::hashed(64, 400);
  const auto prompt = counting(17);
  const GenerateOptions options = {.max_new_tokens = 12,
                                   .sampling = {.temperature = 1,
                                                .top_p = 0.9,
                                                .repetition_penalty = 1.2,
                                                .seed = 5},
                                   .log_probs = 0};
  const auto oracle = generate(*model, nullptr, prompt, options);
  EXPECT_EQ(oracle.seed, 5U);
  for (const CacheKind kind : kKinds) {
    for (const int64_t chunk : {1, 4, 16, 17, 256}) {
      GenerateOptions chunked = options;
      chunked.chunk = chunk;
      const auto cache = make_cache(kind, *model);
      const auto result = generate(*model, cache.get(), prompt, chunked);
      EXPECT_EQ(result.tokens, oracle.tokens) << to_string(kind) << chunk;
      EXPECT_EQ(result.log_probs, oracle.log_probs) << to_string(kind);
    }
  }
}

// K103: the context is 16 tokens.
TEST_P(GenerateTest, PromptsAtTheContextNameBothNumbers) {
  const auto model = FakeModel::hashed(64, 16);
  const auto run = [&](int64_t prompt, std::optional<int64_t> count) {
    const auto cache = cache_for(*model);
    const auto text = error_of([&] {
      generate(*model, cache.get(), counting(prompt),
               {.max_new_tokens = count});
    });
    if (cache && text != "nothing was thrown") {
      EXPECT_EQ(cache->lengths()[0], 0);
    }
    return text;
  };
  EXPECT_EQ(run(15, 1), "nothing was thrown");
  EXPECT_EQ(run(15, {}), "nothing was thrown");
  EXPECT_EQ(run(15, 2),
            "[generate] prompt of 15 tokens and 2 new ones exceed the context "
            "of 16 tokens; ask for at most 1 new ones.");
  EXPECT_EQ(run(16, 1),
            "[generate] prompt of 16 tokens leaves no room for a new one in "
            "the context of 16 tokens; shorten it.");
  EXPECT_EQ(run(16, {}), run(16, 1));
  EXPECT_EQ(run(17, 1),
            "[generate] prompt of 17 tokens is longer than the context of 16 "
            "tokens; shorten it.");
  EXPECT_THAT(run(1000, {}), HasSubstr("prompt of 1000 tokens is longer than "
                                       "the context of 16 tokens"));
  EXPECT_EQ(run(0, 1),
            "[generate] the prompt must not be empty; give at least one "
            "token.");
  EXPECT_EQ(run(3, 0),
            "[generate] max_new_tokens must be at least 1 but got 0.");
  EXPECT_EQ(run(3, -1),
            "[generate] max_new_tokens must be at least 1 but got -1.");
  EXPECT_EQ(model->steps, 2);  // only the two runs that fit did any work
}

TEST_P(GenerateTest, DefaultLengthIsCutToWhatFits) {
  const auto model = FakeModel::hashed(64, 16);
  const auto cache = cache_for(*model);
  const auto result = generate(*model, cache.get(), counting(10));
  EXPECT_THAT(result.tokens, SizeIs(6));
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
}

TEST(GenerateLimitsTest, CacheCapacityAndContextOption) {
  const auto model = FakeModel::hashed(64, 100);
  const auto cache =
      make_cache(CacheKind::kPreallocated, *model, {.capacity = 10});
  EXPECT_EQ(error_of([&] {
              generate(*model, cache.get(), counting(8), {.max_new_tokens = 4});
            }),
            "[generate] prompt of 8 tokens and 4 new ones exceed the cache's "
            "capacity of 10 tokens; ask for at most 3 new ones.");
  EXPECT_EQ(cache->lengths()[0], 0);
  // The last token is not fed, so 8 + 3 fit into 10.
  EXPECT_THAT(generate(*model, cache.get(), counting(8)).tokens, SizeIs(3));
  EXPECT_THAT(error_of([&] {
                generate(*model, nullptr, counting(8), {.context = 101});
              }),
              HasSubstr("the context must be between 1 and 100 tokens, the "
                        "model's, but got 101"));
  EXPECT_THAT(generate(*model, nullptr, counting(8), {.context = 9}).tokens,
              SizeIs(1));
  EXPECT_THAT(
      error_of([&] { generate(*model, nullptr, counting(8), {.chunk = 0}); }),
      HasSubstr("the chunk must be at least 1 token but got 0"));
}

TEST_P(GenerateTest, RefusesIdsOutOfRange) {
  const auto model = FakeModel::hashed(64, 100);
  const auto cache = cache_for(*model);
  for (const int64_t bad : {-1, 64}) {
    EXPECT_EQ(error_of([&] {
                generate(*model, cache.get(), std::vector<int64_t>{1, bad});
              }),
              "[generate] token ids must be in [0, 64) but id 1 is " +
                  std::to_string(bad) + ".");
  }
  EXPECT_THAT(error_of([&] {
                generate(*model, cache.get(), counting(2),
                         {.stop_tokens = {64}});
              }),
              HasSubstr("id 0 is 64"));
  EXPECT_EQ(model->steps, 0);
}

// K105: every declared end token ends the text, whoever declares it.
TEST_P(GenerateTest, EveryDeclaredEndTokenStops) {
  std::vector<std::string> words;
  for (int i = 0; i < 10; ++i) words.push_back(std::string(1, char('a' + i)));
  // The model's files say 5 and 9, the tokenizer 7 and 8, the caller 3.
  const auto tokenizer =
      std::make_shared<FakeTokenizer>(words, std::vector<int64_t>{7, 8});
  for (const int64_t end : {5, 9, 7, 8, 3}) {
    const auto model = FakeModel::scripted(10, 100, 2, {1, 2, end, 4}, {5, 9});
    const auto cache = cache_for(*model);
    GenerateOptions options = {
        .max_new_tokens = 8, .tokenizer = tokenizer, .stop_tokens = {3}};
    const auto result =
        generate(*model, cache.get(), std::vector<int64_t>{0, 1}, options);
    EXPECT_THAT(result.tokens, ElementsAre(1, 2, end));
    EXPECT_EQ(result.finish_reason, FinishReason::kStop);
    EXPECT_EQ(result.text, "bc");
    EXPECT_EQ(result.cache_length, cached() ? 4 : 0);

    options.ignore_eos = true;
    const auto again = cache_for(*model);
    const auto on =
        generate(*model, again.get(), std::vector<int64_t>{0, 1}, options);
    EXPECT_THAT(on.tokens, SizeIs(end == 3 ? 3 : 8));  // 3 was asked for
  }
}

// Models pad their vocabularies: Qwen2.5 has 151936 ids, its tokenizer 151665.
TEST_P(GenerateTest, AnIdThatTheTokenizerLacksGivesNoText) {
  const auto model = FakeModel::scripted(8, 100, 2, {1, 6, 2, 7});
  const auto cache = cache_for(*model);
  const auto tokenizer =
      std::make_shared<FakeTokenizer>(std::vector<std::string>{"a", "b", "c"});
  std::string streamed;
  const auto result =
      generate(*model, cache.get(), std::vector<int64_t>{0, 5},
               {.max_new_tokens = 4, .tokenizer = tokenizer, .stop = {"x"}},
               {.on_text = [&](std::string_view text) { streamed += text; }});
  EXPECT_THAT(result.tokens, ElementsAre(1, 6, 2, 7));
  EXPECT_EQ(result.text, "bc");
  EXPECT_EQ(streamed, "bc");
}

// K101: nothing of a stop string is shown, wherever token borders lie.
struct StopCase {
  std::vector<std::string> stop;
  std::vector<std::string> words;  // one token each, said in this order
  std::string shown;
  size_t tokens;
};

TEST_P(GenerateTest, StopStringsNeverLeak) {
  const std::vector<StopCase> cases = {
      {{"beta gamma"}, {"alpha ", "be", "ta g", "amma", " x"}, "alpha ", 4},
      {{"DEFGHIJ"}, {"ABC", "DEF", "G", "HI", "J", "K"}, "ABC", 5},
      {{"stop"}, {"go ", "on stop and on", "x"}, "go on ", 2},
      {{"ab", "abc"}, {"x", "a", "b", "c"}, "x", 3},
      {{"abc", "ab"}, {"x", "ab", "c"}, "x", 2},
      {{"never"}, {"a", "nev", "e", "n"}, "anevenanev", 6},
      {{"P"}, {"x", "y"}, "xyxyxy", 6},  // "P" is in the prompt only
  };
  for (const StopCase& test : cases) {
    std::vector<std::string> words = test.words;
    words.push_back("P");
    std::vector<int64_t> script(test.words.size());
    for (size_t i = 0; i < script.size(); ++i) {
      script[i] = static_cast<int64_t>(i);
    }
    const auto vocab = static_cast<int64_t>(words.size());
    const auto model = FakeModel::scripted(vocab, 100, 1, script);
    const auto cache = cache_for(*model);
    std::string streamed, pieces;
    const auto result = generate(
        *model, cache.get(), std::vector<int64_t>{vocab - 1},
        {.max_new_tokens = 6,
         .tokenizer = std::make_shared<FakeTokenizer>(words),
         .stop = test.stop},
        {.on_text = [&](std::string_view text) { streamed += text; },
         .on_token = [&](const GeneratedToken& t) { pieces += t.text; }});
    EXPECT_EQ(result.text, test.shown);
    EXPECT_EQ(streamed, test.shown);
    EXPECT_THAT(test.shown, testing::StartsWith(pieces));
    EXPECT_THAT(result.tokens, SizeIs(test.tokens)) << test.shown;
    EXPECT_EQ(result.finish_reason, test.tokens == 6 && test.shown.size() > 3
                                        ? FinishReason::kLength
                                        : FinishReason::kStop);
    EXPECT_EQ(result.cache_length,
              cached() ? static_cast<int64_t>(test.tokens) : 0);
  }
}

TEST(GenerateStopTest, RefusesStopStringsItCannotKeep) {
  const auto model = FakeModel::hashed(64, 100);
  EXPECT_THAT(error_of([&] {
                generate(*model, nullptr, counting(2), {.stop = {"x"}});
              }),
              HasSubstr("stop strings need a tokenizer"));
  EXPECT_EQ(model->steps, 0);
}

// A tail that is no whole character, at each way to end.
TEST_P(GenerateTest, EveryEndFlushesTheDecoder) {
  const std::vector<std::string> words = {"a", "\xF0\x9F", "\x98\xB8", "END",
                                          "stop"};
  const auto tokenizer =
      std::make_shared<FakeTokenizer>(words, std::vector<int64_t>{3});
  const auto run = [&](std::vector<int64_t> script, int64_t count,
                       int64_t fail_after, int cancel_at) {
    const auto model = FakeModel::scripted(5, 100, 1, std::move(script));
    model->fail_after = fail_after;
    const auto cache = cache_for(*model);
    std::string shown;
    int tokens = 0;
    std::stop_source source;
    try {
      const auto result =
          generate(*model, cache.get(), std::vector<int64_t>{0},
                   {.max_new_tokens = count, .tokenizer = tokenizer},
                   {.on_text = [&](std::string_view text) { shown += text; },
                    .on_token =
                        [&](const GeneratedToken&) {
                          if (++tokens == cancel_at) source.request_stop();
                        },
                    .stop = source.get_token()});
      EXPECT_EQ(result.text, shown);
    } catch (const c10::Error&) {
      EXPECT_GE(fail_after, 0);
    }
    return shown;
  };
  EXPECT_EQ(run({0, 1, 2}, 3, -1, 0), "a\xF0\x9F\x98\xB8");  // whole
  EXPECT_EQ(run({0, 1}, 2, -1, 0), "a\xEF\xBF\xBD");         // length
  EXPECT_EQ(run({0, 1, 3}, 9, -1, 0), "a\xEF\xBF\xBD");      // end token
  EXPECT_EQ(run({0, 1, 2}, 9, -1, 2), "a\xEF\xBF\xBD");      // cancelled
  EXPECT_EQ(run({0, 1, 2}, 9, 2, 0), "a\xEF\xBF\xBD");       // error
}

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
  EXPECT_EQ(cache_kind("window"), std::nullopt);
  const auto model = FakeModel::hashed(64, 2000);
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
