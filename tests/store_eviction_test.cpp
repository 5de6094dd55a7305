// checkpoint_store.h: the bound, and what goes to keep it.
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "kvcache/checkpoint_store.h"
#include "kvcache/preallocated_cache.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// One checkpoint and nothing else: 16 bytes.
const Make kPoint = {.attention = false, .state_size = 4};
constexpr size_t kPointBytes = 16;

StoreOptions of_points(size_t points) {
  return {.max_bytes = points * kPointBytes, .min_prefix = 1};
}

Hit look(CheckpointStore& store, const Ids& tokens,
         const Namespace& space = {}) {
  LookupRequest request;
  request.tokens = tokens;
  request.space = space;
  return store.lookup(request);
}

// Without a trace in the order or the statistics.
int64_t position_of(CheckpointStore& store, const Ids& tokens,
                    const Namespace& space = {}) {
  LookupRequest request;
  const Ids longer = tokens + ids(1, 99);
  request.tokens = longer;
  request.space = space;
  request.deferred = true;
  return store.lookup(request).position;
}

std::vector<int64_t> seeds_in(CheckpointStore& store, int64_t seeds) {
  std::vector<int64_t> there;
  for (int64_t seed = 0; seed < seeds; ++seed) {
    if (position_of(store, ids(4, seed)) > 0) there.push_back(seed);
  }
  return there;
}

// --- the bound

// Tensors whose memory is counted as it is.
class Measured {
 public:
  Tensor tensor(size_t bytes) {
    bytes_ += bytes;
    auto* data = new char[bytes];
    return at::from_blob(
        data, {1, static_cast<int64_t>(bytes / 4)},
        [this, bytes](void* freed) {
          delete[] static_cast<char*>(freed);
          bytes_ -= bytes;
        },
        at::kFloat);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::atomic<size_t> bytes_ = 0;
};

PutResult put_measured(CheckpointStore& store, Measured& memory, int64_t seed,
                       size_t bytes, const std::function<void()>& sample) {
  const Ids tokens = ids(4, seed);
  PutRequest request = request_of(tokens, kPoint);
  request.bytes = bytes;
  return store.put(request, [&] {
    StoredText text = text_of(tokens, kPoint);
    text.parts[0].points[0] = std::make_shared<const RestorePoint>(
        RestorePoint{.position = 4, .conv = {}, .state = memory.tensor(bytes)});
    sample();
    return text;
  });
}

// Case K45: the limit holds while an entry is made, also as measured; what is
// too large is refused and counted; 0 switches off; it can be lowered.
TEST(StoreBound, HoldsAtEveryInstant) {
  constexpr size_t kLimit = 1 << 20;
  constexpr size_t kEntry = 400 << 10;
  Measured memory;
  size_t limit = kLimit;
  int64_t samples = 0;
  CheckpointStore* watched = nullptr;
  const auto sample = [&] {
    ++samples;
    EXPECT_LE(watched->stats().used_bytes, limit);
    EXPECT_LE(memory.bytes(), limit);
  };
  CheckpointStore store({.max_bytes = kLimit,
                         .min_prefix = 1,
                         .on_event = [&](const StoreEvent&) { sample(); }});
  watched = &store;
  for (int64_t seed = 0; seed < 3; ++seed) {
    EXPECT_EQ(put_measured(store, memory, seed, kEntry, sample),
              PutResult::kStored);
  }
  EXPECT_THAT(seeds_in(store, 3), ElementsAre(1, 2));
  EXPECT_EQ(put_measured(store, memory, 3, 3 << 20, sample),
            PutResult::kOversize);
  EXPECT_EQ(store.stats().oversize, 1);
  EXPECT_THAT(seeds_in(store, 4), ElementsAre(1, 2));  // nothing went for it
  EXPECT_EQ(store.stats().used_bytes, memory.bytes());
  limit = kEntry;
  store.set_max_bytes(limit);
  sample();
  EXPECT_THAT(seeds_in(store, 4), ElementsAre(2));
  limit = 0;
  store.set_max_bytes(0);
  EXPECT_EQ(memory.bytes(), 0U);
  EXPECT_EQ(put_measured(store, memory, 5, kEntry, sample),
            PutResult::kDisabled);
  EXPECT_GE(samples, 8);
}

// Case K47: an entry costs what its tokens need, not the buffer they came from.
TEST(StoreBound, CountsWhatIsHeldNotTheSource) {
  const CacheSpec spec{.capacity = 4096,
                       .dtype = at::kFloat,
                       .layers = {AttentionLayer{.heads = 2, .head_dim = 8}}};
  constexpr size_t kTokenBytes = size_t{2} * 2 * 8 * 4;
  auto cache = std::make_unique<PreallocatedCache>(spec);
  {
    Step step = cache->begin_step({.tokens = 10});
    step.update(0, at::full({1, 2, 10, 8}, 1.0F),
                at::full({1, 2, 10, 8}, 2.0F));
    step.commit();
  }
  CheckpointStore store({.max_bytes = 1 << 20, .min_prefix = 1});
  const Ids tokens = ids(10);
  PutRequest request;
  request.tokens = tokens;
  request.bytes = 10 * kTokenBytes;
  EXPECT_EQ(store.put(request,
                      [&] {
                        return StoredText{
                            .parts = {cache->checkpoint(0, BlockOptions{})}};
                      }),
            PutResult::kStored);
  EXPECT_EQ(store.stats().used_bytes, 10 * kTokenBytes);
  cache.reset();
  EXPECT_EQ(store.stats().used_bytes, 10 * kTokenBytes);
  const Hit hit = look(store, tokens);
  EXPECT_EQ(value_of(hit.text->parts[0].blocks[0]->kv[0].v), 2.0F);
  EXPECT_EQ(hit.text->parts[0].bytes(), 10 * kTokenBytes);
}

// What hits hold counts although it was evicted, and is not evicted for room
// that this would not make.
TEST(StoreBound, CountsWhatHitsHold) {
  CheckpointStore store(of_points(2));
  put(store, ids(4, 0), kPoint);
  put(store, ids(4, 1), kPoint);
  Hit first_hit = look(store, ids(5, 0));
  ASSERT_EQ(first_hit.position, 4);
  put(store, ids(4, 2), kPoint);  // 1 goes, though 0 is older
  EXPECT_THAT(seeds_in(store, 3), ElementsAre(0, 2));
  const Hit second_hit = look(store, ids(5, 2));
  EXPECT_EQ(put(store, ids(4, 3), kPoint), PutResult::kNoRoom);
  EXPECT_EQ(store.stats().no_room, 1);
  store.set_max_bytes(kPointBytes);  // cannot take it from them
  EXPECT_THAT(seeds_in(store, 4), IsEmpty());
  EXPECT_EQ(store.stats().used_bytes, 2 * kPointBytes);
  EXPECT_EQ(wrong_in(first_hit, ids(4, 0), kPoint), "");
  first_hit = {};
  EXPECT_EQ(store.stats().used_bytes, kPointBytes);
}

// Hits outlive the store.
TEST(StoreBound, HitsOutliveTheStore) {
  Hit hit;
  {
    CheckpointStore store(of_points(1));
    put(store, ids(4), kPoint);
    hit = look(store, ids(5));
  }
  EXPECT_EQ(wrong_in(hit, ids(4), kPoint), "");
}

// A make() that throws leaves no promise behind; the text is not there.
TEST(StoreBound, AThrowingMakeChangesNothing) {
  CheckpointStore store(of_points(2));
  put(store, ids(4, 0), kPoint);
  const Ids tokens = ids(4, 1);
  const auto put_throwing = [&] {
    store.put(request_of(tokens, kPoint),
              []() -> StoredText { TORCH_CHECK_VALUE(false, "out of luck"); });
  };
  EXPECT_EQ(testing::error_text(put_throwing), "out of luck");
  const auto put_wrong = [&] {
    store.put(request_of(tokens, kPoint), [&] {
      StoredText text = text_of(tokens, kPoint);
      text.parts[0].length = 3;
      return text;
    });
  };
  EXPECT_EQ(testing::error_text(put_wrong),
            "[CheckpointStore::put] every part must have the 4 tokens of the "
            "request but got 3; take the checkpoints at that length.");
  EXPECT_EQ(store.stats().used_bytes, kPointBytes);
  EXPECT_THAT(seeds_in(store, 2), ElementsAre(0));
  EXPECT_THAT(store.validate(), IsEmpty());
}

// An estimate that is too small costs a second eviction, never the bound.
TEST(StoreBound, ALowEstimateStaysWithinIt) {
  CheckpointStore store(of_points(3));
  for (int64_t seed = 0; seed < 3; ++seed) put(store, ids(4, seed), kPoint);
  Ids tokens = ids(4, 3);
  Make large = kPoint;
  large.state_size = 8;
  PutRequest request = request_of(tokens, large);
  request.bytes = 1;
  EXPECT_EQ(store.put(request, [&] { return text_of(tokens, large); }),
            PutResult::kStored);
  EXPECT_THAT(seeds_in(store, 4), ElementsAre(2, 3));
  large.state_size = 16;
  tokens = ids(4, 4);
  request.tokens = tokens;
  EXPECT_EQ(store.put(request, [&] { return text_of(tokens, large); }),
            PutResult::kNoRoom);
  EXPECT_LE(store.stats().used_bytes, 3 * kPointBytes);
  EXPECT_THAT(store.validate(), IsEmpty());
}

// Whole rows cannot be cut or shared: they are refused by name.
TEST(StoreBound, WantsBlocks) {
  CheckpointStore store({.max_bytes = 1 << 20, .min_prefix = 1});
  const Ids tokens = ids(4);
  const Make make{.states = false};
  const auto put_with = [&](const std::function<void(Checkpoint&)>& change) {
    return testing::error_text([&] {
      store.put(request_of(tokens, make), [&] {
        StoredText text = text_of(tokens, make);
        change(text.parts[0]);
        return text;
      });
    });
  };
  EXPECT_EQ(put_with([](Checkpoint& part) {
              part.kv = part.blocks[0]->kv;
              part.blocks.clear();
            }),
            "[CheckpointStore::put] K and V must be in blocks but got whole "
            "rows; take checkpoint(row, BlockOptions).");
  EXPECT_EQ(put_with([](Checkpoint& part) { part.blocks.clear(); }),
            "[CheckpointStore::put] blocks must hold 4 tokens but hold 0.");
  EXPECT_EQ(
      put_with([](Checkpoint& part) { part.blocks.push_back(part.blocks[0]); }),
      "[CheckpointStore::put] blocks must follow each other and hold "
      "every attention layer but token 4 is not the first of such a "
      "one.");
  EXPECT_EQ(store.stats().used_bytes, 0U);
}

// --- sharing

// A text that continues another one holds its blocks, which count once; what is
// known already is only refreshed.
TEST(StoreSharing, AContinuationSharesBlocks) {
  CheckpointStore store({.max_bytes = 1 << 20, .min_prefix = 1});
  const Ids text = ids(10);
  const Make make{.positions = {10}};
  put(store, text, make);
  const size_t one = store.stats().used_bytes;
  EXPECT_EQ(one, 10 * 16 + 16U);
  const Ids longer = text + ids(10, 1);
  const Hit hit = look(store, longer);
  ASSERT_EQ(hit.position, 10);
  Make next{.positions = {10, 20}};
  store.put(request_of(longer, next),
            [&] { return text_of(longer, next, &hit); });
  // Blocks of 4 tokens: two are shared, 12 tokens and a state are new.
  EXPECT_EQ(store.stats().used_bytes, one + 12 * 16 + 16);
  EXPECT_EQ(store.stats().checkpoints, 2);
  int64_t calls = 0;
  EXPECT_EQ(store.put(request_of(longer, next),
                      [&] {
                        ++calls;
                        return text_of(longer, next);
                      }),
            PutResult::kRefreshed);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(store.stats().refreshed, 1);
  // Even a caller who does not share gets what is there.
  const Ids branch = first(longer, 16) + ids(4, 2);
  next.positions = {20};
  put(store, branch, next);
  EXPECT_EQ(store.stats().used_bytes, one + 12 * 16 + 16 + 4 * 16 + 16);
  EXPECT_EQ(wrong_in(look(store, branch + ids(1, 3)), branch, next), "");
  EXPECT_THAT(store.validate(), IsEmpty());
}

// Of texts that restore anywhere, a longer one takes over a shorter one.
TEST(StoreSharing, ALongerTextTakesOver) {
  CheckpointStore store({.max_bytes = 1 << 20, .min_prefix = 1});
  const Make make{.states = false, .hidden = {6}};
  put(store, ids(6), make);
  put(store, ids(9), {.states = false});
  EXPECT_EQ(store.stats().groups, 1);
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_EQ(store.stats().used_bytes, 9 * 16 + 8U);
  LookupRequest request;
  const Ids repeat = ids(6);
  request.tokens = repeat;
  request.final_hidden = true;  // is taken over too
  EXPECT_EQ(store.lookup(request).position, 6);
  EXPECT_EQ(put(store, ids(7), {.states = false}), PutResult::kRefreshed);
  // A pinned one stays for itself.
  const Ids kept = ids(6, 1);
  PutRequest pinned = request_of(kept, {.states = false});
  pinned.pinned = true;
  store.put(pinned, [&] { return text_of(kept, {.states = false}); });
  put(store, ids(9, 1), {.states = false});
  EXPECT_EQ(store.stats().groups, 3);
}

// --- the order

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

// --- what stays longer

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
  for (int64_t seed = 1; seed < 5; ++seed) put(store, ids(4, seed), kPoint, b);
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
