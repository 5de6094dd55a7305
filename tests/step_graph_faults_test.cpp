// StepGraph: recordings that fail, and budgets, by a planned backend.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/toy_replay.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

// A backend that fails and counts, in the place of a device.
class PlannedGraphs final : public GraphBackend {
 public:
  const char* name() const override { return "planned"; }
  std::unique_ptr<RecordedWork> record(
      const std::function<void()>& work) override {
    work();
    if (fail) {
      throw std::runtime_error("no memory for a graph\nand more lines");
    }
    return std::make_unique<Work>(*this, work);
  }
  void synchronize() override {}
  void retired() override { ++retirements; }

  struct Work final : RecordedWork {
    Work(PlannedGraphs& of, std::function<void()> fn)
        : owner(of), work(std::move(fn)) {
      ++owner.alive;
    }
    ~Work() override { --owner.alive; }
    void replay() override { work(); }
    size_t bytes() const override { return owner.size; }
    PlannedGraphs& owner;
    std::function<void()> work;
  };
  bool fail = false;
  size_t size = 100;
  int alive = 0, retirements = 0;
};

TEST(StepGraph, AFailedRecordingIsRememberedAndStepsGoOnEagerly) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_bucketed(model);
  const auto backend = std::make_shared<PlannedGraphs>();
  Replayed replayed(*cache, model, {.backend = backend});
  backend->fail = true;
  Ids held;
  for (int i = 0; i < 6; ++i) {
    held.push_back(i);
    EXPECT_EQ(replayed.feed({i})[0], last_of(*cache, model, held, 1));
  }
  const GraphStatistics& statistics = replayed.graph().statistics();
  EXPECT_EQ(statistics.eager_runs, 6);
  EXPECT_EQ(statistics.replays, 0);
  EXPECT_EQ(statistics.failures,
            (std::vector<std::string>{"window 4: no memory for a graph",
                                      "window 8: no memory for a graph"}));
  EXPECT_EQ(backend->alive, 0);
  EXPECT_EQ(cache->memory().graphs.used, 0U);
  EXPECT_THROW(replayed.graph().capture(16), std::runtime_error);
  backend->fail = false;
  replayed.graph().clear();  // and forget what failed
  replayed.feed({7});
  EXPECT_EQ(statistics.replays, 1);
  EXPECT_EQ(cache->memory().graphs.used, 100U);
}

TEST(StepGraph, ABudgetIsNeverExceeded) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model);
  const auto backend = std::make_shared<PlannedGraphs>();
  {
    Replayed replayed(*cache, model, {.backend = backend, .byte_budget = 250});
    for (const int64_t window : {4, 8}) {
      replayed.graph().capture(window);
    }
    EXPECT_EQ(backend->alive, 2);
    replayed.graph().capture(16);  // the others go, all of them
    EXPECT_EQ(backend->alive, 1);
    EXPECT_EQ(backend->retirements, 1);
    EXPECT_EQ(cache->memory().graphs.used, 100U);
    backend->size = 251;
    EXPECT_THAT(error_of([&] { replayed.graph().capture(kCapacity); }),
                HasSubstr("needs 251 bytes but the budget is 250"));
    EXPECT_EQ(backend->alive, 1);
    replayed.feed({1});  // window 4 does not fit either: eagerly
    EXPECT_EQ(replayed.graph().statistics().eager_runs, 1);
  }
  EXPECT_EQ(backend->alive, 0);  // K24
  EXPECT_EQ(cache->memory().graphs.used, 0U);
}

// A recording that is made anew, as it exceeded the budget beside others, reads
// the flags as well.
TEST(StepGraph, RowsEndInGraphsThatWereMadeAnew) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model, 2);
  const auto backend = std::make_shared<PlannedGraphs>();
  const Tensor finished = at::zeros({2}, at::kBool);
  Replayed replayed(
      *cache, model,
      {.backend = backend, .finished = finished, .byte_budget = 150});
  const std::vector<int64_t> one = {1, 1};
  replayed.ids() = {1, 2};
  replayed.graph().run({.count = one}, 4, true);
  replayed.graph().read_back();
  finished.data_ptr<bool>()[1] = true;
  replayed.graph().run({.count = one}, 4, true);  // another window
  EXPECT_EQ(backend->retirements, 1);
  const auto lengths = replayed.graph().read_back();
  EXPECT_EQ(std::vector<int64_t>(lengths.begin(), lengths.end()),
            (std::vector<int64_t>{8, 4}));
  // Who says that no row ends gets steps of every row, flags or not.
  replayed.graph().run({.count = one});
  EXPECT_EQ(cache->lengths()[1], 5);
  EXPECT_EQ(cache->validate(), std::vector<std::string>{});
}

TEST(StepGraph, OtherRowCountsNeedOtherFlags) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model, 1);
  Replayed replayed(*cache, model, {.finished = at::zeros({1}, at::kBool)});
  replayed.feed({1});
  cache->repeat_rows(3);
  EXPECT_THAT(error_of([&] {
                replayed.feed({1, 2, 3});
              }),
              HasSubstr("finished must have one flag for each of 3 rows but "
                        "has 1"));
  EXPECT_EQ(cache->lengths()[2], 1);
}

// Steps of one replay overwrite a ring one after the other: together they must
// leave what the first of them sees.
TEST(StepGraph, ManyStepsOverARingAreBounded) {
  const Model model = make_model(Variant::kSliding);
  CacheSpec spec = spec_of(model, 1, kCapacity);
  spec.max_step = 4;
  WindowCache cache(spec, {.rings = RingOptions{}});
  Replayed replayed(cache, model);
  replayed.ids() = {1};
  const std::string before = picture(cache);
  EXPECT_THAT(error_of([&] { replayed.graph().run({}, 5); }),
              HasSubstr("at most 4 live tokens a row but got 5"));
  EXPECT_EQ(picture(cache), before);
  replayed.graph().run({}, 4);
  EXPECT_EQ(cache.lengths()[0], 4);
}

// Whoever drops a graph before its tokens are read leaves a cache that works.
TEST(StepGraph, ADroppedGraphIsReadBack) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model, 1);
  {
    Replayed replayed(*cache, model, {.finished = at::zeros({1}, at::kBool)});
    replayed.ids() = {1};
    replayed.graph().run({}, 3, true);
    EXPECT_THAT(error_of([&] { cache->fits(1); }), HasSubstr("read back"));
  }
  EXPECT_EQ(cache->lengths()[0], 3);
}

TEST(StepGraph, FullRowsAreRefusedWithBothNumbers) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_bucketed(model);
  feed_all(*cache, model, some_ids(kCapacity - 2));
  Replayed replayed(*cache, model);
  replayed.ids() = {1};
  EXPECT_THAT(error_of([&] { replayed.graph().run({}, 3); }),
              HasSubstr("would need slots [22, 25) but capacity is 24"));
  replayed.graph().run({}, 2);
  EXPECT_EQ(cache->lengths()[0], kCapacity);
  EXPECT_THAT(error_of([&] { replayed.graph().run({}, 0); }),
              HasSubstr("repeats must be >= 1"));
}

}  // namespace
}  // namespace kvcache::toy
