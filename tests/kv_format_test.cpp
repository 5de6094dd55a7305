// kv_format_test.cpp - K and V as 8-bit codes: what is stored, whatever way it
// came in, and what it costs.

#include "src/kv_format.h"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvcache/attention.h"
#include "kvcache/checkpoint_store.h"
#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/slot_cache.h"
#include "src/kernels/quantise.h"
#include "tests/support/error_text.h"

namespace kvcache {
namespace {

using testing::error_text;

// An error of half a code, and the rounding of code * scale in float32.
constexpr double kHalfACode = 0.5 + 1e-4;

CacheSpec int8_spec(int64_t head_dim = 8, int64_t capacity = 40) {
  return {.rows = 1,
          .capacity = capacity,
          .dtype = at::kFloat,
          .kv_format = KvFormat::kInt8,
          .layers = {AttentionLayer{.heads = 2, .head_dim = head_dim}}};
}

struct Tokens {
  Tensor k, v;  // [1, 2, n, D]
};

Tokens some_tokens(int64_t count, int64_t head_dim = 8, uint64_t seed = 1) {
  at::manual_seed(seed);
  return {at::randn({1, 2, count, head_dim}),
          at::randn({1, 2, count, head_dim})};
}

Tokens part(const Tokens& of, int64_t first, int64_t count) {
  return {of.k.narrow(2, first, count), of.v.narrow(2, first, count)};
}

void feed(Cache& cache, const Tokens& tokens) {
  Step step = cache.begin_step({.tokens = tokens.k.size(2)});
  step.update(0, tokens.k, tokens.v);
  step.commit();
}

// Every byte that is stored of row 0.
bool same_bytes(const Cache& a, const Cache& b) {
  const Checkpoint x = a.checkpoint(0), y = b.checkpoint(0);
  return x.length == y.length && at::equal(x.kv[0].k, y.kv[0].k) &&
         at::equal(x.kv[0].v, y.kv[0].v);
}

double worst_in_codes(const Tensor& got, const Tensor& want) {
  const Tensor scale = want.abs().amax(-1, true).div(127);
  return got.sub(want).abs().div(scale).max().item<double>();
}

TEST(KvFormat, ARowOfNumbersAsCodes) {
  const float x[] = {0.5F, -1.27F, 0.015F, 1.27F, 0.025F, -0.005F};
  int8_t codes[6];
  float scale = 0;
  kernels::quantise_row(x, 6, codes, &scale);
  EXPECT_EQ(scale, 1.27F / 127);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(codes[i], static_cast<int8_t>(std::nearbyint(x[i] / scale)));
  }
  // A scale of exactly 1: ties go to the even code.
  const float ties[] = {127, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F};
  kernels::quantise_row(ties, 6, codes, &scale);
  EXPECT_EQ(scale, 1);
  const int8_t wanted[] = {127, 0, 2, 2, 0, -2};
  EXPECT_TRUE(std::equal(codes, codes + 6, wanted));
}

TEST(KvFormat, RowsOfZerosTinyAndInfiniteNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  int8_t codes[2];
  float scale = -1;
  for (const float zero : {0.0F, -0.0F}) {
    const float x[] = {zero, zero};
    kernels::quantise_row(x, 2, codes, &scale);
    EXPECT_EQ(scale, 0);
    EXPECT_EQ(codes[0], 0);
  }
  const float tiny[] = {std::numeric_limits<float>::denorm_min() * 190, 0};
  kernels::quantise_row(tiny, 2, codes, &scale);
  EXPECT_LE(std::abs(codes[0] * scale - tiny[0]), tiny[0]);
  const float large[] = {std::numeric_limits<float>::max(), -1};
  kernels::quantise_row(large, 2, codes, &scale);
  EXPECT_EQ(codes[0], 127);
  EXPECT_TRUE(std::isfinite(scale));
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    const float x[] = {1, bad};
    kernels::quantise_row(x, 2, codes, &scale);
    EXPECT_TRUE(std::isnan(scale)) << bad;
  }
  const uint16_t ones[] = {0x3f80, 0xbf80};  // bfloat16
  kernels::quantise_row(ones, 2, codes, &scale);
  EXPECT_EQ(scale, 1.0F / 127);
  EXPECT_EQ(codes[1], -127);
}

// K53: what is stored depends on the tokens, not on how many came at once.
TEST(KvFormat, K53AnySplitOfTheTokensGivesTheSameBytes) {
  const Tokens all = some_tokens(40);
  PreallocatedCache whole(int8_spec());
  feed(whole, all);
  const std::vector<std::vector<int64_t>> splits = {
      std::vector<int64_t>(40, 1), std::vector<int64_t>(5, 8), {3, 37}};
  for (const std::vector<int64_t>& steps : splits) {
    PreallocatedCache cache(int8_spec());
    int64_t first = 0;
    for (const int64_t count : steps) {
      feed(cache, part(all, first, count));
      first += count;
    }
    EXPECT_TRUE(same_bytes(whole, cache));
    EXPECT_EQ(cache.memory().total().used, whole.memory().total().used);
  }
  const Tensor k = whole.export_kv(0).k;
  EXPECT_FALSE(at::equal(k, all.k));  // quantised it is
  EXPECT_LE(worst_in_codes(k, all.k), kHalfACode);
}

// K55: nothing but the length says what is quantised.
TEST(KvFormat, K55ATruncationLeavesNoStaleCodes) {
  const Tokens first = some_tokens(10), other = some_tokens(5, 8, 2);
  PreallocatedCache cache(int8_spec());
  feed(cache, part(first, 0, 8));
  feed(cache, part(first, 8, 2));
  cache.truncate(4);
  feed(cache, other);
  PreallocatedCache fresh(int8_spec());
  feed(fresh, {at::cat({first.k.narrow(2, 0, 4), other.k}, 2),
               at::cat({first.v.narrow(2, 0, 4), other.v}, 2)});
  EXPECT_EQ(cache.lengths()[0], 9);
  EXPECT_TRUE(same_bytes(cache, fresh));
}

// K56: a scale is one head's of one token, so every head size is right, and
// what is asked for is seen in the live bytes.
TEST(KvFormat, K56EveryHeadSizeInTheLiveBytes) {
  for (const int64_t D : {1, 2, 3, 7, 8, 12, 20, 64, 80, 128, 4096}) {
    SCOPED_TRACE(D);
    const CacheSpec spec = int8_spec(D, 6);
    PreallocatedCache cache(spec);
    const size_t codes = static_cast<size_t>(2 * 6 * ((D + 3) / 4 * 4));
    EXPECT_EQ(cache.memory().k.reserved, codes);
    EXPECT_EQ(cache.memory().v.reserved, codes);
    EXPECT_EQ(cache.memory().scales.reserved, 2U * 2 * 6 * sizeof(float));
    EXPECT_EQ(cache.memory().total().reserved, bytes_needed(spec, 6));
    EXPECT_EQ(cache.memory().total().reserved, cache.bytes());
    EXPECT_EQ(cache.bytes(), 6 * cache.bytes_per_token());
    const Tokens tokens = some_tokens(3, D);
    feed(cache, tokens);
    EXPECT_EQ(cache.memory().scales.used, 2U * 2 * 3 * sizeof(float));
    EXPECT_LE(worst_in_codes(cache.export_kv(0).k, tokens.k), kHalfACode);
    EXPECT_LE(worst_in_codes(cache.export_kv(0).v, tokens.v), kHalfACode);
    EXPECT_EQ(cache.checkpoint(0).bytes(), 3 * cache.bytes_per_token());
  }
}

// Two bytes a value become one and four more a head: 53 % at 64.
TEST(KvFormat, HalfTheBytesOfBFloat16) {
  CacheSpec spec = int8_spec(64);
  spec.dtype = at::kBFloat16;
  const size_t int8 = bytes_needed(spec, 100);
  spec.kv_format = KvFormat::kPlain;
  EXPECT_EQ(int8 * 32, bytes_needed(spec, 100) * 17);
}

// A head of a live token that is not finite gives NaN to whoever sees it, and
// to nobody else.
TEST(KvFormat, WhatIsNotFiniteIsSeenAsNaN) {
  for (const bool keys : {true, false}) {
    Tokens tokens = some_tokens(6);
    (keys ? tokens.k : tokens.v)[0][1][3][2] =
        std::numeric_limits<float>::infinity();
    PreallocatedCache cache(int8_spec());
    Step step = cache.begin_step({.tokens = 6});
    const Tensor out =
        attend(some_tokens(6, 8, 3).k, step.update(0, tokens.k, tokens.v));
    EXPECT_FALSE(out[0][0].isnan().any().item<bool>());
    EXPECT_FALSE(out[0][1].narrow(0, 0, 3).isnan().any().item<bool>());
    EXPECT_TRUE(out[0][1].narrow(0, 3, 3).isnan().all().item<bool>());
  }
}

// Plain tensors in: quantised as if they had been fed.
TEST(KvFormat, ImportsPlainTensors) {
  const Tokens tokens = some_tokens(5);
  PreallocatedCache fed(int8_spec()), imported(int8_spec());
  feed(fed, tokens);
  const std::vector<KvTensors> layers = {{tokens.k, tokens.v}};
  imported.import_kv(layers, std::vector<int64_t>{5});
  EXPECT_TRUE(same_bytes(fed, imported));
  // Negated lazily: what the tensors show, not what lies in memory.
  const std::vector<KvTensors> shown = {
      {at::_neg_view(tokens.k.neg()), at::_neg_view(tokens.v.neg())}};
  imported.import_kv(shown, std::vector<int64_t>{5});
  EXPECT_TRUE(same_bytes(fed, imported));
  // What comes out are the rounded values: once more in, at most a code apart.
  const std::vector<KvTensors> out = {fed.export_kv(0)};
  imported.import_kv(out, std::vector<int64_t>{5});
  EXPECT_LE(worst_in_codes(imported.export_kv(0).k, out[0].k), kHalfACode);
}

// One kind's checkpoint goes into every other that keeps codes, byte for byte.
TEST(KvFormat, CheckpointsKeepTheCodes) {
  PreallocatedCache cache(int8_spec());
  feed(cache, some_tokens(9));
  const Checkpoint saved = cache.checkpoint(0);
  EXPECT_EQ(saved.format, KvFormat::kInt8);
  EXPECT_EQ(saved.kv[0].k.sizes(), at::IntArrayRef({2, 9, 12}));
  WindowCache window(int8_spec());
  window.restore(saved, 0);
  EXPECT_TRUE(same_bytes(cache, window));
  SlotCache slots(int8_spec());
  ASSERT_TRUE(slots.admit(window.checkpoint(0, {.block = 4})).has_value());
  EXPECT_TRUE(same_bytes(cache, slots));
  CacheSpec plain = int8_spec();
  plain.kv_format = KvFormat::kPlain;
  ConcatCache other(plain);
  EXPECT_EQ(error_text([&] { other.restore(saved, 0); }),
            "[Cache::restore] the cache holds plain K/V but got a checkpoint "
            "with int8 K/V; values would change, so make the cache with that "
            "CacheSpec::kv_format.");
}

// A store never offers one format's text to a cache of the other.
TEST(KvFormat, StoresTellFormatsApart) {
  const CacheSpec int8 = int8_spec();
  CacheSpec plain = int8;
  plain.kv_format = KvFormat::kPlain;
  EXPECT_NE(layout_of(std::span(&int8, 1)), layout_of(std::span(&plain, 1)));
}

TEST(KvFormat, WhoCannotSaysSo) {
  CacheSpec spec = int8_spec();
  EXPECT_EQ(error_text([&] { ConcatCache cache(spec); }),
            "[ConcatCache::ConcatCache] K/V must be plain but the CacheSpec "
            "asks for int8; use a PreallocatedCache, WindowCache, SlotCache or "
            "StateCache.");
  spec.dtype = at::kHalf;
  EXPECT_EQ(error_text([&] { PreallocatedCache cache(spec); }),
            "[Cache::Cache] dtype must be float32 or bfloat16 for int8 K/V but "
            "got float16; set CacheSpec::dtype.");
  spec = int8_spec(4097);
  EXPECT_EQ(error_text([&] { PreallocatedCache cache(spec); }),
            "[Cache::Cache] head_dim must be at most 4096 for int8 K/V but got "
            "4097; leave CacheSpec::kv_format plain.");
  spec = int8_spec();
  spec.device = at::kMeta;
  EXPECT_EQ(error_text([&] { PreallocatedCache cache(spec); }),
            "[Cache::Cache] int8 K/V must be on the CPU but the device is "
            "meta; leave CacheSpec::kv_format plain there.");
}

TEST(KvFormat, DescribesItself) {
  PreallocatedCache cache(int8_spec(64, 32));
  EXPECT_EQ(cache.describe(),
            "PreallocatedCache(layers=1, rows=1, capacity=32, kv_heads=2, "
            "head_dim=64, dtype=float32, K/V in int8, 0.0 MiB, 0 KiB/token, "
            "length=0)");
}

}  // namespace
}  // namespace kvcache
