// Checkpoints: each kind into each kind at each length, what they share, and
// what restore() refuses.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tests/support/toy_contract.h"

namespace kvcache::toy {
namespace {

class CheckpointTest : public ContractTest {};
KVCACHE_CONTRACT(CheckpointTest);

// The length that a restore of `target` reaches, with a mark at 4 of 8 tokens.
int64_t reached(bool hybrid, int64_t target) {
  return !hybrid || target == 8 ? target : target < 4 ? 0 : 4;
}

TEST_P(CheckpointTest, RestoresIntoEveryKindAtEveryLength) {
  const Ids ids = some_ids(8);
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, {ids.begin(), ids.begin() + 4});
  cache->mark();
  feed_checked(*cache, {ids.begin(), ids.begin() + 4},
               {ids.begin() + 4, ids.end()});
  const Checkpoint saved = cache->checkpoint(rows - 1);
  EXPECT_EQ(saved.length, 8);
  EXPECT_EQ(saved.points.size(), hybrid ? 2U : 0U);
  for (const Kind& other : kinds()) {
    if (other.format != kind.format) continue;  // refused, see RestoreErrors
    for (int64_t target = 0; target <= 8; ++target) {
      const std::unique_ptr<Cache> to =
          other.make(spec_of(model, rows, 12, dtype));
      poison(*to);
      feed_all(*to, model, some_ids(target % 5, 9));
      to->mark();
      const int64_t kept = reached(hybrid, target);
      for (int64_t row = 0; row < rows; ++row) {
        const Truncation got = to->restore(saved, row, target);
        EXPECT_EQ(got.reason, kept == target ? TruncationReason::kExact
                                             : TruncationReason::kRestorePoint);
        std::vector<int64_t> replay(rows, 0);
        replay[row] = target - kept;
        EXPECT_EQ(got.replay, replay);
      }
      ASSERT_EQ(to->validate(), std::vector<std::string>{});
      ASSERT_EQ(lengths(*to), all(kept));
      poison(*to);
      // It took over the checkpoint's points, and none of the row's own.
      EXPECT_EQ(to->checkpoint(0).points.size(), !hybrid || kept == 0 ? 0U
                                                 : kept == 4          ? 1U
                                                                      : 2U);
      feed_checked(*to, {ids.begin(), ids.begin() + kept}, {1, 2, 3}, 2);
    }
  }
}

// Blocks hold what a plain checkpoint holds: into each kind at each length.
TEST_P(CheckpointTest, BlocksRestoreIntoEveryKindAtEveryLength) {
  const Ids ids = some_ids(8);
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, {ids.begin(), ids.begin() + 4});
  cache->mark();
  feed_checked(*cache, {ids.begin(), ids.begin() + 4},
               {ids.begin() + 4, ids.end()});
  const Checkpoint saved = cache->checkpoint(rows - 1, {.block = 3});
  ASSERT_EQ(saved.blocks.size(), 3U);
  EXPECT_EQ(saved.blocks[2]->first, 6);
  EXPECT_EQ(saved.blocks[2]->tokens, 2);
  EXPECT_EQ(saved.bytes(), cache->checkpoint(rows - 1).bytes());
  for (const Kind& other : kinds()) {
    if (other.format != kind.format) continue;  // refused, see RestoreErrors
    for (int64_t target = 0; target <= 8; ++target) {
      const std::unique_ptr<Cache> to =
          other.make(spec_of(model, rows, 12, dtype));
      poison(*to);
      feed_all(*to, model, some_ids(target % 5, 9));
      const int64_t kept = reached(hybrid, target);
      for (int64_t row = 0; row < rows; ++row) {
        to->restore(saved, row, target);
      }
      ASSERT_EQ(to->validate(), std::vector<std::string>{});
      ASSERT_EQ(lengths(*to), all(kept));
      poison(*to);
      feed_checked(*to, {ids.begin(), ids.begin() + kept}, {1, 2, 3}, 2);
    }
  }
}

// A text that goes on takes over whole blocks of the one before, and those only
// that lie within what both begin with.
TEST_P(CheckpointTest, BlocksAreSharedByTextsThatBeginAlike) {
  const Ids ids = some_ids(8);
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, ids);
  const Checkpoint first = cache->checkpoint(0, {.block = 3});
  feed_checked(*cache, ids, {1, 2});
  const Checkpoint second =
      cache->checkpoint(0, {.shared = &first, .same = 8, .block = 3});
  ASSERT_EQ(second.blocks.size(), 4U);
  EXPECT_EQ(second.blocks[0], first.blocks[0]);
  EXPECT_EQ(second.blocks[1], first.blocks[1]);
  EXPECT_NE(second.blocks[2], first.blocks[2]);  // it has 3 tokens now
  EXPECT_EQ(second.blocks[3]->tokens, 1);
  const Checkpoint third =
      cache->checkpoint(0, {.shared = &first, .same = 5, .block = 3});
  EXPECT_EQ(third.blocks[0], first.blocks[0]);
  EXPECT_NE(third.blocks[1], first.blocks[1]);
  for (const Checkpoint* saved : {&second, &third}) {
    const std::unique_ptr<Cache> to = make();
    for (int64_t row = 0; row < rows; ++row) {
      to->restore(*saved, row);
    }
    feed_checked(*to, joined(ids, {1, 2}), {4});
  }
}

// Fewer tokens than the row has: with states, up to a restore point.
TEST_P(CheckpointTest, BlocksOfTheBeginningOfARow) {
  const Ids ids = some_ids(8);
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, {ids.begin(), ids.begin() + 4});
  cache->mark();
  feed_checked(*cache, {ids.begin(), ids.begin() + 4},
               {ids.begin() + 4, ids.end()});
  const Checkpoint saved = cache->checkpoint(0, {.block = 3, .length = 6});
  const int64_t kept = hybrid ? 4 : 6;
  EXPECT_EQ(saved.length, kept);
  const std::unique_ptr<Cache> to = make();
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(to->restore(saved, row).reason, TruncationReason::kExact);
  }
  feed_checked(*to, {ids.begin(), ids.begin() + kept}, {1, 2});
  EXPECT_EQ(cache->checkpoint(0, {.length = 2}).length, hybrid ? 0 : 2);
}

// What is fed, marked, truncated or reset later does not reach a checkpoint,
// nor a checkpoint the cache.
TEST_P(CheckpointTest, SharesNothingThatACacheWritesTo) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(5));
  const Checkpoint saved = cache->checkpoint(0);
  const std::string held = bytes_of(saved);
  feed_checked(*cache, some_ids(5), {1, 2});
  cache->reset();
  feed_checked(*cache, {}, some_ids(6, 4));
  cache->restore(saved, 0);
  std::vector<Ids> next(rows, Ids{3, 3});
  feed(*cache, model, next);
  cache->drop_last(1);
  EXPECT_EQ(bytes_of(saved), held);
  for (const KvTensors& pair : saved.kv) {  // compact: no more than it shows
    EXPECT_EQ(pair.k.storage().nbytes(), pair.k.nbytes());
    EXPECT_EQ(pair.v.storage().nbytes(), pair.v.nbytes());
  }
}

// K03: a template that is used twice gives the same and stays as it is.
TEST_P(CheckpointTest, K03ATemplateStaysAsItIs) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(5));
  const Checkpoint stored = cache->checkpoint(0);
  const std::string held = bytes_of(stored);
  const size_t bytes = stored.bytes();
  const size_t used = cache->memory().total().used;
  std::string results[2];
  for (std::string& result : results) {
    const std::unique_ptr<Cache> use = cache->fork();
    feed_checked(*use, some_ids(5), {1, 2, 3, 4}, 1);
    result = picture(*use);
    const std::unique_ptr<Cache> other = make();
    other->restore(stored, 0);
    feed(*other, model, std::vector<Ids>(rows, Ids{1}));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(bytes_of(stored), held);
  EXPECT_EQ(stored.bytes(), bytes);
  EXPECT_EQ(cache->memory().total().used, used);
  EXPECT_EQ(lengths(*cache), all(5));
}

// A row that holds only the last keys of its sliding layers, as a ring would
// give: no truncation reaches below what they see, and an export has zeros.
TEST_P(CheckpointTest, PartialKeysLimitHowFarATruncationReaches) {
  if (variant != Variant::kSliding) {
    return;
  }
  const std::unique_ptr<Cache> cache = make();
  const Ids ids = some_ids(9);
  feed_checked(*cache, {}, ids);
  Checkpoint saved = cache->checkpoint(0);
  for (size_t i = 1; i < saved.kv.size(); ++i) {  // layer 0 sees all
    const int64_t sliding = i == 1 ? 3 : 5;
    saved.first[i] = 9 - (sliding - 1);
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      saved.kv[i].*part =
          (saved.kv[i].*part).narrow(1, saved.first[i], sliding - 1).clone();
    }
  }
  const std::unique_ptr<Cache> to = make();
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(to->restore(saved, row).reason, TruncationReason::kExact);
  }
  poison(*to);
  const KvTensors kv = to->export_kv(2);
  EXPECT_TRUE(kv.k.narrow(2, 0, 5).eq(0).all().item<bool>());
  EXPECT_FALSE(kv.k.narrow(2, 5, 4).isnan().any().item<bool>());
  const Checkpoint again = to->fork()->checkpoint(0);
  EXPECT_EQ(bytes_of(again), bytes_of(saved));
  EXPECT_EQ(again.first, saved.first);
  feed_checked(*to, ids, {1, 2});
  EXPECT_EQ(to->truncate(10).reason, TruncationReason::kExact);
  feed_checked(*to, joined(ids, {1}), {5});
  // At 8, layer 2 would need position 4: gone.
  const Truncation got = to->truncate(8);
  EXPECT_EQ(got.reason, TruncationReason::kEvicted);
  EXPECT_EQ(lengths(*to), all(0));
  EXPECT_EQ(got.replay, all(8));
  feed_checked(*to, {}, some_ids(6, 3), 2);
  EXPECT_EQ(to->restore(saved, 0, 8).reason, TruncationReason::kEvicted);
}

class RestoreErrors : public testing::TestWithParam<size_t> {
 protected:
  RestoreErrors()
      : model(make_model(Variant::kHybrid)),
        cache(kinds()[GetParam()].make(spec_of(model, 2, 6))) {
    feed(*cache, model, {{1, 2, 3}, {4, 5}});
    saved = cache->checkpoint(0);
    held = picture(*cache);
  }
  void refuses(const Checkpoint& from, const std::string& text,
               std::optional<int64_t> length = {}) {
    EXPECT_EQ(error_of([&] { cache->restore(from, 1, length); }), text);
    EXPECT_EQ(picture(*cache), held);
  }
  Model model;
  std::unique_ptr<Cache> cache;
  Checkpoint saved;
  std::string held;
};

INSTANTIATE_TEST_SUITE_P(EveryKind, RestoreErrors,
                         testing::Range(size_t{0}, kinds().size()),
                         [](const auto& info) {
                           return kinds()[info.param].name;
                         });

TEST_P(RestoreErrors, AnotherModel) {
  Checkpoint from = saved;
  from.first_layer = 4;
  refuses(from,
          "[Cache::restore] a checkpoint of layers [0, 4) is needed but got "
          "[4, 8); take it from a cache of the same model part.");
  from = saved;
  from.layers.pop_back();
  refuses(from,
          "[Cache::restore] a checkpoint of layers [0, 4) is needed but got "
          "[0, 3); take it from a cache of the same model part.");
  from = saved;
  std::get<AttentionLayer>(from.layers[1]).sliding = 2;
  refuses(from,
          "[Cache::restore] layer 1 of the checkpoint differs from the "
          "cache's; take it from a cache of the same model.");
  from = saved;
  from.dtype = at::kBFloat16;
  refuses(from,
          "[Cache::restore] the cache holds float32 but got a checkpoint in "
          "bfloat16; values would change, so make the cache in that dtype.");
  from = saved;
  const bool plain = saved.format == KvFormat::kPlain;
  from.format = plain ? KvFormat::kInt8 : KvFormat::kPlain;
  refuses(from, std::string("[Cache::restore] the cache holds ") +
                    (plain ? "plain K/V but got a checkpoint with int8 K/V"
                           : "int8 K/V but got a checkpoint with plain K/V") +
                    "; values would change, so make the cache with that "
                    "CacheSpec::kv_format.");
}

TEST_P(RestoreErrors, Lengths) {
  for (const int64_t length : {-1, 4}) {
    refuses(saved,
            "[Cache::restore] length must be in [0, 3] but got " +
                std::to_string(length) +
                "; a checkpoint has only its own tokens.",
            length);
  }
  const std::unique_ptr<Cache> long_one =
      kinds()[GetParam()].make(spec_of(model, 1, 9));
  feed_all(*long_one, model, some_ids(7));
  refuses(long_one->checkpoint(0),
          "[Cache::restore] 7 tokens exceed capacity 6; restore fewer or raise "
          "CacheSpec::capacity.");
}

// A checkpoint that was made elsewhere is never read past its ends.
TEST_P(RestoreErrors, DamagedContents) {
  const std::string advice = "; use checkpoints as checkpoint() made them.";
  const bool int8 = saved.format == KvFormat::kInt8;
  const std::string held_now =
      int8 ? "[2, 3, 8] int8 on cpu" : "[2, 3, 4] float32 on cpu";
  const auto kv_error = [&](const std::string& layer, const std::string& size,
                            const std::string& got) {
    return "[Cache::restore] K and V of attention layer " + layer +
           " must be [2, " + size + ", " + (int8 ? "8] int8" : "4] float32") +
           " but got " + got + advice;
  };
  Checkpoint from = saved;
  from.kv.pop_back();
  refuses(from, kv_error("1", "3", "an undefined tensor"));
  from = saved;
  from.first.clear();
  refuses(from, kv_error("0", "3", "an undefined tensor"));
  from = saved;
  from.kv[1].v = at::zeros({2, 2, 4});
  refuses(from, kv_error("1", "3", "[2, 2, 4] float32 on cpu"));
  from = saved;
  from.kv[0].k = at::zeros({2, 3, 4}, at::kHalf);
  refuses(from, kv_error("0", "3", "[2, 3, 4] float16 on cpu"));
  from = saved;
  from.length = 5;
  refuses(from, kv_error("0", "5", held_now));
  from = saved;
  from.first[0] = 4;
  refuses(from, kv_error("0", "-1", held_now));
  const std::unique_ptr<Cache> source =
      kinds()[GetParam()].make(spec_of(model, 1, 6));
  source->restore(saved, 0);
  const Checkpoint blocks = source->checkpoint(0, {.block = 2});
  from = blocks;
  from.blocks.pop_back();
  refuses(from,
          "[Cache::restore] blocks must hold 3 tokens but hold 2" + advice);
  from = blocks;
  from.blocks[1] = nullptr;
  refuses(from,
          "[Cache::restore] blocks must follow each other from 0 to 3 but "
          "token 2 is not the first of one" +
              advice);
  auto damaged = std::make_shared<KvBlock>(*blocks.blocks[1]);
  damaged->kv[1].v = at::zeros({2, 2, 4});
  from.blocks[1] = damaged;
  refuses(from, kv_error("1", "1", "[2, 2, 4] float32 on cpu"));
  from = saved;
  from.points.push_back(from.points[0]);
  refuses(from,
          "[Cache::restore] restore points must ascend within (0, 3] but got "
          "3" +
              advice);
  from = saved;
  from.points = {nullptr};
  refuses(from,
          "[Cache::restore] restore points must ascend within (0, 3] but got "
          "-1" +
              advice);
}

TEST_P(RestoreErrors, OtherStates) {
  const auto text = [](const std::string& conv, const std::string& state) {
    return "[Cache::restore] the states at 3 must be [1, 48] float32 and [1, "
           "12] float32 but got " +
           conv + " and " + state +
           "; take them from a cache of the same model and conv_dtype.";
  };
  RestorePoint point = *saved.points[0];
  const auto with = [&](const Tensor& conv, const Tensor& state) {
    Checkpoint from = saved;
    point.conv = conv;
    point.state = state;
    from.points = {std::make_shared<RestorePoint>(point)};
    return from;
  };
  const Tensor conv = point.conv, state = point.state;
  refuses(with(Tensor(), state),
          text("an undefined tensor", "[1, 12] float32 on cpu"));
  refuses(with(conv, at::zeros({1, 4})),
          text("[1, 48] float32 on cpu", "[1, 4] float32 on cpu"));
  refuses(with(at::zeros({1, 48}, at::kBFloat16), state),
          text("[1, 48] bfloat16 on cpu", "[1, 12] float32 on cpu"));
  refuses(with(conv, at::zeros({1, 24}).narrow(1, 0, 12).expand({2, 12})),
          text("[1, 48] float32 on cpu", "[2, 12] float32 on cpu"));
  // The same through a cache that keeps its convolution inputs otherwise.
  CacheSpec spec = spec_of(model, 1, 6);
  spec.conv_dtype = at::kBFloat16;
  const std::unique_ptr<Cache> other = kinds()[GetParam()].make(spec);
  feed_all(*other, model, {1, 2, 3});
  refuses(other->checkpoint(0),
          text("[1, 48] bfloat16 on cpu", "[1, 12] float32 on cpu"));
}

}  // namespace
}  // namespace kvcache::toy
