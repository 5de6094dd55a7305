// SlotCache: requests enter and leave; a free slot disturbs nobody, and a
// recycled one is a fresh one.
#include "kvcache/slot_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

class SlotCacheTest : public testing::TestWithParam<Variant> {
 protected:
  const Model model = make_model(GetParam());
  SlotCache slots{spec_of(model, 4, 16), {.buckets = {4, 16}}};

  // Feeds one token to each of `rows` by a step without counts.
  std::vector<Floats> step(const Ids& ids) {
    Step step = slots.begin_step();
    const Floats hidden = forward(model, step, ids, options_for(slots));
    step.commit();
    std::vector<Floats> rows;
    for (size_t row = 0; row < ids.size(); ++row) {
      rows.emplace_back(hidden.begin() + row * kWidth,
                        hidden.begin() + (row + 1) * kWidth);
    }
    return rows;
  }
  // Prefills one slot beside the others.
  void prefill(int64_t slot, const Ids& ids) {
    feed_row(slots, model, slot, ids);
  }
};
INSTANTIATE_TEST_SUITE_P(EveryModel, SlotCacheTest,
                         testing::ValuesIn(kVariants),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(SlotCacheTest, SlotsAreTakenFromTheLowestOn) {
  EXPECT_EQ(slots.free_slots(), 4);
  for (int64_t slot = 0; slot < 4; ++slot) {
    EXPECT_EQ(slots.acquire(), slot);
  }
  EXPECT_EQ(slots.acquire(), std::nullopt);
  EXPECT_EQ(slots.free_slots(), 0);
  slots.release(2);
  slots.release(1);
  EXPECT_FALSE(slots.taken(1));
  EXPECT_EQ(slots.acquire(), 1);
  EXPECT_EQ(slots.acquire(), 2);
  EXPECT_THAT(error_of([&] { slots.release(4); }),
              HasSubstr("slot must be in [0, 4) but got 4"));
  slots.release(3);
  EXPECT_THAT(error_of([&] { slots.release(3); }),
              HasSubstr("slot 3 must be taken but is free"));
}

// K32: each single slot, the first and the last among them.
TEST_P(SlotCacheTest, K32OneSlotAmongFreeOnesEqualsTheRowAlone) {
  for (int64_t slot = 0; slot < 4; ++slot) {
    slots.reset();
    while (slots.acquire()) {
    }
    for (int64_t other = 0; other < 4; ++other) {
      if (other != slot) {
        slots.release(other);
      }
    }
    poison(slots);
    Ids held = some_ids(3, static_cast<int>(slot));
    prefill(slot, held);
    for (int i = 0; i < 10; ++i) {
      Ids ids(4, kDead);
      ids[slot] = i % kVocabulary;
      const std::vector<Floats> got = step(ids);
      held.push_back(ids[slot]);
      ASSERT_EQ(got[slot], last_of(slots, model, held, 1));
    }
    slots.release(slot);
  }
}

// K25, K26: what a request left behind, NaN included, is not there for the
// next.
TEST_P(SlotCacheTest, K26ARecycledSlotIsAFreshOne) {
  ASSERT_EQ(slots.acquire(), 0);
  ASSERT_EQ(slots.acquire(), 1);
  Ids kept = some_ids(5, 4);
  prefill(1, kept);
  prefill(0, Ids(9, kDead));  // NaN in keys, values and states
  step({kDead, 1, kDead, kDead});
  kept.push_back(1);
  slots.release(0);
  ASSERT_EQ(slots.acquire(), 0);
  EXPECT_EQ(slots.lengths()[0], 0);
  Ids held = some_ids(2);
  prefill(0, held);
  for (int i = 0; i < 5; ++i) {
    const std::vector<Floats> got = step({i, i + 1, kDead, kDead});
    held.push_back(i);
    kept.push_back(i + 1);
    ASSERT_EQ(got[0], last_of(slots, model, held, 1));
    ASSERT_EQ(got[1], last_of(slots, model, kept, 1));
  }
}

TEST_P(SlotCacheTest, AdmitsACheckpointOfAnyKind) {
  ConcatCache concat(spec_of(model, 1, 16));
  const Ids ids = some_ids(6);
  feed_all(concat, model, ids);
  const Checkpoint saved = concat.checkpoint(0);
  ASSERT_EQ(slots.acquire(), 0);
  EXPECT_EQ(slots.admit(saved), 1);
  const std::vector<Floats> got = step({2, 3, kDead, kDead});
  EXPECT_EQ(got[1], last_of(slots, model, joined(ids, {3}), 1));
  // One that does not fit leaves the slot free.
  Checkpoint other = saved;
  other.dtype = at::kBFloat16;
  EXPECT_THAT(error_of([&] { slots.admit(other); }), HasSubstr("in bfloat16"));
  EXPECT_EQ(slots.free_slots(), 2);
  slots.acquire();
  slots.acquire();
  EXPECT_EQ(slots.admit(saved), std::nullopt);
}

TEST_P(SlotCacheTest, FreeSlotsAreNoBarForFullOnes) {
  ASSERT_EQ(slots.acquire(), 0);
  ASSERT_EQ(slots.acquire(), 1);
  prefill(0, some_ids(16));  // full
  prefill(1, some_ids(2));
  EXPECT_THAT(error_of([&] {
                step({1, 1, 1, 1});
              }),
              HasSubstr("row 0 would need slots [16, 17) but capacity is 16"));
  slots.release(0);  // as a batcher does first
  EXPECT_EQ(step({kDead, 3, kDead, kDead})[1],
            last_of(slots, model, joined(some_ids(2), {3}), 1));
}

TEST_P(SlotCacheTest, ReorderAndForkKeepWhichAreTaken) {
  ASSERT_EQ(slots.acquire(), 0);
  prefill(0, some_ids(3));
  slots.reorder(std::vector<int64_t>{1, 2, 0, 3});
  EXPECT_FALSE(slots.taken(0));
  EXPECT_TRUE(slots.taken(2));
  const auto fork = slots.fork();
  auto* copy = dynamic_cast<SlotCache*>(fork.get());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(copy->taken(2));
  EXPECT_EQ(copy->free_slots(), 3);
  EXPECT_EQ(copy->lengths()[2], 3);
  EXPECT_THAT(error_of([&] { slots.reorder(std::vector<int64_t>{0}); }),
              HasSubstr("must name all 4 slots but got 1; acquire() and "
                        "release() change how many are in use"));
  EXPECT_TRUE(slots.taken(2));
}

}  // namespace
}  // namespace kvcache::toy
