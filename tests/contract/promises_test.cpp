// The promises of the cache contract that concern results, on every kind.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <c10/core/InferenceMode.h>

#include <thread>

#include "tests/support/toy_contract.h"

namespace kvcache::toy {
namespace {

class PromiseTest : public ContractTest {};
KVCACHE_CONTRACT(PromiseTest);

// Promise 2: a step that does not commit leaves all as it was, wherever it
// ends. Also the boundary lengths: empty, one token, nearly full.
TEST_P(PromiseTest, AThrowAnywhereInAStepChangesNothing) {
  for (const size_t length : {0, 1, 2, 3, 13}) {
    const std::unique_ptr<Cache> cache = make();
    const Ids before = some_ids(length);
    feed_checked(*cache, {}, before);
    cache->mark();
    const std::string held = picture(*cache);
    const auto count = static_cast<int64_t>(model.layers.size());
    for (int64_t layer = 0; layer <= count; ++layer) {
      for (const Stage stage :
           {Stage::kBeforeLayer, Stage::kAfterWrite, Stage::kAfterLayer}) {
        struct Planned {};
        ForwardOptions with = options_for(*cache, layer % 2 == 1);
        with.hook = [&](int64_t now, Stage at) {
          if (now == layer && at == stage) {
            throw Planned{};
          }
        };
        const Padded ids(std::vector<Ids>(rows, {kDead, 3, 4}));
        try {
          Step step = cache->begin_step({.tokens = 3});
          forward(model, step, ids.ids, with);  // NaN in all of it
        } catch (const Planned&) {
        }
        ASSERT_EQ(picture(*cache), held);
        ASSERT_EQ(cache->validate(), std::vector<std::string>{});
      }
    }
    feed_checked(*cache, before, some_ids(3, 2));
  }
}

// Promise 3: judged on live tokens, before any write, with both numbers.
TEST_P(PromiseTest, OverflowIsJudgedOnLiveTokens) {
  const std::unique_ptr<Cache> cache = make(6);
  feed_checked(*cache, {}, some_ids(4));
  const std::string held = picture(*cache);
  const uint64_t epoch = cache->address_epoch();
  EXPECT_EQ(error_of([&] { auto step = cache->begin_step({.tokens = 3}); }),
            "[Cache::begin_step] row 0 would need slots [4, 7) but capacity is "
            "6; truncate() first or raise CacheSpec::capacity.");
  EXPECT_EQ(picture(*cache), held);
  EXPECT_EQ(cache->address_epoch(), epoch);
  EXPECT_TRUE(cache->fits(2));
  EXPECT_FALSE(cache->fits(3));
  // Two live tokens among nine, the padding far beyond the capacity.
  const std::vector<int64_t> skip(rows, 3), count(rows, 2);
  const Ids one{kDead, kDead, kDead, 5, 6, kDead, kDead, kDead, kDead};
  const Padded ids(std::vector<Ids>(rows, one));
  Step step = cache->begin_step({.tokens = 9, .skip = skip, .count = count});
  const Floats hidden = forward(model, step, ids.ids, options_for(*cache));
  step.commit();
  const Floats want = last_of(*cache, model, joined(some_ids(4), {5, 6}), 2);
  for (int64_t row = 0; row < rows; ++row) {
    const auto first = hidden.begin() + (row * 9 + 3) * kWidth;
    EXPECT_EQ(Floats(first, first + 2 * kWidth), want);
  }
  // Full rows may idle through any step.
  const std::vector<int64_t> none(rows, 0);
  Step idle = cache->begin_step({.tokens = 40, .count = none});
  forward(model, idle, Ids(static_cast<size_t>(40 * rows), kDead),
          options_for(*cache));
  idle.commit();
  EXPECT_EQ(lengths(*cache), all(6));
}

// Promise 5 (and K11): reset, then a second request as on a fresh cache.
TEST_P(PromiseTest, ResetGivesAFreshCache) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(9), 2);
  cache->mark();
  const uint64_t epoch = cache->address_epoch();
  const std::vector<const void*> held = addresses(*cache);
  const size_t reserved = cache->memory().k.reserved;
  cache->reset();
  EXPECT_EQ(lengths(*cache), all(0));
  EXPECT_EQ(addresses(*cache), held);
  EXPECT_EQ(cache->memory().restore_points.used, 0U);
  if (kind.in_place) {
    EXPECT_EQ(cache->address_epoch(), epoch);
    EXPECT_EQ(cache->memory().k.reserved, reserved);
  } else {
    EXPECT_GT(cache->address_epoch(), epoch);
    EXPECT_EQ(cache->memory().k.reserved, 0U);
  }
  poison(*cache);
  feed_checked(*cache, {}, some_ids(5, 3), 2);
  // One row at a time; the others go on.
  cache->reset(0);
  std::vector<Ids> next(rows, Ids{1});
  const std::vector<Floats> got = feed(*cache, model, next);
  EXPECT_EQ(got[0], last_of(*cache, model, {1}, 1));
  for (int64_t row = 1; row < rows; ++row) {
    EXPECT_EQ(got[row], last_of(*cache, model, joined(some_ids(5, 3), {1}), 1));
  }
}

// Promise 6 over every target, with and without marks, and what it replays.
TEST_P(PromiseTest, TruncateKeepsExactlyOrReplaysFromAPoint) {
  const Ids ids = some_ids(10);
  for (int64_t target = 0; target <= 12; ++target) {
    const std::unique_ptr<Cache> cache = make();
    feed_checked(*cache, {}, {ids.begin(), ids.begin() + 4});
    cache->mark();
    feed_checked(*cache, {ids.begin(), ids.begin() + 4},
                 {ids.begin() + 4, ids.begin() + 7});
    cache->mark();
    feed_checked(*cache, {ids.begin(), ids.begin() + 7},
                 {ids.begin() + 7, ids.end()});
    const Truncation got = cache->truncate(target);
    int64_t kept = std::min<int64_t>(target, 10);
    TruncationReason reason =
        target >= 10 ? TruncationReason::kNoChange : TruncationReason::kExact;
    if (hybrid && target < 10 && target != 0 && target != 4 && target != 7) {
      kept = target < 4 ? 0 : target < 7 ? 4 : 7;
      reason = TruncationReason::kRestorePoint;
    }
    EXPECT_EQ(got.reason, reason) << target;
    EXPECT_EQ(lengths(*cache), all(kept)) << target;
    EXPECT_EQ(got.replay, all(std::min<int64_t>(target, 10) - kept)) << target;
    poison(*cache);
    const Ids start(ids.begin(), ids.begin() + kept);
    feed_checked(*cache, start, some_ids(5, 4), 2);
  }
}

// Truncate, other tokens, truncate again between the old and a new point: no
// stale point may be found.
TEST_P(PromiseTest, ATruncationForgetsLaterPoints) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(3));
  cache->mark();
  feed_checked(*cache, some_ids(3), {1, 2, 3});
  cache->mark();  // at 6; dies
  feed_checked(*cache, joined(some_ids(3), {1, 2, 3}), {1});
  cache->truncate(4);
  Ids now = some_ids(3);
  if (!hybrid) {
    now.push_back(1);
  }
  feed_checked(*cache, now, {7, 7, 7, 7, 7});
  now = joined(now, {7, 7, 7, 7, 7});
  const Truncation got = cache->truncate(7);
  if (hybrid) {
    EXPECT_EQ(got.reason, TruncationReason::kRestorePoint);
    EXPECT_EQ(got.replay, all(4));
    EXPECT_EQ(lengths(*cache), all(3));
  } else {
    EXPECT_EQ(got.reason, TruncationReason::kExact);
    EXPECT_EQ(got.replay, all(0));
  }
  now.resize(static_cast<size_t>(cache->lengths()[0]));
  feed_checked(*cache, now, {5, 6});
}

// A target at or past the length is no change: no point is loaded.
TEST_P(PromiseTest, ATruncationPastTheLengthIsNoChange) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(3));
  cache->mark();
  feed_checked(*cache, some_ids(3), {1, 2});
  const std::string held = picture(*cache);
  for (const int64_t target : {int64_t{5}, int64_t{6}, int64_t{99}}) {
    const Truncation got = cache->truncate(target);
    EXPECT_EQ(got.reason, TruncationReason::kNoChange);
    EXPECT_EQ(got.replay, all(0));
  }
  EXPECT_EQ(cache->drop_last(0).reason, TruncationReason::kNoChange);
  EXPECT_EQ(picture(*cache), held);
  feed_checked(*cache, joined(some_ids(3), {1, 2}), {4});
}

// Promise 7: a fork has its points and shares nothing that is written to.
TEST_P(PromiseTest, AForkSharesNoMutableState) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(4));
  cache->mark();
  feed_checked(*cache, some_ids(4), {1, 2});
  const std::string held = picture(*cache);
  const std::unique_ptr<Cache> fork = cache->fork();
  EXPECT_EQ(picture(*fork), held);
  poison(*fork);
  const Ids both = joined(some_ids(4), {1, 2});
  feed_checked(*fork, both, {3, 3, 3});
  fork->reset();
  feed_checked(*fork, {}, some_ids(7, 5));
  EXPECT_EQ(picture(*cache), held);
  const std::unique_ptr<Cache> second = cache->fork();
  feed_checked(*cache, both, {6, 6});
  EXPECT_EQ(picture(*second), held);
  const Truncation got = second->truncate(5);  // the fork kept its points
  EXPECT_EQ(second->lengths()[0], hybrid ? 4 : 5);
  EXPECT_EQ(got.replay, all(hybrid ? 1 : 0));
  feed_checked(*second, {both.begin(), both.begin() + (hybrid ? 4 : 5)}, {2});
}

// Rows of unequal length, in a fork and after a reorder (every row is kept).
TEST_P(PromiseTest, UnequalRowsSurviveForkAndReorder) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<Ids> held;
  for (int64_t row = 0; row < rows; ++row) {
    held.push_back(some_ids(static_cast<size_t>(5 - 2 * row), row));
  }
  feed(*cache, model, held);
  std::vector<int64_t> order;
  for (int64_t row = rows; row-- > 0;) {
    order.push_back(row);
    if (!kind.fixed_rows) {
      order.push_back(row);
    }
  }
  const std::unique_ptr<Cache> fork = cache->fork();
  fork->reorder(order);
  EXPECT_EQ(fork->validate(), std::vector<std::string>{});
  const std::unique_ptr<Cache> again = fork->fork();
  for (Cache* c : {fork.get(), again.get()}) {
    const std::vector<Floats> got =
        feed(*c, model, std::vector<Ids>(order.size(), Ids{2, 4}));
    for (size_t i = 0; i < order.size(); ++i) {
      EXPECT_EQ(got[i], last_of(*c, model, joined(held[order[i]], {2, 4}), 2));
    }
  }
  // Only empty rows are left, in another number.
  cache->reset(0);
  if (kind.fixed_rows) {
    return;
  }
  cache->reorder(std::vector<int64_t>{0, 0, 0, 0});
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
  const std::vector<Floats> got =
      feed(*cache, model, std::vector<Ids>(4, Ids{5}));
  for (const Floats& row : got) {
    EXPECT_EQ(row, last_of(*cache, model, {5}, 1));
  }
}

// Promise 8 (and K13): made in one mode, used in any other.
TEST_P(PromiseTest, EveryCombinationOfModesWorks) {
  const auto in_mode = [](int mode, const auto& call) {
    if (mode == 0) {
      const c10::InferenceMode guard;
      call();
    } else if (mode == 1) {
      const at::NoGradGuard guard;
      call();
    } else {
      call();
    }
  };
  for (int made = 0; made < 3; ++made) {
    for (int used = 0; used < 3; ++used) {
      std::unique_ptr<Cache> cache;
      in_mode(made, [&] {
        cache = make();
        feed_checked(*cache, {}, some_ids(3));
        cache->mark();
      });
      in_mode(used, [&] {
        feed_checked(*cache, some_ids(3), {1, 2}, 1);
        cache->truncate(3);
        const Checkpoint saved = cache->checkpoint(0);
        std::unique_ptr<Cache> fork = cache->fork();
        cache->reset();
        for (int64_t row = 0; row < rows; ++row) {
          cache->restore(saved, row);
        }
        if (!kind.fixed_rows) {
          cache->repeat_rows(2);
        }
        cache->reorder(std::vector<int64_t>(rows, rows - 1));
        feed_checked(*fork, some_ids(3), {4});
        for (size_t i = 0; i < model.layers.size(); ++i) {
          if (std::holds_alternative<AttentionLayer>(model.layers[i])) {
            const KvTensors kv = cache->export_kv(static_cast<int64_t>(i));
            EXPECT_FALSE(kv.k.requires_grad() || kv.v.requires_grad());
            EXPECT_FALSE(kv.k.is_inference());
          }
        }
      });
      in_mode(made, [&] {
        feed_checked(*cache, some_ids(3), {4, 5}, 1);
        EXPECT_EQ(cache->validate(), std::vector<std::string>{});
      });
    }
  }
}

// Gradients never enter, even with inputs that want them.
TEST_P(PromiseTest, NoTensorEverRequiresGrad) {
  const std::unique_ptr<Cache> cache = make();
  Step step = cache->begin_step({.tokens = 2});
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    if (const auto* a = std::get_if<AttentionLayer>(&model.layers[i])) {
      const Tensor k =
          at::empty({rows, a->heads, 2, a->head_dim}, dtype).fill_(0.5);
      k.set_requires_grad(true);
      const KvView& view = step.update(layer, k, at::mul(k, 2));
      EXPECT_FALSE(view.k.requires_grad() || view.v.requires_grad());
      continue;
    }
    const auto& r = std::get<RecurrentLayer>(model.layers[i]);
    if (r.conv_channels > 0) {
      const Tensor x = at::empty({rows, kChannels, 2}, dtype).fill_(0.25);
      x.set_requires_grad(true);
      EXPECT_FALSE(step.extend_conv(layer, at::mul(x, 3)).requires_grad());
    }
    if (!r.state_shape.empty()) {
      const StateView& view = step.state(layer);
      const at::NoGradGuard no_grad;
      view.next_state.fill_(1);
      EXPECT_FALSE(view.state.requires_grad() ||
                   view.next_state.requires_grad());
    }
  }
  step.commit();
  const Checkpoint saved = cache->checkpoint(0);
  for (const KvTensors& pair : saved.kv) {
    EXPECT_FALSE(pair.k.requires_grad() || pair.v.requires_grad());
  }
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
}

// Promise 11: distinct caches are independent, also in two threads.
TEST_P(PromiseTest, DistinctCachesWorkInTwoThreads) {
  const std::unique_ptr<Cache> first = make(), second = make();
  std::string results[2];
  const auto work = [&](Cache& cache, std::string& result) {
    for (int round = 0; round < 5; ++round) {
      cache.reset();
      feed_all(cache, model, some_ids(5, round));
      cache.mark();
      feed_all(cache, model, {1, 2});
      cache.truncate(6);
      cache.fork()->reset();
    }
    result = picture(cache);
  };
  std::thread other([&] { work(*second, results[1]); });
  work(*first, results[0]);
  other.join();
  EXPECT_EQ(results[0], results[1]);
}

// A row's bits are the same alone and among neighbours, padded on either side,
// written by update() or by the caller.
TEST_P(PromiseTest, ARowDependsOnNothingButItself) {
  const Ids ids = some_ids(7);
  for (const bool fused : {false, true}) {
    for (const size_t chunk : {size_t{1}, size_t{2}, size_t{3}, size_t{7}}) {
      const std::unique_ptr<Cache> cache = make();
      feed_checked(*cache, {}, ids, chunk, fused);
    }
  }
  for (int64_t pad = 0; pad <= 4; ++pad) {  // K74, K75: also one row alone
    const std::unique_ptr<Cache> cache = make();
    Ids held;
    for (int turn = 0; turn < 3; ++turn) {
      const Ids next = some_ids(2, turn);
      Ids line(static_cast<size_t>(turn == 1 ? pad : 4 - pad), kDead);
      const auto skip = static_cast<int64_t>(line.size());
      line = joined(line, next);
      line.resize(6, kDead);
      const std::vector<int64_t> skips(rows, skip), counts(rows, 2);
      Step step =
          cache->begin_step({.tokens = 6, .skip = skips, .count = counts});
      const Floats hidden =
          forward(model, step, Padded(std::vector<Ids>(rows, line)).ids,
                  options_for(*cache, turn == 2));
      step.commit();
      held = joined(held, next);
      const auto first = hidden.begin() + skip * kWidth;
      ASSERT_EQ(Floats(first, first + 2 * kWidth),
                last_of(*cache, model, held, 2));
    }
  }
}

}  // namespace
}  // namespace kvcache::toy
