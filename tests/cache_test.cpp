// cache.h: what the verbs do that no other test names, and the cases of public
// reports about caches (areas A, B and H), on every kind.
#include "kvcache/cache.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "tests/support/toy_contract.h"

namespace kvcache::toy {
namespace {

class CacheTest : public ContractTest {};
KVCACHE_CONTRACT(CacheTest);

// K01: every way to crop 3 tokens, each on a fresh copy, then two more tokens.
TEST_P(CacheTest, K01Crop) {
  const std::unique_ptr<Cache> original = make();
  const Ids ids = some_ids(3);
  feed_checked(*original, {}, {ids[0]});
  original->mark();
  feed_checked(*original, {ids[0]}, {ids[1]});
  original->mark();
  feed_checked(*original, {ids[0], ids[1]}, {ids[2]});
  const auto crop = [&](int64_t target, int64_t kept) {
    const std::unique_ptr<Cache> cache = original->fork();
    if (target >= 0) {
      cache->truncate(target);
    } else {
      cache->drop_last(-target);
    }
    EXPECT_EQ(lengths(*cache), all(kept)) << target;
    poison(*cache);
    feed_checked(*cache, {ids.begin(), ids.begin() + kept}, {6, 7});
  };
  crop(0, 0);
  crop(3, 3);
  crop(99, 3);
  crop(std::numeric_limits<int64_t>::max(), 3);
  crop(-1, 2);
  crop(-2, 1);
  crop(-3, 0);
  crop(-5, 0);
  crop(-std::numeric_limits<int64_t>::max(), 0);
}

// K07: one too many, all at once, token by token and as a block.
TEST_P(CacheTest, K07NothingIsWrittenPastTheCapacity) {
  const std::unique_ptr<Cache> cache = make(16);
  EXPECT_NE(error_of([&] { feed_all(*cache, model, some_ids(17)); }), "");
  EXPECT_EQ(lengths(*cache), all(0));
  const Ids ids = some_ids(15);
  feed_checked(*cache, {}, {ids.begin(), ids.begin() + 14});
  EXPECT_NE(error_of([&] { feed_all(*cache, model, some_ids(4)); }), "");
  feed_checked(*cache, {ids.begin(), ids.begin() + 14}, {ids[14]});
  feed_checked(*cache, ids, {1});
  for (int i = 0; i < 4; ++i) {
    EXPECT_NE(error_of([&] { feed_all(*cache, model, {1}); }), "");
  }
  EXPECT_EQ(lengths(*cache), all(16));
  EXPECT_FALSE(cache->fits(1));
  EXPECT_TRUE(cache->fits(0));
  cache->reset();
  feed_checked(*cache, {}, some_ids(16, 2), 5);
}

// K11: a second prompt after reset, and when the reset was forgotten.
TEST_P(CacheTest, K11ASecondPrompt) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(5));
  feed_checked(*cache, some_ids(5), {1, 2, 3}, 1);
  const std::unique_ptr<Cache> forgotten = cache->fork();
  cache->reset();
  feed_checked(*cache, {}, some_ids(2, 3));
  feed_checked(*cache, some_ids(2, 3), {4, 5, 6}, 1);
  const std::unique_ptr<Cache> fresh = make();
  feed_checked(*fresh, {}, some_ids(2, 3));
  feed_checked(*fresh, some_ids(2, 3), {4, 5, 6}, 1);
  EXPECT_EQ(picture(*cache), picture(*fresh));
  // Without it the second prompt goes on behind the first.
  feed_checked(*forgotten, joined(some_ids(5), {1, 2, 3}), some_ids(2, 3));
}

// K12, promise 4: NaN in memory that holds no token, K and V or V alone, at
// every length: the oracle's bits. Fresh memory is NaN in all these tests.
TEST_P(CacheTest, K12NaNInUnwrittenCells) {
  const std::unique_ptr<Cache> cache = make();
  const Ids ids = some_ids(14, 1);
  for (size_t n = 0; n < ids.size(); ++n) {
    poison(*cache);
    feed_checked(*cache, {ids.begin(), ids.begin() + n}, {ids[n]});
  }
  cache->truncate(0);
  poison(*cache);
  feed_checked(*cache, {}, some_ids(3));
  feed_checked(*cache, some_ids(3), {1, 2}, 1);
}

// Rows of their own length in any order, more or fewer of them, twice.
TEST_P(CacheTest, ReorderAndRepeat) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<Ids> held;
  for (int64_t row = 0; row < rows; ++row) {
    held.push_back(some_ids(static_cast<size_t>(2 + row * 2), row));
  }
  feed(*cache, model, held);
  cache->mark();
  const auto check = [&](const std::vector<int64_t>& order) {
    std::vector<Ids> next;
    for (const int64_t row : order) {
      next.push_back(held[row]);
    }
    held = next;
    ASSERT_EQ(cache->spec().rows, static_cast<int64_t>(order.size()));
    ASSERT_EQ(cache->lengths().size(), order.size());
    std::vector<Ids> more(order.size());
    for (size_t i = 0; i < more.size(); ++i) {
      more[i] = {static_cast<int>(i), 3};
    }
    const std::vector<Floats> got = feed(*cache, model, more);
    for (size_t i = 0; i < more.size(); ++i) {
      held[i] = joined(held[i], more[i]);
      EXPECT_EQ(got[i], last_of(*cache, model, held[i], 2));
    }
  };
  std::vector<int64_t> order(rows, rows - 1);
  const uint64_t epoch = cache->address_epoch();
  cache->reorder(order);
  EXPECT_EQ(cache->address_epoch() == epoch, kind.in_place);
  poison(*cache);
  check(order);
  if (kind.fixed_rows) {
    EXPECT_THROW(cache->repeat_rows(2), c10::Error);
    std::iota(order.begin(), order.end(), 0);  // as they are
    check(order);
    return;
  }
  cache->repeat_rows(2);
  EXPECT_NE(cache->address_epoch(), epoch);
  std::vector<int64_t> twice;
  for (int64_t row = 0; row < rows; ++row) {
    twice.insert(twice.end(), 2, row);
  }
  poison(*cache);
  check(twice);
  cache->reorder(std::vector<int64_t>{1});
  check({1});
  cache->repeat_rows(1);
  check({0});
}

// Plain tensors out and in: equal to what was written, 0 past a length.
TEST_P(CacheTest, ExportAndImport) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<Ids> ids(rows, some_ids(3));
  ids[0] = some_ids(6);
  feed(*cache, model, ids);
  poison(*cache);
  std::vector<KvTensors> layers;
  size_t index = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const auto* a = std::get_if<AttentionLayer>(&model.layers[i]);
    if (a == nullptr) {
      continue;
    }
    layers.push_back(cache->export_kv(static_cast<int64_t>(i)));
    const Tensor& v = layers.back().v;
    ASSERT_EQ(v.sizes(),
              at::IntArrayRef({rows, a->heads, int64_t{6}, a->head_dim}));
    for (int64_t row = 0; row < rows; ++row) {
      const Floats want = oracle_for(*cache, model, ids[row]).values[index];
      for (int64_t p = 0; p < 6; ++p) {
        for (int64_t n = 0; n < a->heads * a->head_dim; ++n) {
          const size_t at = static_cast<size_t>(p * a->heads * a->head_dim + n);
          EXPECT_EQ(Elements(v).get({row, n / a->head_dim, p, n % a->head_dim}),
                    at < want.size() ? rounded(want[at], dtype) : 0);
        }
      }
    }
    ++index;
  }
  if (hybrid) {
    return;  // refused; see errors_test
  }
  if (kind.format != KvFormat::kPlain) {
    return;  // values are quantised once more; see kv_format_test
  }
  const std::unique_ptr<Cache> to = make();
  feed_all(*to, model, some_ids(9, 4));
  std::vector<int64_t> lengths(cache->lengths().begin(),
                               cache->lengths().end());
  lengths[0] = 5;
  to->import_kv(layers, lengths);
  poison(*to);
  ids[0] = some_ids(5);
  std::vector<Ids> next(rows, Ids{1, 2});
  const std::vector<Floats> got = feed(*to, model, next);
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(got[row], last_of(*to, model, joined(ids[row], {1, 2}), 2));
  }
}

TEST_P(CacheTest, WhatImportRefuses) {
  if (variant != Variant::kAttention || dtype != at::kFloat) {
    return;
  }
  const std::unique_ptr<Cache> cache = make(8);
  feed_checked(*cache, {}, some_ids(4));
  const std::string held = picture(*cache);
  const std::vector<KvTensors> good{cache->export_kv(0), cache->export_kv(1)};
  const std::string count = std::to_string(rows);
  const auto refuses = [&](const std::vector<KvTensors>& layers,
                           const std::vector<int64_t>& lengths,
                           const std::string& text) {
    EXPECT_EQ(error_of([&] { cache->import_kv(layers, lengths); }), text);
    EXPECT_EQ(picture(*cache), held);
  };
  refuses({good[0]}, all(4),
          "[Cache::import_kv] layers must be 2 pairs but got 1; pass one per "
          "layer.");
  refuses(good, {},
          "[Cache::import_kv] lengths must have one entry per row, " + count +
              ", but got 0.");
  for (const int64_t length : {-1, 9}) {
    std::vector<int64_t> lengths = all(4);
    lengths[rows - 1] = length;
    refuses(good, lengths,
            "[Cache::import_kv] a length must be in [0, 8] but got " +
                std::to_string(length) +
                "; import fewer or raise CacheSpec::capacity.");
  }
  const auto shape = [&](const std::string& longest, const std::string& got) {
    return "[Cache::import_kv] layer 1 must be [" + count +
           ", 2, >= " + longest + ", 4] float32 but got " + got +
           "; export it from a cache of the same model.";
  };
  std::vector<int64_t> lengths = all(0);
  lengths[rows - 1] = 5;
  refuses({{at::empty({rows, 2, 5, 4}), at::empty({rows, 2, 5, 4})}, good[1]},
          lengths, shape("5", "[" + count + ", 2, 4, 4] float32 on cpu"));
  refuses({good[0], {good[1].k, Tensor()}}, all(4),
          shape("4", "an undefined tensor"));
  refuses({good[0], {good[1].k.to(at::kHalf), good[1].v}}, all(4),
          shape("4", "[" + count + ", 2, 4, 4] float16 on cpu"));
}

// The bytes a cache will take are known before it is made.
TEST(Cache, BytesNeeded) {
  CacheSpec spec{.rows = 3,
                 .dtype = at::kBFloat16,
                 .layers = {AttentionLayer{.heads = 2, .head_dim = 4},
                            RecurrentLayer{.conv_channels = 8,
                                           .conv_taps = 3,
                                           .state_shape = {3, 2}}}};
  const size_t states = 2 * 3 * (8 * 3 * 2 + 6 * 4);
  EXPECT_EQ(bytes_needed(spec, 0), states);
  EXPECT_EQ(bytes_needed(spec, 10), states + 2 * 3 * 10 * 2 * 4 * 2);
  spec.conv_dtype = at::kFloat;
  EXPECT_EQ(bytes_needed(spec, 0), 2 * 3 * (8 * 3 * 4 + 6 * 4));
}

// Unbounded rows report no capacity; a bounded one's is its bytes when full.
TEST(Cache, CapacityOfTheReport) {
  const Model model = make_model(Variant::kAttention);
  CacheSpec spec = spec_of(model, 2, 10);
  EXPECT_EQ(ConcatCache(spec).memory().total().capacity,
            bytes_needed(spec, 10));
  EXPECT_EQ(PreallocatedCache(spec).memory().total().capacity,
            bytes_needed(spec, 10));
  spec.capacity.reset();
  EXPECT_FALSE(ConcatCache(spec).memory().total().capacity.has_value());
  EXPECT_EQ(ConcatCache(spec).capacity(), std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(ConcatCache(spec).fits(std::numeric_limits<int64_t>::max()));
}

}  // namespace
}  // namespace kvcache::toy
