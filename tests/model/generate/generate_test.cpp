// generate_test.cpp - the loop over every cache: limits, end tokens, stop
// strings.

#include "tests/model/generate/generate_fixture.h"

namespace kvcache::model {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::SizeIs;

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

}  // namespace
}  // namespace kvcache::model
