// state_cache.h: where it marks by itself, and what going back costs then.
#include "kvcache/state_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/speculation.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const Model& hybrid() {
  static const Model model = make_model(Variant::kHybrid);
  return model;
}

std::unique_ptr<StateCache> make_state(const StateOptions& options,
                                       int64_t rows = 1,
                                       const Model& model = hybrid()) {
  return std::make_unique<StateCache>(spec_of(model, rows, 64), options);
}

void feed_in_steps(Cache& cache, const Ids& ids, size_t step) {
  for (size_t i = 0; i < ids.size(); i += step) {
    const auto first = ids.begin() + static_cast<std::ptrdiff_t>(i);
    const size_t count = std::min(step, ids.size() - i);
    feed_row(cache, hybrid(), 0,
             {first, first + static_cast<std::ptrdiff_t>(count)});
  }
}

// A point at the first step that ends at or behind each multiple; none where a
// step ends short of one.
TEST(StateCache, MarksWhereStepsCrossMultiples) {
  const auto cache = make_state({.mark_every = 4});
  feed_in_steps(*cache, some_ids(14), 3);  // ends at 3, 6, 9, 12, 14
  EXPECT_THAT(cache->restore_points(0), ElementsAre(6, 9, 12));
  const auto single = make_state({.mark_every = 4});
  feed_in_steps(*single, some_ids(9), 1);
  EXPECT_THAT(single->restore_points(0), ElementsAre(4, 8));
  const auto never = make_state({.mark_every = 0});
  feed_in_steps(*never, some_ids(9), 1);
  EXPECT_THAT(never->restore_points(0), IsEmpty());
}

// Rows mark for themselves; an idle one does not.
TEST(StateCache, IdleRowsAreNotMarked) {
  const auto cache = make_state({.mark_every = 2}, 2);
  feed_row(*cache, hybrid(), 1, some_ids(2));
  EXPECT_THAT(cache->restore_points(0), IsEmpty());
  EXPECT_THAT(cache->restore_points(1), ElementsAre(2));
}

// Few points stay, the newest among them, dense near the end: the replay from
// one is at most about as long as the way back.
TEST(StateCache, ThinsOutTowardsTheBeginning) {
  const auto cache = make_state({.mark_every = 1, .most_points = 6});
  feed_in_steps(*cache, some_ids(64), 1);
  const std::vector<int64_t> points = cache->restore_points(0);
  ASSERT_EQ(points.size(), 6U);
  EXPECT_EQ(points.back(), 64);
  EXPECT_EQ(points[4], 63);
  int64_t before = 0;
  for (const int64_t point : points) {
    // Of the worst target, right before the point.
    EXPECT_LE(point - 1 - before, 2 * (64 - before) / 3 + 1) << point;
    before = point;
  }
}

// Back to any length, then forward again: as if it had never been longer.
TEST(StateCache, TruncationAndReplayAreExactAtAnyLength) {
  const Ids ids = some_ids(40);
  for (int64_t target = 0; target <= 40; ++target) {
    const auto cache = make_state({.mark_every = 8, .most_points = 3});
    feed_in_steps(*cache, ids, 5);
    const Truncation cut = cache->truncate(target);
    const int64_t kept = cache->lengths()[0];
    ASSERT_EQ(kept + cut.replay[0], target);
    const auto at = [&](int64_t i) { return ids.begin() + i; };
    if (kept < target) feed_row(*cache, hybrid(), 0, {at(kept), at(target)});
    const std::vector<Floats> got = feed(*cache, hybrid(), {Ids{7, 7}});
    EXPECT_EQ(got[0], last_of(*cache, hybrid(),
                              joined({ids.begin(), at(target)}, {7, 7}), 2))
        << target;
  }
}

// Drafts that are dropped take the point at their end with them; what stays of
// them has its own, as if it had come alone.
TEST(StateCache, MarksWhatIsKeptOfDrafts) {
  const Ids ids = some_ids(8);
  for (const bool window : {false, true}) {
    for (int64_t kept = 0; kept <= 5; ++kept) {
      const auto cache = make_state({.mark_every = 4}, 2);
      const auto alone = make_state({.mark_every = 4}, 2);
      for (StateCache* each : {cache.get(), alone.get()}) {
        feed_row(*each, hybrid(), 0, some_ids(5));
        each->unmark(0, 5);  // by the caller: it stays so
        feed_row(*each, hybrid(), 1, {ids.begin(), ids.begin() + 3});
      }
      const Ids right(ids.begin() + 3, ids.begin() + 3 + kept);
      Speculation drafts(*cache, 1);
      feed_row(*cache, hybrid(), 1, {ids.begin() + 3, ids.end()}, window);
      if (drafts.accept(kept) > 0) feed_row(*cache, hybrid(), 1, right);
      if (kept > 0) feed_row(*alone, hybrid(), 1, right);
      EXPECT_EQ(cache->restore_points(1), alone->restore_points(1))
          << window << ' ' << kept;
      EXPECT_THAT(cache->restore_points(0), IsEmpty());
      EXPECT_EQ(bytes_of(cache->checkpoint(1)), bytes_of(alone->checkpoint(1)));
    }
  }
}

// A fork has the points and goes on to mark; a growing one keeps its storage.
TEST(StateCache, ForksMarkOn) {
  const auto cache =
      make_state({.mark_every = 4,
                  .storage = {.growth = Growth::kDoubling, .initial = 2}});
  feed_in_steps(*cache, some_ids(6), 2);
  const std::unique_ptr<Cache> fork = cache->fork();
  feed_row(*fork, hybrid(), 0, {1, 2, 3});
  EXPECT_THAT(fork->restore_points(0), ElementsAre(4, 9));
  EXPECT_THAT(cache->restore_points(0), ElementsAre(4));
}

// Without states it is a PreallocatedCache: any length, no point.
TEST(StateCache, AttentionAloneNeedsNoPoints) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_state({.mark_every = 1}, 1, model);
  feed_row(*cache, model, 0, some_ids(9));
  EXPECT_THAT(cache->restore_points(0), IsEmpty());
  EXPECT_EQ(cache->truncate(5).reason, TruncationReason::kExact);
  EXPECT_EQ(cache->describe().substr(0, 11), "StateCache(");
}

TEST(StateCache, BadOptions) {
  try {
    make_state({.mark_every = -1});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "[StateCache::StateCache] mark_every must be >= 0 and "
                 "most_points >= 1 but got -1 and 8; mark_every 0 leaves "
                 "marking to mark().");
  }
}

}  // namespace
}  // namespace kvcache::toy
