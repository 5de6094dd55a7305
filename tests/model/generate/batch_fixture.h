// batch_fixture.h - requests in a batch, held against the same ones alone.
#pragma once

#include <map>
#include <random>

#include "kvcache/model/batcher.h"
#include "tests/model/generate/generate_fixture.h"

namespace kvcache::model {

inline constexpr CacheKind kBatchKinds[] = {
    CacheKind::kConcat, CacheKind::kPreallocated, CacheKind::kWindow};

// A window is the one kind whose shared step can be recorded, so it is.
inline BatcherOptions batching(CacheKind kind) {
  return {.graphs = kind == CacheKind::kWindow ? eager_graphs() : nullptr};
}

inline std::string name_of_kind(const testing::TestParamInfo<CacheKind>& info) {
  return std::string(to_string(info.param));
}

// What generate() makes of `request`, without its hooks.
inline GenerateResult alone(const LanguageModel& model, CacheKind kind,
                            const BatchRequest& request,
                            std::optional<int64_t> capacity = {}) {
  const auto cache = make_cache(kind, model, {.capacity = capacity});
  return generate(model, cache.get(), request.tokens, request.options);
}

// All but the milliseconds, and the seed, which may have been drawn.
inline void expect_same(const GenerateResult& got,
                        const GenerateResult& wanted) {
  EXPECT_EQ(got.tokens, wanted.tokens);
  EXPECT_EQ(got.text, wanted.text);
  EXPECT_EQ(got.log_probs, wanted.log_probs);
  EXPECT_EQ(got.best, wanted.best);
  EXPECT_EQ(got.finish_reason, wanted.finish_reason);
  EXPECT_EQ(got.reused, 0);
  EXPECT_EQ(got.cache_length, wanted.cache_length);
  EXPECT_EQ(got.timings.prefill_tokens, wanted.timings.prefill_tokens);
  EXPECT_EQ(got.timings.decode_steps, wanted.timings.decode_steps);
}

// A result that was cut short: the same up to there.
inline void expect_start_of(const GenerateResult& got,
                            const GenerateResult& wanted) {
  ASSERT_LE(got.tokens.size(), wanted.tokens.size());
  for (size_t i = 0; i < got.tokens.size(); ++i) {
    EXPECT_EQ(got.tokens[i], wanted.tokens[i]) << i;
  }
}

inline std::map<uint64_t, BatchResult> by_id(std::vector<BatchResult> results) {
  std::map<uint64_t, BatchResult> sorted;
  for (BatchResult& result : results) {
    const uint64_t id = result.id;
    EXPECT_TRUE(sorted.emplace(id, std::move(result)).second)
        << "two results of " << id;
  }
  return sorted;
}

// Requests of every sort that fit a vocabulary of 64 and a context of 64.
class RandomRequests {
 public:
  explicit RandomRequests(unsigned seed) : random_(seed) {
    std::vector<std::string> words;  // of one or two letters; 4 ids have none
    for (int i = 0; i < 60; ++i) {
      std::string word(1, static_cast<char>('a' + i % 20));
      if (i >= 20) word += static_cast<char>('a' + i % 7);
      words.push_back(word);
    }
    tokenizer_ =
        std::make_shared<FakeTokenizer>(words, std::vector<int64_t>{58, 59});
  }

  int64_t number(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(random_() %
                                      static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return number(1, 100) <= percent; }

  BatchRequest next() {
    BatchRequest request;
    const int64_t length = number(1, 40);
    for (int64_t i = 0; i < length; ++i) {
      request.tokens.push_back(number(0, 63));
    }
    GenerateOptions& options = request.options;
    if (chance(90)) options.max_new_tokens = number(1, 14);
    options.sampling.seed = random_();
    if (chance(60)) draw(options.sampling);
    if (chance(30)) options.sampling.repetition_penalty = 1.3;
    if (chance(70)) options.tokenizer = tokenizer_;
    if (options.tokenizer && chance(50)) {
      options.stop = {std::string(1, static_cast<char>('a' + number(0, 19)))};
    }
    if (chance(30)) options.stop_tokens = {number(0, 63), number(0, 63)};
    options.ignore_eos = chance(30);
    options.chunk = number(1, 16);
    if (chance(50)) options.log_probs = number(0, 3);
    return request;
  }

  // One that submit() refuses.
  BatchRequest bad() {
    BatchRequest request = next();
    switch (number(0, 4)) {
      case 0:
        request.options.sampling.temperature = -1;
        break;
      case 1:
        request.tokens.clear();
        break;
      case 2:
        request.tokens.back() = 64;
        break;
      case 3:
        request.options.max_new_tokens = 1000;
        break;
      default:
        request.options.chunk = 0;
        break;
    }
    return request;
  }

 private:
  void draw(SamplingOptions& sampling) {
    sampling.temperature = chance(50) ? 0.7 : 1.4;
    if (chance(40)) sampling.top_k = number(1, 20);
    if (chance(40)) sampling.top_p = 0.8;
    if (chance(30)) sampling.min_p = 0.05;
  }

  std::mt19937_64 random_;
  TokenizerPtr tokenizer_;
};

}  // namespace kvcache::model
