// checkpoint_store.h: what is evicted first, and what stays longer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <deque>
#include <random>

#include "kvcache/checkpoint_store.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using std::chrono::milliseconds;

// Case K44: a hit refreshes.
TEST(StoreLru, AHitRefreshes) {
  CheckpointStore store(of_points(2));
  put(store, ids(4, 0), kPoint);
  put(store, ids(4, 1), kPoint);
  look(store, ids(5, 0));
  put(store, ids(4, 2), kPoint);
  EXPECT_THAT(seeds_in(store, 3), ElementsAre(0, 2));
}

// Behaviour D10: a hit refreshes only the checkpoint it started from; new ones
// enter in order of position, so the shallowest goes first.
TEST(StoreLru, NewOnesEnterInOrderOfPosition) {
  CheckpointStore store(of_points(4));
  const Ids text = ids(12);
  Make three = kPoint;
  three.positions = {4, 8, 12};
  put(store, text, three);
  look(store, first(text, 6));  // starts from 4
  put(store, ids(4, 1), kPoint);
  put(store, ids(4, 2), kPoint);  // 8 goes
  EXPECT_EQ(position_of(store, first(text, 11)), 4);
  EXPECT_EQ(position_of(store, text), 12);
  put(store, ids(4, 3), kPoint);  // 12 goes
  EXPECT_EQ(position_of(store, text), 4);
  put(store, ids(4, 4), kPoint);  // 4 goes at last
  EXPECT_EQ(position_of(store, text), 0);
  EXPECT_EQ(store.stats().evicted, 3);
}

// Behaviour D6: a wrong guess touches nothing.
TEST(StoreLru, ADeferredLookupRefreshesWhenSettled) {
  for (const bool settled : {true, false}) {
    CheckpointStore store(of_points(2));
    put(store, ids(4, 0), kPoint);
    put(store, ids(4, 1), kPoint);
    LookupRequest request;
    const Ids tokens = ids(5, 0);
    request.tokens = tokens;
    request.deferred = true;
    {
      const Hit hit = store.lookup(request);
      if (settled) store.settle(hit);
    }
    put(store, ids(4, 2), kPoint);
    EXPECT_EQ(position_of(store, ids(4, 0)) > 0, settled);
    EXPECT_EQ(store.stats().rows, settled ? 1 : 0);
  }
}

// A group's K/V go with its last checkpoint, and beyond the deepest one that is
// left.
TEST(StoreLru, KvGoesWithItsCheckpoints) {
  CheckpointStore store({.max_bytes = 16 * 16 + 32, .min_prefix = 1});
  const Ids text = ids(16);
  const Make make{.positions = {6, 16}};
  put(store, text, make);
  EXPECT_EQ(store.stats().used_bytes, 16 * 16 + 32U);
  look(store, first(text, 8));    // 6 is the most recent
  put(store, ids(4, 1), kPoint);  // 16 goes
  EXPECT_EQ(store.stats().used_bytes, 8 * 16 + 16 + 16U);  // blocks to 8
  EXPECT_EQ(look(store, text).report.attention, 6);
  EXPECT_EQ(wrong_in(look(store, text), text, make), "");
  look(store, ids(5, 1));
  Make large = kPoint;
  large.state_size = 60;
  put(store, ids(4, 2), large);
  EXPECT_EQ(store.stats().used_bytes, 16 + 240U);
  EXPECT_THAT(store.validate(), IsEmpty());
}

// So do the router's sum and the final hidden state of its position.
TEST(StoreLru, ExtrasGoWithTheirCheckpoint) {
  CheckpointStore store({.max_bytes = 2 * 16 + 4 * 8, .min_prefix = 1});
  Make make = kPoint;
  make.positions = {4, 8};
  make.hidden = make.features = {4, 8};
  put(store, ids(8), make);
  EXPECT_EQ(store.stats().used_bytes, 2 * 16 + 4 * 8U);
  put(store, ids(4, 1), kPoint);  // 4 goes
  EXPECT_EQ(store.stats().used_bytes, 16 + 2 * 8 + 16U);
  EXPECT_TRUE(look(store, ids(9)).features.defined());
}

// Whatever is done: what a list of most recent ones says is there, and the
// bound holds.
TEST(StoreLru, IsTheOrderOfAList) {
  constexpr int64_t kTexts = 12;
  CheckpointStore store(of_points(5));
  std::deque<std::pair<int64_t, int64_t>> list;  // seed, position; oldest first
  std::mt19937 random(3);
  for (int i = 0; i < 1000; ++i) {
    const auto seed = static_cast<int64_t>(random() % kTexts);
    const auto length = static_cast<int64_t>(1 + random() % 3);
    if (random() % 2 == 0) {
      std::optional<std::pair<int64_t, int64_t>> used;
      for (const auto& entry : list) {
        if (entry.first == seed && entry.second <= length &&
            (!used || entry.second > used->second)) {
          used = entry;
        }
      }
      EXPECT_EQ(look(store, ids(length, seed) + ids(1, 50)).position,
                used ? used->second : 0);
      if (used) {
        std::erase(list, *used);
        list.push_back(*used);
      }
      continue;
    }
    put(store, ids(length, seed), kPoint);
    std::erase(list, std::pair(seed, length));
    list.emplace_back(seed, length);
    if (list.size() > 5) list.pop_front();
    ASSERT_EQ(store.stats().checkpoints, static_cast<int64_t>(list.size()));
    ASSERT_THAT(store.validate(), IsEmpty());
  }
}

TEST(StoreRetention, LowerPrioritiesGoFirst) {  // whatever their age
  CheckpointStore store(of_points(3));
  const std::vector<int> priorities = {1, 0, 2, 1, 1};
  for (int64_t seed = 0; seed < 5; ++seed) {
    const Ids tokens = ids(4, seed);
    PutRequest request = request_of(tokens, kPoint);
    request.priority = priorities[seed];
    store.put(request, [&] { return text_of(tokens, kPoint); });
  }
  EXPECT_THAT(seeds_in(store, 5), ElementsAre(2, 3, 4));
}

// Pinned ones are never evicted, within a bound of their own.
TEST(StoreRetention, PinsHoldWithinTheirBound) {
  StoreOptions options = of_points(4);
  options.max_pinned_bytes = 2 * kPointBytes;
  CheckpointStore store(options);
  for (int64_t seed = 0; seed < 3; ++seed) {
    const Ids tokens = ids(4, seed);
    PutRequest request = request_of(tokens, kPoint);
    request.pinned = true;
    store.put(request, [&] { return text_of(tokens, kPoint); });
  }
  EXPECT_EQ(store.stats().pins_refused, 1);
  EXPECT_EQ(store.stats().pinned_bytes, 2 * kPointBytes);
  for (int64_t seed = 3; seed < 8; ++seed) put(store, ids(4, seed), kPoint);
  EXPECT_THAT(seeds_in(store, 8), ElementsAre(0, 1, 6, 7));
  Make large = kPoint;
  large.state_size = 12;  // would not fit even without all that is not pinned
  EXPECT_EQ(put(store, ids(4, 9), large), PutResult::kNoRoom);
  EXPECT_THAT(seeds_in(store, 8), ElementsAre(0, 1, 6, 7));
  EXPECT_TRUE(store.pin(look(store, ids(5, 0)), false));
  EXPECT_TRUE(store.pin(look(store, ids(5, 7))));
  EXPECT_FALSE(store.pin(look(store, ids(5, 6))));
  EXPECT_FALSE(store.pin(Hit{}));
  put(store, ids(4, 10), kPoint);
  put(store, ids(4, 11), kPoint);
  EXPECT_THAT(seeds_in(store, 12), ElementsAre(1, 7, 10, 11));
  EXPECT_THAT(store.validate(), IsEmpty());
  store.set_max_bytes(0);  // the bound is harder than a pin
  EXPECT_EQ(store.stats().used_bytes, 0U);
  EXPECT_EQ(store.stats().pinned_bytes, 0U);
}

// Time to live counts from the last use.
TEST(StoreRetention, TimeToLiveCountsFromTheLastUse) {
  auto now = std::chrono::steady_clock::time_point{};
  StoreOptions options = of_points(4);
  options.clock = [&now] { return now; };
  CheckpointStore store(options);
  const auto put_for = [&](int64_t seed, std::optional<milliseconds> ttl) {
    const Ids tokens = ids(4, seed);
    PutRequest request = request_of(tokens, kPoint);
    request.ttl = ttl;
    request.pinned = seed == 1;
    store.put(request, [&] { return text_of(tokens, kPoint); });
  };
  put_for(0, milliseconds(100));
  put_for(1, milliseconds(100));  // pinned, for that time
  put_for(2, {});
  now += milliseconds(60);
  EXPECT_EQ(look(store, ids(5, 0)).position, 4);
  now += milliseconds(60);
  EXPECT_THAT(seeds_in(store, 3), ElementsAre(0, 2));
  EXPECT_EQ(store.stats().expired, 1);
  EXPECT_EQ(store.stats().pinned_bytes, 0U);
  now += milliseconds(60);
  const Hit gone = look(store, ids(5, 0));
  EXPECT_EQ(gone.report.reason, ReuseReason::kEvicted);
  put_for(3, milliseconds(100));
  put_for(3, {});  // now for good
  now += milliseconds(1000);
  EXPECT_THAT(seeds_in(store, 4), ElementsAre(2, 3));
}

// A namespace evicts its own when its quota is full, and nobody else's.
TEST(StoreRetention, QuotasBoundANamespace) {
  StoreOptions options = of_points(6);
  options.namespace_quota = 2 * kPointBytes;
  CheckpointStore store(options);
  const Namespace a{.tenant = "a"};
  const Namespace b{.tenant = "b"};
  put(store, ids(4, 0), kPoint, a);
  for (int64_t seed = 1; seed < 5; ++seed) {
    const Ids tokens = ids(4, seed);
    store.put(request_of(tokens, kPoint, b), [&] {  // also while it is made
      EXPECT_LE(store.stats(b).used_bytes, 2 * kPointBytes);
      return text_of(tokens, kPoint);
    });
  }
  EXPECT_EQ(position_of(store, ids(4, 0), a), 4);
  EXPECT_EQ(store.stats(b).used_bytes, 2 * kPointBytes);
  EXPECT_EQ(store.stats(b).checkpoints, 2);
  EXPECT_EQ(position_of(store, ids(4, 4), b), 4);
  EXPECT_EQ(position_of(store, ids(4, 2), b), 0);
  Make large = kPoint;
  large.state_size = 12;
  EXPECT_EQ(put(store, ids(4, 5), large, a), PutResult::kOversize);
  store.set_quota(a, 3 * kPointBytes);
  EXPECT_EQ(put(store, ids(4, 5), large, a), PutResult::kStored);
  EXPECT_EQ(store.stats(a).quota, 3 * kPointBytes);
  store.set_quota(b, kPointBytes);
  EXPECT_EQ(store.stats(b).used_bytes, kPointBytes);
  EXPECT_THAT(store.validate(), IsEmpty());
}

// The cost-aware policy keeps what saves most tokens per byte, and lets go of
// what was once good for something.
TEST(StoreCostAware, KeepsWhatSavesMostPerByte) {
  StoreOptions options = of_points(4);
  options.eviction = EvictionPolicy::kCostAware;
  CheckpointStore store(options);
  Make large = kPoint;
  large.state_size = 8;
  put(store, ids(400, 0), kPoint);  // 400 tokens for 16 bytes
  put(store, ids(10, 1), kPoint);
  put(store, ids(20, 2), large);  // as many per byte, but more recent
  put(store, ids(30, 3), kPoint);
  EXPECT_EQ(position_of(store, ids(400, 0)), 400);
  EXPECT_EQ(position_of(store, ids(10, 1)), 0);
  EXPECT_EQ(position_of(store, ids(20, 2)), 20);
  // Its hits count for it.
  for (int i = 0; i < 3; ++i) look(store, ids(21, 2));
  put(store, ids(30, 4), kPoint);
  EXPECT_EQ(position_of(store, ids(20, 2)), 20);
  EXPECT_EQ(position_of(store, ids(30, 3)), 0);
  // Aged: in the end even 400 tokens that nobody asks for go.
  for (int64_t seed = 5; seed < 60; ++seed) put(store, ids(30, seed), kPoint);
  EXPECT_EQ(position_of(store, ids(400, 0)), 0);
}

}  // namespace
}  // namespace kvcache::fake
