// concat_cache.h: exact in size, new memory with every commit.
#include "kvcache/concat_cache.h"

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tests/support/toy_allocator.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

CacheSpec two_layers(int64_t rows = 1) {
  return {.rows = rows,
          .dtype = at::kFloat,
          .layers = {AttentionLayer{.heads = 2, .head_dim = 4},
                     AttentionLayer{.heads = 2, .head_dim = 4}}};
}

void step_of(Cache& cache, const Tensor& k, const Tensor& v) {
  Step step = cache.begin_step({.tokens = k.size(2)});
  step.update(0, k, v);
  step.update(1, k, v);
  step.commit();
}

// Behaviour A4: K and V of the first step are compact copies, even when they
// are slices of one projection; nothing keeps the storage of Q alive.
TEST(ConcatCache, FirstStepIsACompactCopy) {
  ConcatCache cache(two_layers());
  TestAllocator& memory = TestAllocator::install();
  {
    const Tensor qkv = at::randn({1, 5, 6, 4});  // [B, T, Hq + 2 H, D]
    const Tensor k = qkv.narrow(2, 2, 2).transpose(1, 2);
    const Tensor v = qkv.narrow(2, 4, 2).transpose(1, 2);
    step_of(cache, k, v);
    EXPECT_EQ(qkv.storage().use_count(), 3U);  // qkv, k, v
    EXPECT_TRUE(cache.export_kv(1).k.equal(k));
    EXPECT_TRUE(cache.export_kv(1).v.equal(v));
  }
  EXPECT_EQ(cache.memory().k.reserved, 2U * 2 * 5 * 4 * 4);
  const int64_t before = memory.live_bytes;
  EXPECT_EQ(cache.memory().k.used, cache.memory().k.reserved);
  EXPECT_EQ(memory.live_bytes, before);
}

// Behaviour A5: logical bytes and bytes of unique storages; nothing when empty.
TEST(ConcatCache, StorageReport) {
  ConcatCache cache(two_layers(2));
  EXPECT_EQ(cache.memory().total().used, 0U);
  EXPECT_EQ(cache.memory().total().reserved, 0U);
  EXPECT_EQ(cache.describe(),
            "ConcatCache(layers=2, rows=2, capacity=unbounded, kv_heads=2, "
            "head_dim=4, dtype=float32, 0.0 MiB, 0 KiB/token, length=0)");
  step_of(cache, at::randn({2, 2, 3, 4}), at::randn({2, 2, 3, 4}));
  step_of(cache, at::randn({2, 2, 1, 4}), at::randn({2, 2, 1, 4}));
  const size_t bytes = 2 * 2 * 2 * 4 * 4 * 4;  // layers, B, H, S, D, float
  EXPECT_EQ(cache.memory().k.used, bytes);
  EXPECT_EQ(cache.memory().v.reserved, bytes);
  EXPECT_EQ(cache.memory().total().reserved, 2 * bytes);
  EXPECT_FALSE(cache.memory().k.capacity.has_value());
}

// Memory of the longest row; what a truncation leaves is let go by the next
// step, and everything by reset.
TEST(ConcatCache, SizeFollowsTheLongestRow) {
  ConcatCache cache(two_layers(2));
  const auto reserved = [&] { return cache.memory().k.reserved / (4 * 4 * 8); };
  step_of(cache, at::randn({2, 2, 6, 4}), at::randn({2, 2, 6, 4}));
  EXPECT_EQ(reserved(), 6U);
  cache.truncate(2);
  step_of(cache, at::randn({2, 2, 1, 4}), at::randn({2, 2, 1, 4}));
  EXPECT_EQ(reserved(), 3U);
  cache.reset(0);
  EXPECT_EQ(reserved(), 3U);  // row 1 has its tokens
  cache.reset(1);
  EXPECT_EQ(reserved(), 0U);
}

// The epoch rises with each address that moves, and with nothing else.
TEST(ConcatCache, EpochRisesWithEveryCommit) {
  ConcatCache cache(two_layers());
  const auto rises = [&](const auto& call) {
    const uint64_t before = cache.address_epoch();
    call();
    return cache.address_epoch() > before;
  };
  const Tensor k = at::randn({1, 2, 2, 4});
  EXPECT_FALSE(rises([&] { cache.reset(); }));  // empty already
  EXPECT_TRUE(rises([&] { step_of(cache, k, k); }));
  EXPECT_FALSE(rises([&] {
    Step step = cache.begin_step({.tokens = 2});
    step.update(0, k, k);
  }));
  EXPECT_FALSE(rises([&] { cache.truncate(1); }));
  EXPECT_FALSE(rises([&] { cache.mark(); }));
  EXPECT_FALSE(rises([&] { cache.fork(); }));
  EXPECT_TRUE(rises([&] { cache.reorder(std::vector<int64_t>{0}); }));
  EXPECT_TRUE(rises([&] { cache.reset(); }));
}

// Only empty rows are chosen: nothing of the others is kept, in any number.
TEST(ConcatCache, ReorderOfEmptyRowsLetsGo) {
  ConcatCache cache(two_layers(2));
  Step step = cache.begin_step({.tokens = 2, .first_row = 0, .rows = 1});
  const Tensor k = at::randn({1, 2, 2, 4});
  step.update(0, k, k);
  step.update(1, k, k);
  step.commit();
  cache.reorder(std::vector<int64_t>{1, 1, 1});
  EXPECT_EQ(cache.memory().k.reserved, 0U);
  EXPECT_EQ(cache.validate(), std::vector<std::string>{});
  const Tensor next = at::randn({3, 2, 2, 4});
  step_of(cache, next, next);
  EXPECT_TRUE(cache.export_kv(0).k.equal(next));
}

// A step without a commit holds no memory afterwards.
TEST(ConcatCache, AnAbandonedStepHoldsNothing) {
  ConcatCache cache(two_layers());
  const Tensor k = at::randn({1, 2, 3, 4});
  step_of(cache, k, k);
  const size_t before = cache.memory().k.reserved;
  {
    Step step = cache.begin_step({.tokens = 3});
    step.update(0, k, k);
    EXPECT_GT(cache.memory().k.reserved, before);
  }
  EXPECT_EQ(cache.memory().k.reserved, before);
}

// One attention layer would do, but a model of states alone has none.
TEST(ConcatCache, RecurrentLayersAlone) {
  const Model model =
      make_model({RecurrentLayer{.state_shape = {3, 2}},
                  RecurrentLayer{.conv_channels = kChannels, .conv_taps = 1}});
  for (const Kind& kind : kinds()) {
    const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 2));
    Ids ids = some_ids(4);
    feed_all(*cache, model, ids);
    cache->mark();
    feed_all(*cache, model, {1});
    if (!kind.fixed_rows) {
      cache->reorder(std::vector<int64_t>{1, 0, 1});
    }
    EXPECT_EQ(cache->truncate(4).reason, TruncationReason::kExact);
    for (const Floats& got : feed_all(*cache, model, {2})) {
      EXPECT_EQ(got, last_of(*cache, model, joined(ids, {2}), 1));
    }
    EXPECT_EQ(cache->validate(), std::vector<std::string>{});
    EXPECT_EQ(cache->memory().k.reserved, 0U);
  }
}

}  // namespace
}  // namespace kvcache::toy
