// speculation.h: whatever share of drafts is right, a row is as if nothing else
// had come.
#include "kvcache/speculation.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "kvcache/step_graph.h"
#include "tests/support/error_text.h"
#include "tests/support/toy_allocator.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using kvcache::testing::error_text;

// K49: drafts of 4 at length 6, 0 to 4 of them right, on every kind, with and
// without states, with and without a mark of the caller's there: equal tokens
// and states, and no point stays that was not there before.
TEST(Speculation, K49EveryShareOnEveryKind) {
  const Ids ids = some_ids(6), drafts = {1, 2, 3, 4};
  for (const Variant variant : kVariants) {
    const Model model = make_model(variant);
    for (const Kind& kind : kinds()) {
      for (int64_t right = 0; right <= 4; ++right) {
        const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 2, 14));
        feed_all(*cache, model, ids);
        if (right % 2 == 0) cache->mark();
        const auto points = cache->restore_points(1);
        Speculation speculation(*cache, 1);
        EXPECT_EQ(speculation.start(), 6);
        feed_row(*cache, model, 1, drafts);
        const int64_t again = speculation.accept(right);
        EXPECT_EQ(again, !has_states(model.layers) || right == 4 ? 0 : right);
        const Ids kept(drafts.begin(), drafts.begin() + right);
        if (again > 0) feed_row(*cache, model, 1, kept);
        EXPECT_EQ(cache->restore_points(1), points);
        EXPECT_EQ(cache->validate(), std::vector<std::string>{});
        const std::vector<Floats> got = feed(*cache, model, {{5}, {6, 7}});
        EXPECT_EQ(got[0], last_of(*cache, model, joined(ids, {5}), 1));
        EXPECT_EQ(got[1],
                  last_of(*cache, model, joined(joined(ids, kept), {6, 7}), 2))
            << kind.name << ' ' << name_of(variant) << ' ' << right;
      }
    }
  }
}

// A row that only ever saw `ids`, all that a cache of this kind says of it.
std::string row_of(const Kind& kind, const Model& model, const Ids& ids) {
  const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 2, 14));
  if (!ids.empty()) feed_row(*cache, model, 1, ids);
  return bytes_of(cache->checkpoint(1));
}

// A window of `tokens` drafts in one row, by a forward of either sort.
void feed_window(Cache& cache, const Model& model, int64_t row,
                 const Ids& tokens, bool fused) {
  Step step = cache.begin_step({.tokens = static_cast<int64_t>(tokens.size()),
                                .first_row = row,
                                .rows = 1,
                                .state_window = true});
  forward(model, step, tokens, options_for(cache, fused));
  step.commit();
}

// K49 with the states of each token kept: nothing is fed again, and keys,
// values, inputs and states are those of a row that never saw a rejected draft,
// NaN among them.
TEST(Speculation, K49AWindowTakesTheNthState) {
  const Ids ids = some_ids(6);
  for (const Variant variant : kVariants) {
    const Model model = make_model(variant);
    for (const Kind& kind : kinds()) {
      for (size_t count = 1; count <= 5; ++count) {
        for (size_t right = 0; right <= count; ++right) {
          SCOPED_TRACE(kind.name + ' ' + name_of(variant));
          const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 2, 14));
          feed_row(*cache, model, 1, ids);
          Ids drafts = some_ids(count, 3);
          const Ids kept(drafts.begin(),
                         drafts.begin() + static_cast<std::ptrdiff_t>(right));
          std::fill(drafts.begin() + static_cast<std::ptrdiff_t>(right),
                    drafts.end(), kDead);  // NaN, and live
          Speculation speculation(*cache, 1);
          EXPECT_EQ(speculation.window(5), has_states(model.layers));
          feed_window(*cache, model, 1, drafts, right % 2 == 1);
          const auto tokens = static_cast<int64_t>(right);
          EXPECT_EQ(speculation.accept(tokens), 0) << count << ' ' << right;
          EXPECT_EQ(cache->validate(), std::vector<std::string>{});
          EXPECT_TRUE(cache->restore_points(1).empty());
          EXPECT_EQ(bytes_of(cache->checkpoint(1)),
                    row_of(kind, model, joined(ids, kept)))
              << count << ' ' << right;
        }
      }
    }
  }
}

// Rows of one step, padded, each cut where it likes; one of them twice, one
// behind its window.
TEST(Speculation, AWindowOfSeveralPaddedRows) {
  for (const Variant variant : {Variant::kHybrid, Variant::kMixed}) {
    const Model model = make_model(variant);
    for (const Kind& kind : kinds()) {
      const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 3, 14));
      const std::vector<Ids> before = {{1, 2}, {3}, {4, 5, 6}};
      feed(*cache, model, before);
      const std::vector<int64_t> skip = {1, 0, 3}, count = {3, 5, 2};
      const Ids tokens = {kDead, 1,     2,     3, kDead, 4, 3, 2, 1, 0,  //
                          kDead, kDead, kDead, 6, 7};
      Step step = cache->begin_step(
          {.tokens = 5, .skip = skip, .count = count, .state_window = true});
      forward(model, step, tokens, options_for(*cache));
      step.commit();
      Truncation cut = cache->truncate(std::vector<int64_t>{4, 5, 4});
      EXPECT_EQ(cut.reason, TruncationReason::kExact);
      cut = cache->truncate(std::vector<int64_t>{4, 2, 3});
      // Row 2 is cut where its window begins: there is no state of that.
      EXPECT_EQ(cut.reason, TruncationReason::kRestorePoint);
      EXPECT_EQ(cut.replay, (std::vector<int64_t>{0, 0, 3}));
      feed(*cache, model, {{}, {}, before[2]});
      const std::vector<Ids> kept = {{1, 2, 1, 2}, {3, 4}, before[2]};
      for (int64_t row = 0; row < 3; ++row) {
        const auto alone = kind.make(spec_of(model, 3, 14));
        feed_row(*alone, model, row, kept[static_cast<size_t>(row)]);
        EXPECT_EQ(bytes_of(cache->checkpoint(row)),
                  bytes_of(alone->checkpoint(row)))
            << kind.name << ' ' << name_of(variant) << ' ' << row;
      }
    }
  }
}

// A forward that does not know of windows, one that leaves out a layer, and a
// recorded step: replay, as without.
TEST(Speculation, WithoutAFilledWindowThereIsAReplay) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_window(spec_of(model, 1, 14));
  feed_all(*cache, model, {1, 2});
  ForwardOptions options = options_for(*cache);
  options.fill_window = false;
  for (const bool one_layer : {false, true}) {
    Speculation speculation(*cache);
    Step step = cache->begin_step({.tokens = 3, .state_window = true});
    forward(model, step, Ids{3, 4, 5}, options);
    if (one_layer) {
      EXPECT_NE(step.state_window(model.first_layer), nullptr);
    }
    step.commit();
    EXPECT_EQ(speculation.accept(2), 2);
    EXPECT_EQ(cache->lengths()[0], 2);
  }
  StepGraph graph(*cache, [&](Step& step, int64_t) {
    EXPECT_EQ(step.state_window(model.first_layer), nullptr);
    forward(model, step, Ids{3, 4, 5}, options_for(*cache));
  });
  feed_window(*cache, model, 0, {6}, false);  // at 3
  graph.run({.tokens = 3, .state_window = true});
  EXPECT_EQ(cache->lengths()[0], 6);
  EXPECT_EQ(cache->truncate(3).replay[0], 3);
}

// It lasts until the row's next change, or the next window.
TEST(Speculation, HowLongAWindowLasts) {
  const Model model = make_model(Variant::kHybrid);
  const auto replay = [&](const std::function<void(Cache&)>& then) {
    const auto cache = make_preallocated(spec_of(model, 2, 14), {});
    feed_all(*cache, model, {1});
    feed_window(*cache, model, 0, {2, 3}, false);
    then(*cache);
    return cache->truncate(std::vector<int64_t>{2, 9}).replay[0];
  };
  const auto open = [](Cache& cache, bool window) {
    const Step dropped =
        cache.begin_step({.first_row = 1, .state_window = window});
  };
  EXPECT_EQ(replay([](Cache&) {}), 0);
  EXPECT_EQ(replay([&](Cache& of) { feed_row(of, model, 1, {4}); }), 0);
  EXPECT_EQ(replay([](Cache& of) { of.reset(1); }), 0);
  EXPECT_EQ(replay([](Cache& of) {
              of.mark();
              of.unmark(0, 3);
            }),
            0);
  EXPECT_EQ(replay([&](Cache& of) { open(of, false); }), 0);
  EXPECT_EQ(replay([](Cache& of) {
              of.reorder(std::vector<int64_t>{1, 0});
              of.reorder(std::vector<int64_t>{1, 0, 0});
              of.reorder(std::vector<int64_t>{0, 1});
            }),
            0);
  EXPECT_EQ(replay([&](Cache& of) { open(of, true); }), 2);
  EXPECT_EQ(replay([&](Cache& of) { feed_row(of, model, 0, {4}); }), 2);
  EXPECT_EQ(replay([](Cache& of) { of.restore(of.checkpoint(0), 0); }), 2);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  feed_window(*cache, model, 0, {1, 2}, false);
  EXPECT_EQ(cache->fork()->truncate(1).replay[0], 1);
  EXPECT_EQ(cache->truncate(1).replay[0], 0);
}

// Memory for it comes with the first window, is kept, and counts; without it
// nothing changes.
TEST(Speculation, MemoryOfAWindow) {
  TestAllocator& memory = TestAllocator::install();
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  const auto points = [&] { return cache->memory().restore_points; };
  feed_all(*cache, model, {1, 2});
  EXPECT_EQ(points().reserved, 0U);
  // Two layers: a state of 3 * 2, and 3 inputs before as many as tokens.
  const auto bytes = [](int64_t tokens) {
    return static_cast<size_t>(2 * (6 * tokens + kChannels * (3 + tokens))) *
           sizeof(float);
  };
  feed_window(*cache, model, 0, {1, 2, 3}, false);
  EXPECT_EQ(points().reserved, bytes(3));
  EXPECT_EQ(points().used, bytes(3));
  cache->truncate(3);
  EXPECT_EQ(points().used, bytes(1));
  const int64_t allocations = memory.allocations;
  { const Step step = cache->begin_step({.tokens = 3, .state_window = true}); }
  EXPECT_EQ(memory.allocations, allocations);
  EXPECT_EQ(points().used, 0U);
  EXPECT_EQ(points().reserved, bytes(3));
  const Speculation fits(*cache, 0, {.window_bytes = bytes(4)});
  EXPECT_TRUE(fits.window(4));
  EXPECT_FALSE(fits.window(5));
}

// Rows that are copies of one remember one window: it counts once, as long as
// the longest of them does.
TEST(Speculation, MemoryOfASharedWindow) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_preallocated(spec_of(model, 2, 14), {});
  const auto points = [&] { return cache->memory().restore_points; };
  feed_window(*cache, model, 1, {1, 2, 3}, false);
  const MemoryUse alone = points();
  cache->reorder(std::vector<int64_t>{1, 1, 1});
  EXPECT_EQ(points().used, alone.used);
  EXPECT_EQ(points().reserved, alone.reserved);
  cache->truncate(std::vector<int64_t>{1, 3, 2});
  EXPECT_EQ(points().used, alone.used);
  cache->truncate(1);
  EXPECT_LT(points().used, alone.used);
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
}

// A recorded step that throws changes nothing, windows included.
TEST(Speculation, AFailedRunOfAGraphKeepsTheWindow) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_window(spec_of(model, 1, 14));
  feed_window(*cache, model, 0, {1, 2, 3}, false);
  StepGraph graph(*cache,
                  [&](Step&, int64_t) { throw std::runtime_error("planned"); });
  EXPECT_THROW(graph.run({}), std::runtime_error);
  EXPECT_EQ(cache->truncate(2).replay[0], 0);
  EXPECT_EQ(feed(*cache, model, {{4}})[0],
            last_of(*cache, model, {1, 2, 4}, 1));
}

// Nor does a window outlive a run whose tokens only the device knows yet.
TEST(Speculation, ARunThatMayEndRowsDropsTheWindow) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_window(spec_of(model, 1, 14));
  feed_window(*cache, model, 0, {1, 2, 3}, false);
  StepGraph graph(*cache,
                  [&](Step& step, int64_t) {
                    forward(model, step, Ids{4}, options_for(*cache));
                  },
                  {.finished = at::zeros({1}, at::kBool)});
  graph.run({}, 1, /*may_finish=*/true);
  EXPECT_EQ(graph.read_back()[0], 4);
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
  EXPECT_EQ(cache->truncate(2).replay[0], 2);
}

// One that is forgotten takes its drafts with it.
TEST(Speculation, WithoutAcceptNothingStays) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  feed_all(*cache, model, some_ids(3));
  {
    const Speculation speculation(*cache);
    feed_all(*cache, model, {1, 2});
  }
  EXPECT_EQ(cache->lengths()[0], 3);
  EXPECT_TRUE(cache->restore_points(0).empty());
  EXPECT_EQ(feed(*cache, model, {{4}})[0],
            last_of(*cache, model, joined(some_ids(3), {4}), 1));
}

// Memory for a larger window that is not there: the row and the window before
// are as they were.
TEST(Speculation, AWindowThatCannotBeHadChangesNothing) {
  TestAllocator& memory = TestAllocator::install();
  const Model model = make_model(Variant::kHybrid);
  int64_t failures = 0;
  for (bool failed = true; failed; ++failures) {
    const auto cache = make_preallocated(spec_of(model, 1, 14), {});
    feed_all(*cache, model, {1, 2});
    feed_window(*cache, model, 0, {3, 4}, false);
    const std::string before = picture(*cache);
    memory.fail_after = failures;
    try {
      const Step step = cache->begin_step({.tokens = 5, .state_window = true});
      failed = false;
    } catch (const c10::Error&) {
    }
    memory.fail_after = -1;
    EXPECT_EQ(picture(*cache), before);
    EXPECT_EQ(cache->truncate(3).replay[0], failed ? 0 : 3);
  }
  EXPECT_GT(failures, 2);  // states, inputs, and the one that was had
}

TEST(Speculation, Errors) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  Speculation speculation(*cache);
  feed_all(*cache, model, {1, 2});
  EXPECT_EQ(error_text([&] { speculation.accept(3); }),
            "[Speculation::accept] between 0 and 2 tokens came since it began "
            "but got 3; commit the step of the drafts first.");
  speculation.accept(1);
  EXPECT_EQ(error_text([&] { speculation.accept(0); }),
            "[Speculation::accept] drafts are accepted once; begin another "
            "Speculation.");
}

}  // namespace
}  // namespace kvcache::toy
