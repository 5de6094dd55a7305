// checkpoint_store.h: what a lookup finds, and why it finds no more.
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/checkpoint_store.h"
#include "kvcache/preallocated_cache.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kPlenty = size_t{1} << 24U;

StoreOptions plenty(int64_t min_prefix = 1) {
  return {.max_bytes = kPlenty, .min_prefix = min_prefix};
}

Hit look(CheckpointStore& store, const Ids& tokens, const Namespace& space = {},
         std::optional<std::string> route = {}) {
  LookupRequest request;
  request.tokens = tokens;
  request.space = space;
  request.route = std::move(route);
  return store.lookup(request);
}

const Make kAttentionOnly = {.states = false};

// Case K35: checkpoints at 5 and 9 of 14; the deepest one that fits is taken
// and the report says what was in the way.
TEST(StoreLookup, TakesTheDeepestCheckpointBeforeTheDifference) {
  CheckpointStore store(plenty());
  const Ids text = ids(14);
  const Make make{.positions = {5, 9}};
  ASSERT_EQ(put(store, text, make), PutResult::kStored);
  struct Case {
    int64_t same;
    int64_t restored;
    ReuseReason reason;
  };
  for (const auto& [same, restored, reason] :
       {Case{5, 5, ReuseReason::kTokensDiverge},
        Case{7, 5, ReuseReason::kNoCheckpointBefore},
        Case{9, 9, ReuseReason::kAll},
        Case{4, 0, ReuseReason::kNoCheckpointBefore}}) {
    SCOPED_TRACE(same);
    const Ids tokens = first(text, same) + ids(6, 7);
    const Hit hit = look(store, tokens);
    EXPECT_EQ(hit.position, restored);
    EXPECT_EQ(hit.report.restored, restored);
    EXPECT_EQ(hit.report.computed, same + 6 - restored);
    EXPECT_EQ(hit.report.matched, same);
    EXPECT_EQ(hit.report.attention, same);
    EXPECT_EQ(hit.report.recurrent, restored);
    EXPECT_EQ(hit.report.reason, reason);
    EXPECT_EQ(wrong_in(hit, tokens, make), "");
  }
  // Nothing of [9, 14) can be restored, so it is not kept.
  EXPECT_EQ(look(store, first(text, 12) + ids(6, 7)).position, 9);
}

// Without states any position will do; the last token is left to compute.
TEST(StoreLookup, AttentionAloneRestoresAnywhere) {
  CheckpointStore store(plenty());
  const Ids text = ids(14);
  put(store, text, kAttentionOnly);
  const Ids forked = first(text, 7) + ids(3, 7);
  const Hit hit = look(store, forked);
  EXPECT_EQ(hit.position, 7);
  EXPECT_EQ(wrong_in(hit, forked, kAttentionOnly), "");
  EXPECT_EQ(hit.report.reason, ReuseReason::kTokensDiverge);
  EXPECT_EQ(hit.report.first_different, 7);
  EXPECT_EQ(hit.report.divergence, 7);
  EXPECT_EQ(hit.report.recurrent, std::nullopt);
  EXPECT_EQ(hit.report.attention, 7);
  EXPECT_EQ(look(store, text).position, 13);
  EXPECT_EQ(look(store, text).report.reason, ReuseReason::kAll);
  // A text that is a beginning of the request leaves nothing more to reuse.
  const Hit longer = look(store, text + ids(5, 7));
  EXPECT_EQ(longer.position, 14);
  EXPECT_EQ(longer.report.reason, ReuseReason::kAll);
  EXPECT_EQ(longer.report.first_different, std::nullopt);
}

// Case K40: an exact repeat of a hybrid text restores the checkpoint before its
// last token, or nothing.
TEST(StoreLookup, AnExactRepeatLeavesTheLastTokenToCompute) {
  CheckpointStore store(plenty());
  const Ids text = ids(6);
  put(store, text, {.positions = {6}});
  const Hit none = look(store, text);
  EXPECT_EQ(none.position, 0);
  EXPECT_EQ(none.report.reason, ReuseReason::kNoCheckpointBefore);
  put(store, first(text, 5), {.positions = {5}});
  EXPECT_EQ(look(store, text).position, 5);
  EXPECT_EQ(look(store, text).report.reason, ReuseReason::kAll);
}

// With its final hidden state stored, all of a repeat is restored, and only
// where it is asked for.
TEST(StoreLookup, AFinalHiddenStateAnswersTheWholeRequest) {
  for (const bool states : {true, false}) {
    CheckpointStore store(plenty());
    const Ids text = ids(8);
    const Make make{.states = states, .hidden = {8}};
    put(store, text, make);
    LookupRequest request;
    request.tokens = text;
    request.final_hidden = true;
    const Hit hit = store.lookup(request);
    EXPECT_EQ(hit.position, 8);
    ASSERT_TRUE(hit.final_hidden.defined());
    EXPECT_EQ(value_of(hit.final_hidden), stands_for(text, 8, ""));
    EXPECT_EQ(hit.report.computed, 0);
    EXPECT_EQ(hit.report.reason, ReuseReason::kAll);
    request.final_hidden = false;
    EXPECT_LT(store.lookup(request).position, 8);
    const Ids other = text + ids(1, 3);  // stored for 8, not for 9
    request.tokens = other;
    request.final_hidden = true;
    EXPECT_EQ(store.lookup(request).position, 8);
  }
}

// Case K34: the position of a hit is the least of what every part and every
// kind of layer has.
TEST(StoreLookup, EveryPartMustHaveAState) {
  CheckpointStore store(plenty());
  const Ids text = ids(8);
  const Make make{.positions = {4, 8}, .parts = 2};
  const auto lacking = [&](int64_t position) {
    StoredText made = text_of(text, make);
    std::erase_if(made.parts[1].points, [&](const auto& point) {
      return point->position == position;
    });
    return made;
  };
  PutRequest request = request_of(text, make);
  EXPECT_EQ(store.put(request, [&] { return lacking(8); }), PutResult::kStored);
  const Ids longer = text + ids(3, 1);
  EXPECT_EQ(look(store, longer).position, 4);
  store.clear();
  EXPECT_EQ(store.put(request,
                      [&] {
                        StoredText made = lacking(8);
                        made.parts[1].points.clear();
                        return made;
                      }),
            PutResult::kUnusable);
  EXPECT_EQ(look(store, longer).position, 0);
  EXPECT_EQ(store.stats().unusable, 1);
}

// The router's sums are part of what a position needs, if there are any.
TEST(StoreLookup, FeaturesArePartOfACheckpoint) {
  CheckpointStore store(plenty());
  const Ids text = ids(9);
  put(store, text, {.positions = {3, 6}, .features = {3}});
  Hit hit = look(store, text);
  EXPECT_EQ(hit.position, 3);
  EXPECT_EQ(value_of(hit.features), stands_for(text, 3, ""));
  CheckpointStore attention(plenty());  // then not at any position either
  put(attention, text, {.states = false, .features = {5}});
  hit = look(attention, first(text, 8));
  EXPECT_EQ(hit.position, 5);
  EXPECT_TRUE(hit.features.defined());
}

// Where the model is not row-exact, only multiples of its chunk are restored.
TEST(StoreLookup, RestoresAtMultiplesOfTheCanonicalChunk) {
  CheckpointStore store(plenty());
  const Ids text = ids(30);
  put(store, text, {.states = false, .multiple = 8});
  EXPECT_EQ(look(store, text).position, 24);
  EXPECT_EQ(look(store, first(text, 17)).position, 16);
  EXPECT_EQ(look(store, first(text, 8)).position, 0);
  CheckpointStore hybrid(plenty());
  put(hybrid, text, {.positions = {8, 11, 24, 30}, .multiple = 8});
  EXPECT_EQ(look(hybrid, text).position, 24);
  EXPECT_EQ(look(hybrid, first(text, 20)).position, 8);
  EXPECT_EQ(hybrid.stats().checkpoints, 2);
}

// `limit` is the deepest position allowed: the end of [state | suffix] rows.
TEST(StoreLookup, LimitBoundsThePosition) {
  CheckpointStore store(plenty());
  const Ids text = ids(20);
  put(store, text, {.positions = {5, 10, 15}});
  LookupRequest request;
  request.tokens = text;
  request.limit = 12;
  Hit hit = store.lookup(request);
  EXPECT_EQ(hit.position, 10);
  EXPECT_EQ(hit.report.attention, 12);
  request.limit = 10;
  hit = store.lookup(request);
  EXPECT_EQ(hit.position, 10);
  EXPECT_EQ(hit.report.reason, ReuseReason::kAll);
  request.limit = 21;
  EXPECT_EQ(testing::error_text([&] { store.lookup(request); }),
            "[CheckpointStore::lookup] limit must be at most the 20 tokens but "
            "got 21.");
}

// Of what is restored, the tokens that decode wrote.
TEST(StoreLookup, CountsDecodedTokens) {
  CheckpointStore store(plenty());
  const Ids text = ids(20);
  put(store, text, {.states = false, .decoded = {{4, 8}, {15, 20}}});
  EXPECT_EQ(look(store, text).report.decoded, 8);
  EXPECT_EQ(look(store, first(text, 7)).report.decoded, 2);
  EXPECT_EQ(look(store, first(text, 4)).report.decoded, 0);
}

// --- every reason, from nothing to all

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

// --- separation

// Parts of a namespace that run together when written down are still apart.
TEST(StoreNamespace, PartsDoNotRunTogether) {
  CheckpointStore store(plenty());
  const std::string nul("a\0b", 3);
  const std::vector<Namespace> spaces = {
      {.model = "ab", .tenant = "c"},
      {.model = "b", .tenant = "ca"},
      {.model = "", .tenant = "cab"},
      {.model = "1:b", .tenant = "c"},
      {.model = "b1:", .tenant = "c"},
      {.model = nul, .tenant = "c"},
      {.model = "a", .base = "b", .tenant = "c"},
      {.model = "a", .base = "", .tenant = "cb"}};
  for (size_t i = 0; i < spaces.size(); ++i) {
    const Make make{.world = std::to_string(i)};
    EXPECT_EQ(put(store, ids(6), make, spaces[i]), PutResult::kStored);
  }
  for (size_t i = 0; i < spaces.size(); ++i) {
    const Make make{.world = std::to_string(i)};
    EXPECT_EQ(wrong_in(look(store, ids(7), spaces[i]), ids(7), make), "");
  }
  EXPECT_EQ(store.stats().groups, static_cast<int64_t>(spaces.size()));
}

// What comes before an adapter is shared with the base and other adapters, in
// both directions; what comes behind it never is.
TEST(StoreNamespace, TokensBeforeAnAdapterAreTheBases) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  const Make make{.positions = {3, 6, 9, 12}};
  put(store, text, make, {.adapter = "red", .active_from = 6});
  EXPECT_EQ(look(store, text + ids(2, 1)).position, 6);
  put(store, text, make);  // the base's 9 and 12 are others; 3 and 6 are known
  EXPECT_EQ(store.stats().checkpoints, 6);
  EXPECT_EQ(look(store, text + ids(2, 1)).position, 12);
  const Namespace blue{.adapter = "blue", .active_from = 9};
  EXPECT_EQ(look(store, text + ids(2, 1), blue).position, 9);
  // An adapter that begins behind the text has not begun.
  const Namespace later{.adapter = "blue", .active_from = 12};
  EXPECT_EQ(look(store, text + ids(2, 1), later).position, 12);
  // From the first token on, nothing is shared.
  EXPECT_EQ(look(store, text, {.adapter = "red"}).position, 0);
}

// Routes share part 0: the same states and K/V are there once.
TEST(StoreRoutes, ShareTheLowerPart) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  const Make x{.positions = {8, 12}, .parts = 2, .route = "x"};
  const Make y{.positions = {8, 12}, .parts = 2, .route = "y"};
  put(store, text, x);
  const size_t one = store.stats().used_bytes;
  put(store, text, y);
  EXPECT_EQ(store.stats().used_bytes, one + one / 2);
  const Hit any = look(store, text + ids(1, 1));
  ASSERT_TRUE(any.report.route);  // the deepest of any route says which
  EXPECT_EQ(wrong_in(any, text, *any.report.route == "x" ? x : y), "");
  const Hit hit_x = look(store, text + ids(1, 1), {}, "x");
  const Hit hit_y = look(store, text + ids(1, 1), {}, "y");
  EXPECT_EQ(wrong_in(hit_x, text, x), "");
  EXPECT_EQ(wrong_in(hit_y, text, y), "");
  EXPECT_EQ(hit_x.text->parts[0].points[0], hit_y.text->parts[0].points[0]);
  EXPECT_EQ(hit_x.text->parts[0].blocks[0], hit_y.text->parts[0].blocks[0]);
}

// A model of one part may depend on its route as a whole.
TEST(StoreRoutes, AModelOfOnePartSharesNothing) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, {.route = "x"});
  put(store, text, {.route = "y"});
  EXPECT_EQ(
      wrong_in(look(store, text + ids(1, 1), {}, "y"), text, {.route = "y"}),
      "");
}

// What decode wrote is not taken for what prefill wrote, and the reverse.
TEST(StoreRoutes, DecodedTokensAreNotShared) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, {.parts = 2, .route = "x"});
  put(store, text, {.parts = 2, .route = "y", .decoded = {{6, 12}}});
  const Hit x = look(store, text + ids(1, 1), {}, "x");
  const Hit y = look(store, text + ids(1, 1), {}, "y");
  EXPECT_EQ(x.text->parts[0].blocks[0], y.text->parts[0].blocks[0]);
  EXPECT_NE(x.text->parts[0].blocks[1], y.text->parts[0].blocks[1]);
  EXPECT_EQ(y.report.decoded, 6);
}

// Tokens that any sum or hash of them would confuse: they are compared.
TEST(StoreTokens, AreCompared) {
  CheckpointStore store(plenty());
  // Equal sums and products, permutations, and the same bucket of any table
  // whose size divides 2^20.
  const std::vector<Ids> texts = {
      {1, 6, 6},         {2, 2, 9},       {6, 1, 6},       {6, 6, 1},
      {9, 2, 2},         {0, 0, 1},       {0, 1, 0},       {1 << 20, 0, 1},
      {2 << 20, 0, 1},   {3 << 20, 0, 1}, {0, 1 << 20, 1}, {0, 2 << 20, 1},
      {2147483647, 0, 0}};
  for (const Ids& text : texts) put(store, text);
  for (const Ids& text : texts) {
    const Hit hit = look(store, text + ids(1, 5));
    EXPECT_EQ(hit.position, 3);
    EXPECT_EQ(wrong_in(hit, text, {}), "");
  }
  EXPECT_EQ(look(store, {1, 6, 9, 1}).position, 0);
  EXPECT_EQ(testing::error_text([&] {
              look(store, {1, -3, 4});
            }),
            "[CheckpointStore::lookup] tokens must be in [0, 2^31) but got -3 "
            "at 1.");
  EXPECT_EQ(testing::error_text([&] {
              put(store, {int64_t{1} << 31U, 1});
            }),
            "[CheckpointStore::put] tokens must be in [0, 2^31) but got "
            "2147483648 at 0.");
}

// Case K44, its second half: a prefix of one token is found.
TEST(StoreTokens, APrefixOfOneTokenIsFound) {
  CheckpointStore store(plenty());
  put(store, {7});
  EXPECT_EQ(look(store, {7, 9}).position, 1);
}

// Where a text that is gone had branched off is still a place for a
// checkpoint: at the second sighting at the latest.
TEST(StoreTokens, ReportsWhereTextsPart) {
  const Make make{.attention = false, .state_size = 4};
  CheckpointStore store({.max_bytes = 16, .min_prefix = 1});
  const Ids system = ids(5);
  EXPECT_EQ(look(store, system + ids(4, 1)).report.divergence, std::nullopt);
  put(store, system + ids(4, 1), make);
  EXPECT_EQ(look(store, system + ids(4, 2)).report.divergence, 5);
  put(store, ids(9, 9), make);  // evicts it
  const LookupReport report = look(store, system + ids(4, 3)).report;
  EXPECT_EQ(report.matched, 0);
  EXPECT_EQ(report.divergence, 5);
}

// A real cache: what a store gives back is what the cache had.
TEST(StoreCaches, ARestoredCacheIsTheOldOne) {
  const CacheSpec spec{
      .capacity = 64, .dtype = at::kFloat, .layers = layers_of({})};
  PreallocatedCache cache(spec);
  const Ids text = ids(10);
  ASSERT_EQ(
      cache.restore(part_of(text, {.positions = {4, 10}}, 0, nullptr, 0), 0)
          .reason,
      TruncationReason::kExact);
  CheckpointStore store(plenty());
  PutRequest request = request_of(text, {});
  request.layout = layout_of(std::array{spec});
  EXPECT_EQ(store.put(request,
                      [&] {
                        return StoredText{
                            .parts = {cache.checkpoint(0, {.block = 4})}};
                      }),
            PutResult::kStored);
  PreallocatedCache other(spec);
  const Ids longer = text + ids(3, 3);
  const Hit hit = look(store, longer);
  ASSERT_EQ(hit.position, 10);
  other.restore(hit.text->parts[0], 0, hit.position);
  EXPECT_EQ(other.lengths()[0], 10);
  EXPECT_TRUE(at::equal(other.export_kv(0).k, cache.export_kv(0).k));
  // Forked in the middle: an earlier checkpoint, or nothing.
  const Hit early = look(store, first(text, 6) + ids(3, 3));
  ASSERT_EQ(early.position, 4);
  other.restore(early.text->parts[0], 0, early.position);
  EXPECT_EQ(other.lengths()[0], 4);
  EXPECT_EQ(wrong_in(early, text, {}), "");
}

// --- against a list of everything that was ever put

struct Known {
  Ids tokens;
  Namespace space;
  Make make;
};

// How many keys two requests share, adapters included: tokens up to the first
// one that differs or was computed with something else.
int64_t shared(const Known& known, const Ids& tokens, const Namespace& space) {
  if (known.space.tenant != space.tenant || known.space.model != space.model) {
    return 0;
  }
  const auto adapter = [](const Namespace& in, int64_t position) {
    return position >= in.active_from ? in.adapter : std::string();
  };
  int64_t n = 0;
  const auto most = std::min(known.tokens.size(), tokens.size());
  while (n < static_cast<int64_t>(most) && known.tokens[n] == tokens[n] &&
         adapter(known.space, n) == adapter(space, n)) {
    const bool begins = !adapter(known.space, n).empty();
    if (begins && known.space.active_from != space.active_from) break;
    ++n;
  }
  return n;
}

struct Oracle {
  std::vector<Known> all;

  int64_t deepest(const Ids& tokens, const Namespace& space,
                  const std::optional<std::string>& route) const {
    int64_t best = 0;
    for (const Known& known : all) {
      if (route && known.make.route != *route) continue;
      const int64_t most = std::min(shared(known, tokens, space),
                                    static_cast<int64_t>(tokens.size()) - 1);
      if (!known.make.states) best = std::max(best, most);
      for (const int64_t position : known.make.positions) {
        if (known.make.states && position <= most) {
          best = std::max(best, position);
        }
      }
    }
    return best;
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t below(int64_t n) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n));
  }
  // Few distinct tokens, so that texts share beginnings and branch anywhere.
  Ids tokens() {
    Ids tokens(static_cast<size_t>(1 + below(24)));
    for (int64_t& token : tokens) token = below(8) == 0 ? below(3) : 1;
    return tokens;
  }
  Namespace space() {
    Namespace space{.model = below(4) == 0 ? "m" : "",
                    .tenant = below(3) == 0 ? "t" : ""};
    if (below(2) == 0) {
      space.adapter = below(2) == 0 ? "red" : "blue";
      space.active_from = below(12);
    }
    return space;
  }
  std::string route() { return below(2) == 0 ? "x" : ""; }
  Make make(int64_t n, bool states) {
    Make make{.states = states, .parts = 2, .route = route(), .state_size = 1};
    for (int64_t position = 1; position < n; ++position) {
      if (below(4) == 0) make.positions.push_back(position);
    }
    make.positions.push_back(n);
    if (!states) make.positions = {n};
    return make;
  }

 private:
  std::mt19937 engine_;
};

// What the memory must be of: adapters are part of it, but only where they run.
std::string world_of(const Namespace& space, int64_t position) {
  std::string world = space.tenant + "|" + space.model;
  if (!space.adapter.empty() && position > space.active_from) {
    world += "|" + space.adapter + std::to_string(space.active_from);
  }
  return world;
}

// The world of each position in place of one for all.
StoredText text_in(const Ids& tokens, Make make, const Namespace& space) {
  StoredText text = text_of(tokens, make);
  for (int64_t part = 0; part < make.parts; ++part) {
    for (auto& block : text.parts[part].blocks) {
      auto own = std::make_shared<KvBlock>(*block);
      own->kv[0] = {own->kv[0].k.clone(), own->kv[0].v.clone()};
      for (int64_t t = 0; t < own->tokens; ++t) {
        const int64_t position = own->first + t + 1;
        make.world = world_of(space, position);
        own->kv[0].k.select(1, t).fill_(
            stands_for(tokens, position, what_of(make, part)));
      }
      block = own;
    }
    for (auto& point : text.parts[part].points) {
      make.world = world_of(space, point->position);
      point = std::make_shared<const RestorePoint>(RestorePoint{
          .position = point->position,
          .conv = {},
          .state = values(
              1, stands_for(tokens, point->position, what_of(make, part)))});
    }
  }
  return text;
}

std::string wrong_world(const Hit& hit, const Ids& tokens, Make make,
                        const Namespace& space) {
  if (hit.text == nullptr) return "";
  const StoredText expected = text_in(first(tokens, hit.position), make, space);
  for (size_t part = 0; part < expected.parts.size(); ++part) {
    int64_t end = 0;
    for (const auto& block : hit.text->parts[part].blocks) {
      for (int64_t t = 0; t < block->tokens && end < hit.position; ++t, ++end) {
        make.world = world_of(space, end + 1);
        const float k = value_of(block->kv[0].k.select(1, t));
        if (k != stands_for(tokens, end + 1,
                            what_of(make, static_cast<int64_t>(part)))) {
          return "K of token " + std::to_string(end);
        }
      }
    }
    make.world = world_of(space, hit.position);
    for (const auto& point : hit.text->parts[part].points) {
      if (point->position == hit.position &&
          value_of(point->state) !=
              stands_for(tokens, hit.position,
                         what_of(make, static_cast<int64_t>(part)))) {
        return "a state";
      }
    }
  }
  return "";
}

// 1,000 random puts and lookups: the position is the one that a search through
// a list finds, and what is restored is of those tokens, namespace and route.
TEST(StoreOracle, FindsWhatAListFinds) {
  for (const bool states : {true, false}) {
    Random random(states ? 1 : 2);
    CheckpointStore store(plenty());
    Oracle oracle;
    for (int i = 0; i < 1000; ++i) {
      SCOPED_TRACE(i);
      const Ids tokens = random.tokens();
      const Namespace space = random.space();
      if (random.below(3) == 0) {
        const Make make =
            random.make(static_cast<int64_t>(tokens.size()), states);
        store.put(request_of(tokens, make, space),
                  [&] { return text_in(tokens, make, space); });
        oracle.all.push_back({tokens, space, make});
        continue;
      }
      std::optional<std::string> route;
      if (random.below(2) == 0) route = random.route();
      const Hit hit = look(store, tokens, space, route);
      if (hit.report.reason != ReuseReason::kTooShort) {
        ASSERT_EQ(hit.position, oracle.deepest(tokens, space, route));
      }
      const Make of{
          .states = states, .parts = 2, .route = hit.report.route.value_or("")};
      ASSERT_EQ(wrong_world(hit, tokens, of, space), "");
      ASSERT_GE(hit.report.matched, hit.position);
    }
    EXPECT_THAT(store.validate(), IsEmpty());
    EXPECT_GT(store.stats().hits + store.stats().partial, 100);
  }
}

}  // namespace
}  // namespace kvcache::fake
