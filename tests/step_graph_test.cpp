// StepGraph: a replay is the step itself, recording leaves no trace, and what
// fails changes nothing.
#include "kvcache/step_graph.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/toy_replay.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

class StepGraphTest : public testing::TestWithParam<Variant> {
 protected:
  const Model model = make_model(GetParam());
};
INSTANTIATE_TEST_SUITE_P(EveryModel, StepGraphTest,
                         testing::ValuesIn(kVariants),
                         [](const auto& info) { return name_of(info.param); });

// K16: every length across every bucket border, down again with a new request,
// and up once more: each step is the stateless forward's, bit for bit.
TEST_P(StepGraphTest, K16EqualsThePlainStepAcrossEveryBucketBorder) {
  const auto cache = make_bucketed(model, 2);
  Replayed replayed(*cache, model);
  for (int round = 0; round < 3; ++round) {
    cache->reset();
    std::vector<Ids> held = {some_ids(2, round), some_ids(3, round + 1)};
    feed(*cache, model, held);
    while (cache->lengths()[1] < kCapacity) {
      const Ids next = {static_cast<int>(held[0].size()) % kVocabulary,
                        static_cast<int>(3 * held[1].size()) % kVocabulary};
      const std::vector<Floats> got = replayed.feed(next);
      for (size_t row = 0; row < 2; ++row) {
        held[row].push_back(next[row]);
        ASSERT_EQ(got[row], last_of(*cache, model, held[row], 1))
            << "row " << row << " at " << held[row].size();
      }
    }
    EXPECT_EQ(cache->validate(), std::vector<std::string>{});
  }
  const GraphStatistics& statistics = replayed.graph().statistics();
  EXPECT_EQ(statistics.captures, 4);
  EXPECT_EQ(statistics.graphs.size(), kBuckets.size());
  EXPECT_EQ(statistics.eager_runs, 0);
}

// K17: graphs are at most the buckets, whatever the lengths.
TEST(StepGraph, K17AtMostOneGraphForABucket) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model);
  Replayed replayed(*cache, model);
  for (int request = 0; request < 200; ++request) {
    cache->reset();
    feed_all(*cache, model, some_ids(1 + request * 7 % (kCapacity - 1)));
    replayed.feed({request % kVocabulary});
    ASSERT_LE(replayed.graph().statistics().graphs.size(), kBuckets.size());
  }
  EXPECT_EQ(replayed.graph().statistics().captures, 4);
  EXPECT_EQ(replayed.graph().statistics().replays, 200);
}

// Verbs between replays: graphs stay valid, or the epoch retires them.
TEST_P(StepGraphTest, VerbsBetweenReplays) {
  const auto cache = make_bucketed(model, 2);
  Replayed replayed(*cache, model);
  std::vector<Ids> held = {some_ids(3), some_ids(3, 1)};
  feed(*cache, model, held);
  cache->mark();
  const auto check = [&](const Ids& next) {
    const std::vector<Floats> got = replayed.feed(next);
    for (size_t row = 0; row < next.size(); ++row) {
      held[row].push_back(next[row]);
      ASSERT_EQ(got[row], last_of(*cache, model, held[row], 1));
    }
  };
  check({1, 2});
  check({3, 4});
  const uint64_t epoch = cache->address_epoch();
  cache->truncate(3);
  held = {some_ids(3), some_ids(3, 1)};
  check({5, 6});
  cache->reorder(std::vector<int64_t>{1, 0});
  std::swap(held[0], held[1]);
  check({7, 0});
  const Checkpoint saved = cache->checkpoint(0);
  cache->reset(1);
  cache->restore(saved, 1);
  held[1] = held[0];
  check({2, 3});
  EXPECT_EQ(cache->address_epoch(), epoch);
  EXPECT_EQ(replayed.graph().statistics().generations, 0);
  { const Step dropped = cache->begin_step({.tokens = 3}); }
  check({4, 1});
  // Two tokens a row, eagerly, beside the graphs' own buffers.
  feed(*cache, model, {{1, 2}, {3, 4}});
  held[0].insert(held[0].end(), {1, 2});
  held[1].insert(held[1].end(), {3, 4});
  check({6, 5});
}

TEST(StepGraph, OtherAddressesRetireAllGraphsTogether) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model, 2);
  Replayed replayed(*cache, model);
  replayed.feed({1, 2});
  feed(*cache, model, {{1, 2, 3}, {4, 5, 6}});
  replayed.feed({1, 2});
  EXPECT_EQ(replayed.graph().statistics().graphs.size(), 2U);
  cache->reorder(std::vector<int64_t>{0});
  replayed.ids() = {3};
  const std::vector<Floats> got = replayed.feed({3});
  EXPECT_EQ(got[0], last_of(*cache, model, {1, 1, 2, 3, 1, 3}, 1));
  EXPECT_EQ(replayed.graph().statistics().generations, 1);
  EXPECT_EQ(replayed.graph().statistics().graphs.size(), 1U);
}

// K19, C3: recording ahead on an empty, half full and full cache.
TEST_P(StepGraphTest, K19RecordingLeavesNoTrace) {
  for (const size_t tokens : {size_t{0}, size_t{9}, size_t{kCapacity}}) {
    const auto cache = make_bucketed(model, 2);
    for (size_t i = 0; i < tokens; ++i) {
      feed_all(*cache, model, {static_cast<int>(i % kVocabulary)});
    }
    cache->mark();
    const std::string before = picture(*cache);
    Replayed replayed(*cache, model);  // of dead tokens, whose values are NaN
    for (const int64_t window : kBuckets) {
      EXPECT_GE(replayed.graph().capture(window), 0);
      EXPECT_EQ(replayed.graph().capture(window), 0) << "it is there";
      replayed.graph().capture(window, 1, 3);
    }
    EXPECT_EQ(picture(*cache), before);
    EXPECT_EQ(cache->validate(), std::vector<std::string>{});
    EXPECT_EQ(replayed.graph().statistics().captures, 8);
  }
}

// K20: a full row that rests beside others: nothing of it changes.
TEST(StepGraph, K20OnlyTheRowsThatTakePartChange) {
  const Model model = make_model(Variant::kMixed);
  const auto cache = make_bucketed(model, 4);
  feed(*cache, model, {some_ids(kCapacity), some_ids(2), some_ids(5), {}});
  Replayed replayed(*cache, model);
  for (int i = 0; i < 6; ++i) {
    const std::string full = bytes_of(cache->checkpoint(0));
    const std::string empty = bytes_of(cache->checkpoint(3));
    replayed.feed({kDead, i, i + 1, kDead});
    ASSERT_EQ(bytes_of(cache->checkpoint(0)), full);
    ASSERT_EQ(bytes_of(cache->checkpoint(3)), empty);
  }
  EXPECT_EQ(
      std::vector<int64_t>(cache->lengths().begin(), cache->lengths().end()),
      (std::vector<int64_t>{kCapacity, 8, 11, 0}));
}

// K22: recorded at length 4, replayed at 5, 9 and 4 again.
TEST_P(StepGraphTest, K22PositionsAreThoseOfTheReplay) {
  const auto cache = make_bucketed(model);
  const auto twin = make_bucketed(model);
  Replayed replayed(*cache, model);
  for (const size_t length : {size_t{4}, size_t{5}, size_t{9}, size_t{4}}) {
    for (WindowCache* c : {cache.get(), twin.get()}) {
      c->reset();
      feed_all(*c, model, some_ids(length));
    }
    replayed.feed({6});
    feed_all(*twin, model, {6});
    ASSERT_EQ(bytes_of(cache->checkpoint(0)), bytes_of(twin->checkpoint(0)));
  }
}

TEST_P(StepGraphTest, WorkThatThrowsChangesNothing) {
  for (int64_t repeats = 1; repeats <= 3; ++repeats) {
    for (int64_t failing = 0; failing < repeats; ++failing) {
      for (const bool late : {false, true}) {
        const auto cache = make_bucketed(model, 2);
        feed_all(*cache, model, some_ids(5));
        Replayed replayed(*cache, model);
        const std::string before = picture(*cache);
        bool on = true;
        const auto fail = [&](Step&, int64_t repeat) {
          if (on && repeat == failing) {
            throw std::runtime_error("planned");
          }
        };
        (late ? replayed.after : replayed.before) = fail;
        replayed.ids() = {1, 2};
        const std::vector<int64_t> one = {1, 1};
        EXPECT_THROW(replayed.graph().run({.count = one}, repeats),
                     std::runtime_error);
        EXPECT_EQ(picture(*cache), before);
        EXPECT_THAT(replayed.graph().statistics().failures,
                    testing::ElementsAre(HasSubstr("planned")));
        on = false;
        const std::vector<Floats> got = replayed.feed({1, 2});
        EXPECT_EQ(got[0], last_of(*cache, model, joined(some_ids(5), {1}), 1));
      }
    }
  }
}

TEST_P(StepGraphTest, ARecordedStepKnowsNoHostNumbers) {
  const auto cache = make_bucketed(model);
  feed_all(*cache, model, some_ids(3));
  Replayed replayed(*cache, model);
  std::vector<std::string> errors;
  replayed.before = [&](Step& step, int64_t) {
    errors = {error_of([&] { cache->lengths(); }),
              error_of([&] { step.live(0, 0); }),
              error_of([&] { step.commit(); }),
              error_of([&] { cache->truncate(1); })};
  };
  replayed.feed({1});
  EXPECT_THAT(errors,
              testing::ElementsAre(HasSubstr("this step is recorded"),
                                   HasSubstr("must not ask the host"),
                                   HasSubstr("the owner of a recorded step"),
                                   HasSubstr("no step may be open")));
  EXPECT_EQ(cache->lengths()[0], 4);
}

TEST(StepGraph, AViewOfARecordedStepIsOfItsWindow) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model);
  std::vector<int64_t> windows;
  StepGraph graph(*cache, [&](Step& step, int64_t) {
    for (size_t i = 0; i < model.layers.size(); ++i) {
      const KvView& view = step.reserve(static_cast<int64_t>(i));
      EXPECT_FALSE(view.uniform);
      EXPECT_EQ(view.k.size(2), kCapacity + 1);
      EXPECT_EQ(view.cells.item<int64_t>(),
                step.limits().item<int64_t>() > 0
                    ? step.positions().item<int64_t>()
                    : kCapacity);
      windows.push_back(view.window);
    }
  });
  graph.run({});
  EXPECT_EQ(windows, std::vector<int64_t>(2 * model.layers.size(), 4));
}

TEST(StepGraph, MovedInputsAreRefusedByTheTwinAsWell) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model);
  Tensor input = at::empty({4}, at::kFloat).fill_(1);
  Replayed replayed(*cache, model, {.inputs = {input}});
  replayed.feed({1});
  input.set_data(at::empty({4}, at::kFloat).fill_(2));
  const std::string before = picture(*cache);
  EXPECT_THAT(error_of([&] { replayed.feed({2}); }),
              HasSubstr("every tensor must be where it was when window 4 was "
                        "recorded"));
  EXPECT_EQ(picture(*cache), before);
  replayed.graph().clear();
  replayed.feed({2});
  EXPECT_EQ(cache->lengths()[0], 2);
}

TEST(StepGraph, RefusesCachesWithoutStaticSteps) {
  const Model model = make_model(Variant::kAttention);
  const auto nothing = [](Step&, int64_t) {};
  ConcatCache concat(spec_of(model));
  EXPECT_THAT(error_of([&] { StepGraph(concat, nothing); }),
              HasSubstr("its addresses move with every commit"));
  PreallocatedCache preallocated(spec_of(model));
  EXPECT_THAT(error_of([&] { StepGraph(preallocated, nothing); }),
              HasSubstr("no static window"));
  const auto cache = make_bucketed(model);
  EXPECT_THAT(error_of([&] { StepGraph(*cache, nullptr); }),
              HasSubstr("must be given but is empty"));
}

// Rows that end inside of a replay: only the device knows, until it is read.
TEST_P(StepGraphTest, RowsThatEndTakeNoMoreTokens) {
  const auto cache = make_bucketed(model, 3);
  const Tensor finished = at::zeros({3}, at::kBool);
  std::vector<Ids> held = {some_ids(3), some_ids(4, 1), some_ids(2, 2)};
  feed(*cache, model, held);
  Replayed replayed(*cache, model, {.finished = finished});
  replayed.ids() = {1, 1, 1};
  replayed.after = [&](Step& step, int64_t repeat) {
    const auto* limits = step.limits().data_ptr<int64_t>();
    if (limits[0] > 0) {  // a recording changes no input
      replayed.ids() = Ids(3, static_cast<int>(repeat) + 2);
      finished.data_ptr<bool>()[1] = true;
    }
  };
  replayed.graph().run({}, 4, true);
  EXPECT_THAT(error_of([&] { cache->lengths(); }),
              HasSubstr("read its tokens"));
  EXPECT_THAT(error_of([&] { cache->mark(); }), HasSubstr("read back"));
  const auto lengths = replayed.graph().read_back();
  EXPECT_EQ(std::vector<int64_t>(lengths.begin(), lengths.end()),
            (std::vector<int64_t>{7, 5, 6}));
  finished.zero_();
  replayed.after = {};
  const std::vector<Floats> got = replayed.feed({3, 3, 3});
  EXPECT_EQ(got[0],
            last_of(*cache, model, joined(held[0], {1, 2, 3, 4, 3}), 1));
  EXPECT_EQ(got[1], last_of(*cache, model, joined(held[1], {1, 3}), 1));
  EXPECT_EQ(got[2],
            last_of(*cache, model, joined(held[2], {1, 2, 3, 4, 3}), 1));
}

}  // namespace
}  // namespace kvcache::toy
