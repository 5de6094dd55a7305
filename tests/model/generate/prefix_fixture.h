// prefix_fixture.h - answers of toy models with and without a prefix cache.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/prefix_cache.h"
#include "tests/model/generate/toy_language_model.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {

using Tokens = std::vector<int64_t>;

struct Case {
  toy::Variant variant = toy::Variant::kHybrid;
  bool exact = true;
};

inline std::shared_ptr<ToyLanguageModel> model_of(const Case& of) {
  return std::make_shared<ToyLanguageModel>(of.variant, 96, of.exact);
}

inline std::shared_ptr<CheckpointStore> store_of(size_t bytes = 1 << 24) {
  return std::make_shared<CheckpointStore>(
      StoreOptions{.max_bytes = bytes, .min_prefix = 2});
}

inline PrefixOptions small_chunks() {
  PrefixOptions options{.block = 4, .chunk = 4};
  options.placement.stride = 4;
  return options;
}

inline Tokens some(size_t count, int seed) {
  Tokens tokens;
  for (const int id : toy::some_ids(count, seed)) {
    tokens.push_back(id % (toy::kVocabulary - 1));
  }
  return tokens;
}

// The same, and no other number shares its first token.
inline Tokens text_of(int64_t number, size_t count) {
  Tokens tokens = some(count, 3);
  tokens[0] = number;
  return tokens;
}

inline GenerateOptions greedy(std::shared_ptr<PrefixCache> prefix = {},
                              int64_t count = 5) {
  GenerateOptions options{.max_new_tokens = count, .chunk = 4, .log_probs = 2};
  options.prefix = std::move(prefix);
  return options;
}

inline GenerateResult answer(const LanguageModel& model, const Tokens& prompt,
                             const GenerateOptions& options,
                             CacheKind kind = CacheKind::kPreallocated) {
  const auto cache = make_cache(kind, model);
  return generate(model, cache.get(), prompt, options);
}

// Bit for bit.
inline void expect_same(const GenerateResult& got, const GenerateResult& cold) {
  EXPECT_EQ(got.tokens, cold.tokens);
  EXPECT_EQ(got.log_probs, cold.log_probs);
  EXPECT_EQ(got.cache_length, cold.cache_length);
}

class PrefixCacheTest : public ::testing::TestWithParam<Case> {
 protected:
  std::shared_ptr<ToyLanguageModel> model = model_of(GetParam());
};
inline auto all_cases() {
  return ::testing::Values(
      Case{toy::Variant::kHybrid, true}, Case{toy::Variant::kHybrid, false},
      Case{toy::Variant::kAttention, true},
      Case{toy::Variant::kAttention, false}, Case{toy::Variant::kMixed, true});
}

inline std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return toy::name_of(info.param.variant) +
         (info.param.exact ? "Exact" : "InChunks");
}

}  // namespace kvcache::model
