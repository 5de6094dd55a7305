// checkpoint_store.h: why a lookup finds no more; every reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <array>

#include "kvcache/checkpoint_store.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(StoreReason, NoEntry) {  // no text begins alike
  CheckpointStore store(plenty());
  EXPECT_EQ(look(store, ids(5)).report.reason, ReuseReason::kNoEntry);
  put(store, ids(5, 1));
  const LookupReport report = look(store, ids(5)).report;
  EXPECT_EQ(report.reason, ReuseReason::kNoEntry);
  EXPECT_EQ(report.matched, 0);
  EXPECT_EQ(report.first_different, std::nullopt);
  EXPECT_EQ(report.route, std::nullopt);
}

TEST(StoreReason, Namespace) {  // other namespaces only; none of them is shown
  CheckpointStore store(plenty());
  put(store, ids(5), {}, {.tenant = "a"});
  for (const Namespace& other :
       {Namespace{.tenant = "b"}, Namespace{.model = "m", .tenant = "a"},
        Namespace{.base = "x", .tenant = "a"}, Namespace{}}) {
    const Hit hit = look(store, ids(9), other);
    EXPECT_EQ(hit.position, 0);
    EXPECT_EQ(hit.report.matched, 0);
    EXPECT_EQ(hit.report.reason, ReuseReason::kNamespace);
  }
}

TEST(StoreReason, NamespaceOfAnotherAdapter) {  // same tokens, other adapter
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, kAttentionOnly, {.adapter = "red", .active_from = 6});
  for (const Namespace& other :
       {Namespace{.adapter = "blue", .active_from = 6}, Namespace{},
        Namespace{.adapter = "red", .active_from = 8},
        Namespace{.adapter = "blue", .active_from = 7}}) {
    const LookupReport report = look(store, text, other).report;
    EXPECT_EQ(report.reason, ReuseReason::kNamespace) << other.adapter;
    EXPECT_EQ(report.restored, 6);  // tokens before it are the base's
    EXPECT_EQ(report.first_different, std::nullopt);
  }
  const LookupReport early =
      look(store, text, {.adapter = "red", .active_from = 3}).report;
  EXPECT_EQ(early.restored, 3);
  EXPECT_EQ(early.reason, ReuseReason::kNamespace);
  EXPECT_EQ(look(store, text, {.adapter = "red", .active_from = 6}).position,
            11);
}

TEST(StoreReason, Route) {  // more is there, of another route
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, {.positions = {4}, .route = "x"});
  put(store, text, {.positions = {8}, .route = "y"});
  const LookupReport report = look(store, text, {}, "x").report;
  EXPECT_EQ(report.restored, 4);
  EXPECT_EQ(report.reason, ReuseReason::kRoute);
  EXPECT_EQ(look(store, text, {}, "z").report.reason, ReuseReason::kRoute);
  EXPECT_EQ(look(store, text, {}, "z").position, 0);
}

TEST(StoreReason, Generation) {  // more is there, of other weights
  CheckpointStore store(plenty());
  put(store, ids(6));
  LookupRequest request;
  const Ids tokens = ids(9);
  request.tokens = tokens;
  request.generation = 1;
  EXPECT_EQ(store.lookup(request).report.reason, ReuseReason::kGeneration);
  // Also once it was removed for that.
  EXPECT_EQ(store.invalidate_generations_before(1), 1);
  EXPECT_EQ(store.lookup(request).report.reason, ReuseReason::kGeneration);
  EXPECT_EQ(store.lookup(request).position, 0);
}

TEST(StoreReason, Evicted) {  // more was there, and had to go
  const Make make{.attention = false, .state_size = 4};
  CheckpointStore store({.max_bytes = 32, .min_prefix = 1});
  put(store, ids(6), make);
  put(store, ids(6, 1), make);
  put(store, ids(6, 2), make);
  EXPECT_EQ(look(store, ids(9)).report.reason, ReuseReason::kEvicted);
  EXPECT_EQ(look(store, ids(9, 2)).report.reason, ReuseReason::kAll);
  // A text that restored anywhere: also for a request that shares a part.
  CheckpointStore attention({.max_bytes = 200, .min_prefix = 1});
  put(attention, ids(6), kAttentionOnly);
  put(attention, ids(12, 1), kAttentionOnly);
  const LookupReport report = look(attention, first(ids(6), 3)).report;
  EXPECT_EQ(report.reason, ReuseReason::kEvicted);
  EXPECT_EQ(report.restored, 0);
  EXPECT_EQ(report.matched, 0);
}

TEST(StoreReason, WhatIsRememberedIsBounded) {  // then the reason is another
  const Make make{.attention = false, .state_size = 4};
  CheckpointStore store(
      {.max_bytes = 16, .min_prefix = 1, .most_remembered = 2});
  for (int64_t seed = 0; seed < 4; ++seed) put(store, ids(6, seed), make);
  EXPECT_EQ(look(store, ids(9, 0)).report.reason, ReuseReason::kNoEntry);
  EXPECT_EQ(look(store, ids(9, 1)).report.reason, ReuseReason::kEvicted);
  EXPECT_EQ(look(store, ids(9, 2)).report.reason, ReuseReason::kEvicted);
  EXPECT_THAT(store.validate(), IsEmpty());
}

TEST(StoreReason, TooShortAndNotEligibleAndDisabled) {  // nothing looked up
  CheckpointStore store(plenty(8));
  EXPECT_EQ(look(store, ids(8)).report.reason, ReuseReason::kTooShort);
  EXPECT_EQ(put(store, ids(7)), PutResult::kTooShort);
  EXPECT_EQ(look(store, ids(9)).report.reason, ReuseReason::kNoEntry);
  LookupRequest request;
  const Ids tokens = ids(9);
  request.tokens = tokens;
  request.eligible = false;
  EXPECT_EQ(store.lookup(request).report.reason, ReuseReason::kNotEligible);
  EXPECT_EQ(store.stats().rows, 1);  // only what was looked up is counted
  CheckpointStore disabled({.min_prefix = 1});
  EXPECT_EQ(put(disabled, ids(9)), PutResult::kDisabled);
  EXPECT_EQ(look(disabled, ids(9)).report.reason, ReuseReason::kDisabled);
  EXPECT_EQ(look(disabled, ids(9)).report.computed, 9);
}

TEST(StoreReason, DtypeOrLayout) {  // more is there, for caches of another make
  CheckpointStore store(plenty());
  const CacheSpec spec{.dtype = at::kFloat, .layers = layers_of({})};
  CacheSpec half = spec;
  half.dtype = at::kBFloat16;
  CacheSpec upper = spec;
  upper.first_layer = 3;
  put(store, ids(6));
  LookupRequest request;
  const Ids tokens = ids(9);
  request.tokens = tokens;
  for (const CacheSpec& other : {half, upper}) {
    request.layout = layout_of(std::array{other});
    EXPECT_EQ(store.lookup(request).report.reason, ReuseReason::kDtypeOrLayout);
    EXPECT_EQ(store.lookup(request).position, 0);
  }
  request.layout = layout_of(std::array{spec});
  EXPECT_EQ(store.lookup(request).position, 6);
  PutRequest wrong = request_of(tokens, {});
  wrong.layout = layout_of(std::array{half});
  EXPECT_THAT(testing::error_text([&] {
                store.put(wrong, [&] { return text_of(tokens, {}); });
              }),
              HasSubstr("the parts must have the layout of the request"));
}

// Names as programs print them.
TEST(StoreReason, Names) {
  EXPECT_EQ(to_string(ReuseReason::kNoCheckpointBefore),
            "no_checkpoint_before");
  EXPECT_EQ(to_string(ReuseReason::kDtypeOrLayout), "dtype_or_layout");
  EXPECT_EQ(to_string(ReuseReason::kNoEntry), "no_entry");
  EXPECT_EQ(to_string(PutResult::kNoRoom), "no_room");
}

}  // namespace
}  // namespace kvcache::fake
