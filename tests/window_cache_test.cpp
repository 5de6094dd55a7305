// WindowCache: buckets, and what its storage is. The contract suite runs on it.
#include "kvcache/window_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

// C1
TEST(WindowCache, C1DefaultBucketsDoubleBelowTheCapacity) {
  EXPECT_EQ(default_buckets(1000), (std::vector<int64_t>{128, 256, 512, 1000}));
  EXPECT_EQ(default_buckets(512), (std::vector<int64_t>{128, 256, 512}));
  EXPECT_EQ(default_buckets(128), (std::vector<int64_t>{128}));
  EXPECT_EQ(default_buckets(5), (std::vector<int64_t>{5}));
  EXPECT_EQ(default_buckets(10, 2), (std::vector<int64_t>{2, 4, 8, 10}));
  EXPECT_EQ(default_buckets(std::numeric_limits<int64_t>::max()).back(),
            std::numeric_limits<int64_t>::max());
}

std::vector<int64_t> buckets_of(std::vector<int64_t> wanted) {
  const Model model = make_model(Variant::kAttention);
  const WindowCache cache(spec_of(model, 1, 20), {.buckets = wanted});
  return {cache.buckets().begin(), cache.buckets().end()};
}

TEST(WindowCache, C1AUsersBucketsAreSortedUniqueAndCut) {
  EXPECT_EQ(buckets_of({20, 4, 8, 4}), (std::vector<int64_t>{4, 8, 20}));
  EXPECT_EQ(buckets_of({100, 7, 50}), (std::vector<int64_t>{7, 20}));
  EXPECT_EQ(buckets_of({}), (std::vector<int64_t>{20}));
  EXPECT_THAT(error_of([] {
                buckets_of({0, 20});
              }),
              HasSubstr("a bucket must be >= 1 but got 0"));
  EXPECT_THAT(error_of([] {
                buckets_of({4, 19});
              }),
              HasSubstr("must reach the capacity 20 but is 19"));
}

TEST(WindowCache, NeedsACapacity) {
  const Model model = make_model(Variant::kAttention);
  CacheSpec spec = spec_of(model);
  spec.capacity.reset();
  EXPECT_THAT(error_of([&] { WindowCache{spec}; }),
              HasSubstr("[WindowCache::WindowCache] capacity must be given"));
}

TEST(WindowCache, AWindowHoldsTheLongestRow) {
  const Model model = make_model(Variant::kAttention);
  WindowCache cache(spec_of(model, 2, 20), {.buckets = {4, 8, 20}});
  const auto window = [&](std::vector<int64_t> count) {
    Step step = cache.begin_step({.tokens = 5, .count = count});
    return step.reserve(0).window;
  };
  EXPECT_EQ(window({0, 0}), 4);
  EXPECT_EQ(window({4, 1}), 4);
  EXPECT_EQ(window({5, 1}), 8);
  feed(cache, model, {some_ids(7), some_ids(1)});
  EXPECT_EQ(window({1, 0}), 8);
  EXPECT_EQ(window({2, 0}), 21);  // all cells, the spare one too
  EXPECT_EQ(window({0, 5}), 8);   // the row that rests counts too
  EXPECT_EQ(cache.bucket(9), 20);
  EXPECT_THAT(error_of([&] { cache.bucket(21); }),
              HasSubstr("keys must be <= 20, the capacity, but got 21"));
}

// Fixed [layers, B, H, capacity + 1, D], K and V one allocation each, zeros.
TEST(WindowCache, StorageIsHeadMajorWithASpareCell) {
  const CacheSpec spec{.rows = 2,
                       .capacity = 6,
                       .dtype = at::kFloat,
                       .layers = {AttentionLayer{.heads = 3, .head_dim = 4},
                                  AttentionLayer{.heads = 3, .head_dim = 4}}};
  const WindowCache cache(spec);
  ASSERT_EQ(cache.storage().size(), 1U);
  const Tensor& k = cache.storage()[0].k;
  EXPECT_EQ(k.sizes(), at::IntArrayRef({2, 2, 3, 7, 4}));
  EXPECT_TRUE(k.is_contiguous());
  EXPECT_TRUE(k.eq(0).all().item<bool>());
  EXPECT_EQ(cache.allocated(), 6);
  EXPECT_EQ(cache.bytes(), size_t{2} * 2 * 2 * 3 * 7 * 4 * 4);
  EXPECT_THAT(cache.describe(), HasSubstr("WindowCache(layers=2, rows=2, "
                                          "capacity=6, kv_heads=3"));
}

// Padding that passes the capacity goes to the spare cell: overflow is judged
// on live tokens.
TEST(WindowCache, PaddingMayPassTheCapacity) {
  const Model model = make_model(Variant::kMixed);
  WindowCache cache(spec_of(model, 1, 12), {.buckets = {4, 12}});
  poison(cache);
  const Ids ids = some_ids(9);
  feed(cache, model, {ids});
  Ids padded(8, kDead);  // live: 2 of 8, behind 9 of 12
  padded[3] = 1;
  padded[4] = 2;
  const std::vector<int64_t> skip = {3}, count = {2};
  Step step = cache.begin_step({.tokens = 8, .skip = skip, .count = count});
  const Floats hidden = forward(model, step, padded, options_for(cache));
  step.commit();
  const Floats live(hidden.begin() + 3 * kWidth, hidden.begin() + 5 * kWidth);
  EXPECT_EQ(live, last_of(cache, model, joined(ids, {1, 2}), 2));
}

}  // namespace
}  // namespace kvcache::toy
