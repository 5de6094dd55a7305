// StepGraph: recordings that fail, and budgets, by a planned backend.
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
