// checkpoint_store.h: the bound in bytes, and what counts for it.
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <atomic>

#include "kvcache/checkpoint_store.h"
#include "kvcache/preallocated_cache.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

}  // namespace
}  // namespace kvcache::fake
