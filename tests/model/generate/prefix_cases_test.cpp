// Reports on prefix and state caches, tried with a hybrid of transformers'
// making (T-HY) and the whole way from prompt to answer.
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "kvcache/model/generate.h"
#include "kvcache/model/prefix_cache.h"
#include "kvcache/window_cache.h"
#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {
namespace {

using kvcache::testing::as_row;
using kvcache::testing::error_text;
using kvcache::testing::Ids;
using kvcache::testing::load_tiny;

const std::shared_ptr<const Transformer>& hybrid() {
  static const auto model = load_tiny("qwen3_5");
  return model;
}

Ids numbers(int64_t first, int64_t count) {
  Ids ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  for (int64_t& id : ids) id = (id * 7 + id / 5) % 60;
  return ids;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Ids first_of(const Ids& ids, size_t count) {
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count)};
}

// Logits of the last token after steps of these sizes.
Tensor after_steps(Cache& cache, const Ids& ids, std::vector<size_t> sizes) {
  Tensor logits;
  size_t done = 0;
  for (const size_t size : sizes) {
    const std::span<const int64_t> part(ids.data() + done, size);
    Step step = cache.begin_step({.tokens = static_cast<int64_t>(size)});
    logits = hybrid()->forward(as_row(part), step, {});
    step.commit();
    done += size;
  }
  return logits;
}

PreallocatedCache fresh(int64_t rows = 1) {
  return PreallocatedCache(hybrid()->cache_spec(rows, 96));
}

std::shared_ptr<PrefixCache> prefix_of(PrefixOptions options = {}) {
  auto store = std::make_shared<CheckpointStore>(
      StoreOptions{.max_bytes = 1 << 26, .min_prefix = 1});
  return std::make_shared<PrefixCache>(hybrid(), std::move(store),
                                       std::move(options));
}

GenerateResult answer(const Ids& prompt, std::shared_ptr<PrefixCache> prefix,
                      std::vector<int64_t> marks = {}) {
  PreallocatedCache cache = fresh();
  GenerateOptions options{
      .max_new_tokens = 4, .ignore_eos = true, .log_probs = 1};
  options.prefix = std::move(prefix);
  options.marks = std::move(marks);
  return generate(*hybrid(), &cache, prompt, options);
}

// Tokens and every bit of their log-probabilities.
void expect_cold(const GenerateResult& got, const Ids& prompt) {
  const GenerateResult cold = answer(prompt, nullptr);
  EXPECT_EQ(got.tokens, cold.tokens);
  EXPECT_EQ(got.log_probs, cold.log_probs);
}

// K35: restore points at 5 and 9 of 14 tokens serve prompts that share 5, 7, 9
// and 12 of them; short prompts are no exception.
TEST(PrefixCases, K35TheDeepestPointBeforeTheDifference) {
  const auto prefix = prefix_of();
  const Ids text = numbers(1, 14);
  answer(text, prefix, {5, 9});
  const std::pair<size_t, int64_t> wanted[] = {{5, 5}, {7, 5}, {9, 9}, {12, 9}};
  for (const auto& [shared, restored] : wanted) {
    Ids prompt = first_of(text, shared);
    prompt.push_back(61 - static_cast<int64_t>(shared));
    prompt.push_back(3);
    const GenerateResult got = answer(prompt, prefix);
    EXPECT_EQ(got.reuse->report.restored, restored) << shared;
    EXPECT_EQ(got.reuse->report.matched, static_cast<int64_t>(shared));
    expect_cold(got, prompt);
  }
}

// K37: whoever goes on from a kept state, by fewer tokens than the convolution
// has taps or more, leaves it as it is.
TEST(PrefixCases, K37AKeptStateNeverChanges) {
  PreallocatedCache cache = fresh();
  const Ids text = numbers(2, 6);
  after_steps(cache, text, {6});
  const Checkpoint kept = cache.checkpoint(0, BlockOptions{.block = 4});
  const RestorePoint& point = *kept.points.back();
  const Tensor conv = point.conv.clone(), state = point.state.clone();
  for (size_t count = 1; count <= 4; ++count) {
    const Ids more = numbers(30, static_cast<int64_t>(count));
    cache.reset();
    cache.restore(kept, 0);
    const Tensor got = after_steps(cache, more, {count});
    PreallocatedCache cold = fresh();
    EXPECT_TRUE(
        at::equal(got, after_steps(cold, joined(text, more), {6 + count})));
    EXPECT_TRUE(at::equal(point.conv, conv));
    EXPECT_TRUE(at::equal(point.state, state));
  }
}

// K38, K39: every way to cut a prompt gives the same bits, at chunk and tap
// borders alike.
TEST(PrefixCases, K38K39HoweverAPromptIsCut) {
  const Ids twenty = numbers(3, 20);
  PreallocatedCache whole_cache = fresh();
  const Tensor whole = after_steps(whole_cache, twenty, {20});
  const std::string held = toy::picture(whole_cache);
  const std::vector<std::vector<size_t>> cuts = {
      {10, 10}, {1, 19}, {19, 1}, {7, 7, 6}, std::vector<size_t>(20, 1)};
  for (const std::vector<size_t>& cut : cuts) {
    PreallocatedCache cache = fresh();
    EXPECT_TRUE(at::equal(after_steps(cache, twenty, cut), whole));
    EXPECT_EQ(toy::picture(cache), held);
  }
  for (const size_t length : {2U, 3U, 4U, 5U, 31U, 33U, 63U, 64U, 65U, 70U}) {
    const Ids ids = numbers(4, static_cast<int64_t>(length));
    PreallocatedCache a = fresh(), b = fresh();
    EXPECT_TRUE(at::equal(after_steps(a, ids, {length}),
                          after_steps(b, ids, {length - 1, 1})))
        << length;
  }
}

// K74, K75: padding on the left or right, in one row or two, in the first step
// and in one behind a state, never reaches a state.
TEST(PrefixCases, K74K75PaddingNeverReachesAState) {
  for (const bool left : {true, false}) {
    PreallocatedCache cache = fresh(2);
    const Ids turn = numbers(5, 4);
    Step first = cache.begin_step({.tokens = 4});
    hybrid()->forward(as_row(joined(turn, turn)).view({2, 4}), first, {});
    first.commit();
    const Ids two = numbers(6, 2), five = numbers(7, 5), pad(3, 11);
    const Ids padded = left ? joined(pad, two) : joined(two, pad);
    const std::vector<int64_t> skip = {left ? 3 : 0, 0}, count = {2, 5};
    Step second = cache.begin_step({.tokens = 5, .skip = skip, .count = count});
    const Tensor logits = hybrid()->forward(
        as_row(joined(padded, five)).view({2, 5}), second, {});
    second.commit();
    for (int64_t row = 0; row < 2; ++row) {
      PreallocatedCache alone = fresh();
      const Ids ids = joined(turn, row == 0 ? two : five);
      const Tensor wanted = after_steps(alone, ids, {ids.size()});
      EXPECT_TRUE(at::equal(logits.narrow(0, row, 1), wanted)) << row << left;
      EXPECT_EQ(toy::bytes_of(cache.checkpoint(row)),
                toy::bytes_of(alone.checkpoint(0)));
    }
  }
}

// K42: a sliding layer that no longer holds its keys is no place to go on from;
// what cannot be kept at all is said before anything is computed.
TEST(PrefixCases, K42ARingIsRefusedAtOnce) {
  const toy::Model model = toy::make_model(toy::Variant::kSliding);
  CacheSpec spec = toy::spec_of(model, 1, 32);
  spec.max_step = 4;
  const auto cache = std::make_unique<PreallocatedCache>(
      spec, PreallocatedOptions{.rings = RingOptions{}});
  EXPECT_THAT(error_text([&] { cache->checkpoint(0, BlockOptions{}); }),
              ::testing::HasSubstr("blocks hold every position but this cache "
                                   "keeps rings"));
}

// K50: more of the same conversation is reused, and said to be.
TEST(PrefixCases, K50AHitIsAHit) {
  const auto prefix = prefix_of();
  const Ids text = numbers(8, 12);
  answer(text, prefix);
  const Ids longer = joined(text, {1, 2, 3});
  const GenerateResult got = answer(longer, prefix);
  EXPECT_EQ(got.reuse->report.restored, 12);
  EXPECT_EQ(got.timings.prefill_tokens, 3);
  EXPECT_EQ(prefix->store().stats().tokens_reused, 12);
  expect_cold(got, longer);
}

// K109: tokens are compared, whatever an index says.
TEST(PrefixCases, K109TokensDecide) {
  const auto prefix = prefix_of();
  answer({1, 2, 3}, prefix, {1, 2});
  for (const auto& [prompt, matched] : std::vector<std::pair<Ids, int64_t>>{
           {{4, 5, 6}, 0}, {{1, 2, 4}, 2}, {{1, 2}, 2}}) {
    const GenerateResult got = answer(prompt, prefix);
    EXPECT_EQ(got.reuse->report.matched, matched);
    EXPECT_LE(got.reuse->report.restored, matched);
    expect_cold(got, prompt);
  }
}

// K111: what one tenant left, another neither reuses nor counts.
TEST(PrefixCases, K111TenantsDoNotSeeEachOther) {
  const auto prefix = prefix_of();
  const Ids text = numbers(9, 8);
  const auto of = [&](const std::string& tenant) {
    PreallocatedCache cache = fresh();
    GenerateOptions options{.max_new_tokens = 1, .ignore_eos = true};
    options.prefix = prefix;
    options.space = {.tenant = tenant};
    return generate(*hybrid(), &cache, text, options).reuse->report;
  };
  of("T1");
  EXPECT_EQ(of("T2").matched, 0);
  EXPECT_EQ(of("T1").restored, 8);
  EXPECT_EQ(prefix->store().stats(Namespace{.tenant = "T2"}).hits, 0);
  EXPECT_EQ(prefix->store().stats(Namespace{.tenant = "T1"}).hits, 1);
}

}  // namespace
}  // namespace kvcache::model
