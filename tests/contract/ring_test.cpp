// Rings of sliding-window layers: bounded memory, the bits of full storage, and
// a truncation that reaches as far as it was asked to, or says why not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

constexpr int64_t kCapacity = 40, kMaxStep = 4, kRows = 3;

struct RingCase {
  std::string name;
  bool window = false, by_ops = false, hybrid = false;
  int64_t rollback = 0;
  KvFormat format = KvFormat::kPlain;
};

std::vector<LayerSpec> ring_layers(bool hybrid) {
  std::vector<LayerSpec> layers = {
      AttentionLayer{.heads = 2, .head_dim = 4},
      AttentionLayer{.heads = 2, .head_dim = 4, .sliding = 3},
      AttentionLayer{.heads = 1, .head_dim = 6, .sliding = 5, .sinks = 2},
      AttentionLayer{.heads = 1, .head_dim = 6, .sliding = 1, .sinks = 6}};
  if (hybrid) {
    layers[0] = RecurrentLayer{.conv_channels = kChannels,
                               .conv_taps = 3,
                               .state_shape = {kKey, kValue}};
  }
  return layers;
}

class RingTest : public testing::TestWithParam<RingCase> {
 protected:
  std::unique_ptr<Cache> make(int64_t rows = kRows) const {
    CacheSpec spec = spec_of(model, rows, kCapacity);
    spec.max_step = kMaxStep;
    spec.kv_format = GetParam().format;
    std::optional<ForcedOps> ops;
    if (GetParam().by_ops) {
      ops.emplace();
    }
    const RingOptions rings{.rollback = GetParam().rollback};
    if (GetParam().window) {
      return make_window(spec, rings);
    }
    return make_preallocated(spec, {.rings = rings});
  }

  const Model model = make_model(ring_layers(GetParam().hybrid));
};
INSTANTIATE_TEST_SUITE_P(
    Kinds, RingTest,
    testing::Values(
        RingCase{"Preallocated"}, RingCase{"Window", true},
        RingCase{"WindowRollback", true, false, false, 3},
        RingCase{"WindowByOps", true, true, false, 2},
        RingCase{"PreallocatedByOps", false, true},
        RingCase{"Hybrid", true, false, true},
        RingCase{"HybridRollback", false, false, true, 4},
        RingCase{"PreallocatedInt8", false, false, false, 3, KvFormat::kInt8},
        RingCase{"WindowInt8", true, false, false, 0, KvFormat::kInt8}),
    [](const auto& info) { return info.param.name; });

TEST_P(RingTest, KeepsWhatALaterQuerySeesAndNoMore) {
  const auto cache = make();
  const auto& in_place = dynamic_cast<InPlaceCache&>(*cache);
  const int64_t more = kMaxStep + GetParam().rollback;
  const int64_t first = GetParam().hybrid ? 0 : 1;
  EXPECT_EQ(in_place.ring(first), 3 - 1 + more);
  EXPECT_EQ(in_place.ring(first + 1), 5 - 1 + more);
  EXPECT_EQ(in_place.ring(first + 2), more);
  EXPECT_EQ(in_place.cells(first + 1).k.size(2), 2 + 4 + more + 1);  // spare
  if (!GetParam().hybrid) {
    EXPECT_EQ(in_place.ring(0), 0);
  }
  const size_t reserved = cache->memory().k.reserved;
  for (int i = 0; i < kCapacity; ++i) {
    feed_all(*cache, model, {i % kVocabulary});
  }
  EXPECT_EQ(cache->memory().k.reserved, reserved);
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
}

TEST_P(RingTest, ALongerStepIsRefused) {
  const auto cache = make();
  feed_all(*cache, model, some_ids(2));
  const std::string before = picture(*cache);
  const int64_t most = kMaxStep + GetParam().rollback;
  EXPECT_THAT(
      error_of([&] { feed_all(*cache, model, some_ids(most + 1)); }),
      HasSubstr("a step over ring storage has at most " + std::to_string(most) +
                " live tokens a row but got " + std::to_string(most + 1)));
  EXPECT_EQ(picture(*cache), before);
}

// Random steps and verbs over rows that go round; what is read is always what
// the stateless forward reads.
class RingFuzz {
 public:
  RingFuzz(const Model& model, std::unique_ptr<Cache> cache,
           const RingCase& with, unsigned seed)
      : model_(model),
        cache_(std::move(cache)),
        case_(with),
        random_(seed),
        held_(kRows),
        longest_(kRows, 0) {}

  void run(int verbs) {
    for (int i = 0; i < verbs && !testing::Test::HasFailure(); ++i) {
      verb();
      ASSERT_EQ(cache_->validate(), std::vector<std::string>{});
      ASSERT_EQ(lengths(), lengths_of_held());
    }
  }

 private:
  int64_t pick(int64_t n) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(n));
  }

  void verb() {
    const int64_t dice = pick(100);
    if (dice < 50) {
      step(dice < 8);
    } else if (dice < 60) {
      drafts();
    } else if (dice < 75) {
      truncate();
    } else if (dice < 80) {
      cache_->mark();
    } else if (dice < 84) {
      const int64_t row = pick(kRows);
      cache_->reset(row);
      held_[row].clear();
      longest_[row] = 0;
    } else if (dice < 89) {
      reorder();
    } else if (dice < 93) {
      cache_ = cache_->fork();
    } else {
      restore();
    }
    poison(*cache_);
  }

  void step(bool dropped) {
    std::vector<Ids> ids(kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t room = kCapacity - static_cast<int64_t>(held_[row].size());
      const int64_t count = std::min(room, pick(kMaxStep + 1));
      for (int64_t t = 0; t < count; ++t) {
        ids[row].push_back(static_cast<int>(pick(kVocabulary)));
      }
      longest_[row] = std::max(longest_[row],
                               static_cast<int64_t>(held_[row].size()) + count);
    }
    if (dropped) {
      const Padded padded(ids);
      Step open = cache_->begin_step(padded.spec());
      forward(model_, open, padded.ids, options_for(*cache_));
      return;
    }
    const std::vector<Floats> got = feed(*cache_, model_, ids);
    for (int64_t row = 0; row < kRows; ++row) {
      held_[row] = joined(held_[row], ids[row]);
      ASSERT_EQ(got[row],
                last_of(*cache_, model_, held_[row], ids[row].size()));
    }
  }

  // In one row with a window of states; some or all of them are wrong.
  void drafts() {
    const int64_t row = pick(kRows);
    const auto before = static_cast<int64_t>(held_[row].size());
    const int64_t count =
        std::min(kCapacity - before, 1 + pick(kMaxStep + case_.rollback));
    if (count == 0) {
      return;
    }
    const Ids ids = some_ids(static_cast<size_t>(count),
                             static_cast<int>(pick(kVocabulary)));
    feed_row(*cache_, model_, row, ids, true);
    longest_[row] = std::max(longest_[row], before + count);
    const int64_t right = 1 + pick(count);
    held_[row] = joined(held_[row], {ids.begin(), ids.begin() + right});
    std::vector<int64_t> targets(kRows, kCapacity);
    targets[row] = before + right;
    const Truncation got = cache_->truncate(targets);
    EXPECT_LE(got.reason, TruncationReason::kExact);
    EXPECT_EQ(cache_->lengths()[row], before + right);
  }

  void truncate() {
    std::vector<int64_t> targets;
    bool near = !case_.hybrid;
    for (int64_t row = 0; row < kRows; ++row) {
      const auto length = static_cast<int64_t>(held_[row].size());
      const int64_t back = pick(3) == 0
                               ? pick(length + 1)
                               : std::min(length, pick(case_.rollback + 2));
      targets.push_back(length - back);
      near =
          near && (back == 0 || targets[row] >= longest_[row] - case_.rollback);
    }
    const Truncation got = cache_->truncate(targets);
    EXPECT_TRUE(!near || got.reason <= TruncationReason::kExact)
        << "within the rollback";
    for (int64_t row = 0; row < kRows; ++row) {
      EXPECT_EQ(cache_->lengths()[row] + got.replay[row], targets[row]);
      held_[row].resize(static_cast<size_t>(cache_->lengths()[row]));
      longest_[row] = held_[row].empty() ? 0 : longest_[row];
    }
  }

  void reorder() {
    std::vector<int64_t> order;
    std::vector<Ids> next;
    std::vector<int64_t> longest;
    for (int64_t row = 0; row < kRows; ++row) {
      order.push_back(pick(kRows));
      next.push_back(held_[order.back()]);
      longest.push_back(longest_[order.back()]);
    }
    cache_->reorder(order);
    held_ = next;
    longest_ = longest;
  }

  // Out of one row, through full storage or not, into another one.
  void restore() {
    const int64_t from = pick(kRows), to = pick(kRows);
    Checkpoint saved = cache_->checkpoint(from);
    if (pick(2) == 0) {
      CacheSpec spec = spec_of(model_, 1, kCapacity);
      spec.kv_format = case_.format;
      const std::unique_ptr<Cache> full =
          case_.format == KvFormat::kPlain
              ? std::make_unique<ConcatCache>(std::move(spec))
              : make_preallocated(std::move(spec), {});
      full->restore(saved, 0);
      saved = full->checkpoint(0);
    }
    const auto length = static_cast<int64_t>(held_[from].size());
    const int64_t wanted = pick(2) == 0 ? length : pick(length + 1);
    const Truncation got = cache_->restore(saved, to, wanted);
    const int64_t kept = cache_->lengths()[to];
    EXPECT_EQ(kept + got.replay[to], wanted);
    EXPECT_TRUE(wanted != length || kept == length);
    held_[to] = {held_[from].begin(), held_[from].begin() + kept};
    longest_[to] = kept > 0 ? longest_[from] : 0;
  }

  std::vector<int64_t> lengths() const {
    return {cache_->lengths().begin(), cache_->lengths().end()};
  }
  std::vector<int64_t> lengths_of_held() const {
    std::vector<int64_t> all;
    for (const Ids& row : held_) {
      all.push_back(static_cast<int64_t>(row.size()));
    }
    return all;
  }

  const Model& model_;
  std::unique_ptr<Cache> cache_;
  const RingCase& case_;
  std::mt19937 random_;
  std::vector<Ids> held_;
  std::vector<int64_t> longest_;  // that each row has been
};

TEST_P(RingTest, EqualsTheOracleAfterEveryVerb) {
  for (unsigned seed = 0; seed < 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    auto cache = make();
    poison(*cache);
    RingFuzz(model, std::move(cache), GetParam(), seed).run(120);
  }
}

// K61 with pinned tokens: append 9, trim 2, append 3, trim 1, append 4.
TEST_P(RingTest, K61TrimsOfARingThatWentRound) {
  const auto cache = make(1);
  Ids held;
  const auto append = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const Ids next = {static_cast<int>((held.size() * 3) % kVocabulary)};
      held = joined(held, next);
      ASSERT_EQ(feed(*cache, model, {next})[0],
                last_of(*cache, model, held, 1));
    }
  };
  const auto trim = [&](int64_t count) {
    cache->mark();
    const int64_t target = static_cast<int64_t>(held.size()) - count;
    const Truncation got = cache->truncate(target);
    if (GetParam().rollback >= count && !GetParam().hybrid) {
      EXPECT_EQ(got.reason, TruncationReason::kExact);
    }
    const Ids all = held;
    held.resize(static_cast<size_t>(cache->lengths()[0]));
    for (int64_t i = 0; i < got.replay[0]; ++i) {  // what was evicted
      const Ids next = {all[held.size()]};
      held = joined(held, next);
      ASSERT_EQ(feed(*cache, model, {next})[0],
                last_of(*cache, model, held, 1));
    }
    EXPECT_EQ(static_cast<int64_t>(held.size()), target);
  };
  append(9);
  trim(2);
  append(3);
  trim(1);
  append(4);
}

// A step that is dropped may have overwritten keys that a cut inside of a state
// window needs: none there, as at a restore point.
TEST_P(RingTest, AStateWindowBehindWhatTheRingHoldsIsEvicted) {
  const auto cache = make(1);
  for (const int id : some_ids(12)) {
    feed_all(*cache, model, {id});
  }
  feed_row(*cache, model, 0, some_ids(kMaxStep), true);
  {
    const Step dropped =
        cache->begin_step({.tokens = kMaxStep + GetParam().rollback});
  }
  const Truncation cut = cache->truncate(13);
  EXPECT_EQ(cut.reason, TruncationReason::kEvicted);
  EXPECT_EQ(cut.replay[0], 13);
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
}

// K33: rows that join when others have gone round.
TEST_P(RingTest, K33RowsOfDifferentLengthsStepTogether) {
  const auto cache = make();
  std::vector<Ids> held = {some_ids(5), some_ids(20, 1), some_ids(8, 2)};
  for (size_t t = 0; t < 20; ++t) {
    std::vector<Ids> ids(kRows);
    for (size_t row = 0; row < kRows; ++row) {
      if (t < held[row].size()) {
        ids[row] = {held[row][t]};
      }
    }
    feed(*cache, model, ids);
  }
  for (int i = 0; i < 10; ++i) {
    const Ids next = {i % kVocabulary};
    const std::vector<Floats> got =
        feed(*cache, model, std::vector<Ids>(kRows, next));
    for (size_t row = 0; row < kRows; ++row) {
      held[row] = joined(held[row], next);
      ASSERT_EQ(got[row], last_of(*cache, model, held[row], 1));
    }
  }
}

TEST(RingOptions, ANegativeRollbackIsRefused) {
  const Model model = make_model(ring_layers(false));
  EXPECT_THAT(error_of([&] {
                make_preallocated(spec_of(model), {.rings = RingOptions{-1}});
              }),
              HasSubstr("rollback of the rings must be >= 0 but got -1"));
}

TEST(RingOptions, SinksNeedASlidingWindow) {
  EXPECT_THAT(error_of([] {
                ConcatCache({.layers = {AttentionLayer{
                                 .heads = 1, .head_dim = 2, .sinks = 1}}});
              }),
              HasSubstr("sinks only beside sliding, but got 1 and sliding 0"));
}

}  // namespace
}  // namespace kvcache::toy
