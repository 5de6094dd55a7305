// SlotGraphDecoder: requests that come and go over one recorded step.
#include "kvcache/slot_graph_decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "kvcache/preallocated_cache.h"
#include "tests/support/toy_graph.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

// C6: only a cache with slots will do; another kind does not compile.
static_assert(
    std::is_constructible_v<SlotGraphDecoder, GraphModel, SlotCache&>);
static_assert(
    !std::is_constructible_v<SlotGraphDecoder, GraphModel, WindowCache&>);

constexpr int64_t kSlots = 4, kCapacity = 20;

class SlotGraphDecoderTest : public testing::TestWithParam<Variant> {
 protected:
  void prefill(int64_t slot, const Ids& ids) {
    feed_row(slots, model, slot, ids);
  }

  const Model model = make_model(GetParam());
  SlotCache slots{spec_of(model, kSlots, kCapacity), {.buckets = {4, 8, 20}}};
  SlotGraphDecoder decoder{
      toy_graph_model(model, slots), slots, {.steps_per_replay = 4}};
};
INSTANTIATE_TEST_SUITE_P(EveryModel, SlotGraphDecoderTest,
                         testing::ValuesIn(kVariants),
                         [](const auto& info) { return name_of(info.param); });

// K28, K31, K32: random arrivals, lengths and departures; every row is the row
// alone, bit for bit, at every step.
TEST_P(SlotGraphDecoderTest, RandomRequestsEqualTheRowsAlone) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  std::vector<Ids> held(kSlots);
  for (int i = 0; i < 150; ++i) {
    poison(slots);
    if (pick(3) == 0) {
      if (const auto slot = slots.acquire()) {
        held[*slot] = some_ids(1 + pick(9), i);
        prefill(*slot, held[*slot]);
      }
    }
    std::vector<Ids> tokens(kSlots, Ids{0});
    std::vector<uint8_t> active(kSlots, 0);
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      const bool full = slots.lengths()[slot] == kCapacity;
      if (slots.taken(slot) && (full || pick(9) == 0)) {
        slots.release(slot);
      }
      active[slot] = slots.taken(slot) && pick(6) > 0;
      tokens[slot] = {static_cast<int>(pick(kVocabulary))};
    }
    const Tensor logits = decoder.step(ids_of(tokens), active);
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      if (active[slot]) {
        held[slot].push_back(tokens[slot][0]);
        ASSERT_EQ(logits_at(logits, slot), last_of(slots, model, held[slot], 1))
            << "step " << i << " slot " << slot;
      } else {
        ASSERT_TRUE(logits[slot].eq(0).all().item<bool>());
      }
    }
    ASSERT_EQ(slots.validate(), std::vector<std::string>{});
  }
  EXPECT_LE(decoder.statistics().captures, 3);
  EXPECT_EQ(decoder.statistics().generations, 0);
}

TEST_P(SlotGraphDecoderTest, CaptureBetweenStepsLeavesNoTrace) {
  ASSERT_EQ(slots.acquire(), 0);
  ASSERT_EQ(slots.acquire(), 1);
  prefill(0, some_ids(kCapacity));  // full, and waits for its release
  prefill(1, some_ids(3));
  const std::string before = picture(slots);
  decoder.capture();
  EXPECT_EQ(picture(slots), before);
  EXPECT_EQ(decoder.statistics().captures, 3);
  const std::vector<Ids> tokens(kSlots, Ids{1});
  EXPECT_THAT(error_of([&] { decoder.step(ids_of(tokens)); }),
              HasSubstr("[SlotGraphDecoder::step] row 0 is full: position 21 > "
                        "max_len 20"));
  EXPECT_EQ(picture(slots), before);
  slots.release(0);
  const Tensor logits = decoder.step(ids_of(tokens));
  EXPECT_EQ(logits_at(logits, 1),
            last_of(slots, model, joined(some_ids(3), {1}), 1));
}

TEST_P(SlotGraphDecoderTest, ManyTokensAReplayForTheActiveSlots) {
  ASSERT_EQ(slots.acquire(), 0);
  ASSERT_EQ(slots.acquire(), 1);
  prefill(0, some_ids(5));
  prefill(1, some_ids(2));
  const std::string other = bytes_of(slots.checkpoint(0));
  const std::vector<uint8_t> active = {0, 1, 0, 0};
  const DecodedTokens got =
      decoder.decode(ids_of(std::vector<Ids>(kSlots, Ids{3})), 4, active);
  EXPECT_EQ(got.fed, (std::vector<int64_t>{0, 4, 0, 0}));
  EXPECT_EQ(bytes_of(slots.checkpoint(0)), other);
  Ids held = joined(some_ids(2), {3});
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(logits_at(decoder.logits(), i, 1),
              last_of(slots, model, held, 1));
    held.push_back(static_cast<int>(got.ids[i][1].item<int64_t>()));
    EXPECT_EQ(got.ids[i][0].item<int64_t>(), 3);  // as it was given
  }
}

TEST_P(SlotGraphDecoderTest, RefusesWhatIsNoSlot) {
  const std::vector<Ids> tokens(kSlots, Ids{1});
  const std::vector<uint8_t> active = {1, 0, 0, 0};
  EXPECT_THAT(error_of([&] { decoder.step(ids_of(tokens), active); }),
              HasSubstr("slot 0 must be taken to be active but is free"));
  const std::vector<uint8_t> few = {1};
  EXPECT_THAT(error_of([&] { decoder.step(ids_of(tokens), few); }),
              HasSubstr("one entry for each of 4 slots but got 1"));
  const Tensor logits = decoder.step(ids_of(tokens));  // nobody is there
  EXPECT_TRUE(logits.eq(0).all().item<bool>());
}

}  // namespace
}  // namespace kvcache::toy
