// checkpoint_store.h: what a lookup finds.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "kvcache/checkpoint_store.h"
#include "kvcache/preallocated_cache.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

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

}  // namespace
}  // namespace kvcache::fake
