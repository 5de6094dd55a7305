// choice_runner.h: its chunk graphs, memo and numbers; and the transformers
// that it runs.
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <stdexcept>

#include "kvcache/model/transformer.h"
#include "tests/model/generate/choice_fixture.h"

namespace kvcache::model {
namespace {

// Fails when it is told to, and counts.
class PlannedGraphs final : public GraphBackend {
 public:
  struct Work final : RecordedWork {
    Work(PlannedGraphs& of, std::function<void()> fn)
        : owner(of), work(std::move(fn)) {
      ++owner.alive;
    }
    ~Work() override { --owner.alive; }
    void replay() override { work(); }
    size_t bytes() const override { return 100; }
    PlannedGraphs& owner;
    std::function<void()> work;
  };
  const char* name() const override { return "planned"; }
  std::unique_ptr<RecordedWork> record(
      const std::function<void()>& work) override {
    work();
    ++records;
    if (fail) throw std::runtime_error(std::string(200, 'x') + "\nmore");
    return std::make_unique<Work>(*this, work);
  }
  void synchronize() override {}
  void retired() override {
    EXPECT_EQ(alive, 0);  // one pool: it goes when all of them are gone
    ++retirements;
  }

  bool fail = false;
  int records = 0, alive = 0, retirements = 0;
};

struct PlannedBench : Bench {
  explicit PlannedBench(const ToyRouted& with = {})
      : PlannedBench(std::make_shared<PlannedGraphs>(), with) {}
  PlannedBench(std::shared_ptr<PlannedGraphs> graphs, const ToyRouted& with)
      : Bench(
            [&] {
              ChoiceOptions options = small_choices();
              options.graphs = graphs;
              return options;
            }(),
            with),
        backend(std::move(graphs)) {}
  std::shared_ptr<PlannedGraphs> backend;
};

const ToyRouted kNoAdapters = {.routes = {}, .has_router = false};

// D8: a failed key is remembered and counted, its text is cut, and the request
// takes the plain path without having restored or counted anything.
TEST(ChoiceGraphs, FailedCaptures) {
  PlannedBench bench(kNoAdapters);
  const ChoiceRequest request = ask(Tokens(14, 2), {1});
  bench.backend->fail = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(bench.answer(request).refusal, ChoiceRefusal::kCaptureFailed);
  }
  EXPECT_EQ(bench.backend->records, 1);  // not tried again
  const ChoiceInfo info = bench.runner.info();
  EXPECT_EQ(info.captures, 1);
  EXPECT_GT(info.capture_seconds, 0);
  EXPECT_EQ(info.failures, 1);
  EXPECT_EQ(info.plain, 2);
  EXPECT_EQ(info.store.rows, 0);
  ASSERT_EQ(info.failed.size(), 1U);
  EXPECT_THAT(info.failed[0],
              testing::StartsWith("(lo, 16, 8): std::runtime_error: xxx"));
  EXPECT_EQ(info.failed[0].size(), 160U);
  bench.backend->fail = false;
  EXPECT_EQ(bench.answer(request).refusal, ChoiceRefusal::kCaptureFailed);
  bench.runner.recapture();
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kCold);
}

// D8: all graphs of all chunks are there before anything is restored; a wrong
// guess adds those of the true route; nothing is recorded twice.
TEST(ChoiceGraphs, RecordedAheadAndOnce) {
  PlannedBench bench;
  const Tokens state = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6, 3, 0};
  bench.answer(bench.routed(state, 2));
  const int64_t captures = bench.runner.info().captures;
  EXPECT_EQ(captures, bench.backend->alive);
  EXPECT_EQ(captures, bench.runner.info().graphs);
  bench.backend->fail = true;  // what is there is enough
  EXPECT_EQ(bench.answer(bench.routed(state, 2)).reuse, ReuseClass::kHit);
  // The last chunk's graph is missing: the first ones are not run either.
  bench.model->lower_calls = 0;
  const ChoiceRequest longer = ask(Tokens(34, 3), {1, 2, 3});
  EXPECT_EQ(bench.answer(longer).refusal, ChoiceRefusal::kCaptureFailed);
  EXPECT_LE(bench.model->lower_calls, 2);  // the recording, the plain path
}

// D8: the span covers the padded chunk, not only its live tokens.
TEST(ChoiceGraphs, SpansHoldThePadding) {
  PlannedBench bench(kNoAdapters);
  bench.answer(ask(Tokens(14, 2), {1, 2}));  // chunks of 8, 4, 2 and 2 tokens
  // Of [14, 16) a span of 16 would do for the live tokens.
  EXPECT_EQ(bench.runner.info().graphs, 6);  // (16, 8), (16, 4), (32, 4)
}

// D9: every graph that fits its span, those that are there and those that
// failed left out, under a lock that is free in between.
TEST(ChoiceGraphs, Precapture) {
  PlannedBench bench;
  std::mutex lock;
  const PrecaptureResult first = bench.runner.precapture(&lock);
  EXPECT_EQ(first.graphs, 9 * 3);  // lengths x spans, three parts
  EXPECT_EQ(bench.backend->records, 27);
  EXPECT_GT(first.seconds, 0);
  EXPECT_TRUE(lock.try_lock());
  lock.unlock();
  EXPECT_EQ(bench.runner.precapture().graphs, 27);
  EXPECT_EQ(bench.backend->records, 27);
  PlannedBench small(kNoAdapters);  // no adapters: two parts
  small.backend->fail = true;
  const PrecaptureResult none = small.runner.precapture();
  EXPECT_EQ(none.graphs, 0);
  EXPECT_EQ(none.failed.size(), 3U);
  EXPECT_EQ(small.runner.info().captures, 18);
  small.runner.precapture();
  EXPECT_EQ(small.runner.info().captures, 18);
}

// D9: recapture drops graphs, pool and checkpoints; clear keeps graphs and
// statistics.
TEST(ChoiceGraphs, RecaptureAndClear) {
  PlannedBench bench(kNoAdapters);
  const ChoiceRequest request = ask(Tokens(12, 2), {1});
  bench.answer(request);
  const int alive = bench.backend->alive;
  bench.runner.clear();
  EXPECT_EQ(bench.backend->alive, alive);
  EXPECT_EQ(bench.runner.info().store.checkpoints, 0);
  EXPECT_EQ(bench.runner.info().store.rows, 1);
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kCold);
  bench.runner.recapture();
  EXPECT_EQ(bench.backend->alive, 0);
  EXPECT_EQ(bench.backend->retirements, 1);
  EXPECT_EQ(bench.runner.info().store.checkpoints, 0);
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kCold);
  EXPECT_EQ(bench.runner.info().captures, 2 * alive);
}

// A forward that fails in any chunk of either pass leaves nothing: no count, no
// checkpoint, no guess.
TEST(ChoiceGraphs, ForwardsThatFail) {
  Bench bench;
  bench.runner.precapture();
  const Tokens state = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6, 3, 0};
  const ChoiceRequest request = bench.routed(state, 2);
  int failures = 0;
  for (;; ++failures) {
    bench.model->fail_after = failures;
    const std::string error =
        toy::error_of([&] { bench.runner.answer(request); });
    if (error.empty()) break;
    EXPECT_THAT(error, testing::HasSubstr("as planned"));
    EXPECT_EQ(bench.store->stats().rows, 0);
    EXPECT_EQ(bench.store->stats().checkpoints, 0);
    EXPECT_EQ(bench.runner.last_route(), 0);
  }
  EXPECT_EQ(failures, 16);  // chunks x parts x passes
  bench.model->fail_after = -1;
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kHit);
}

// D14: whole repeated requests, by all that they depend on, a few of them,
// until the store is cleared.
TEST(ChoiceGraphs, Memo) {
  ChoiceOptions options = small_choices();
  options.memo_entries = 2;
  Bench bench(options);
  const ChoiceRequest first = ask(Tokens(12, 2), {1, 3});
  EXPECT_FALSE(bench.answer(first).from_memo);
  EXPECT_TRUE(bench.answer(first).from_memo);
  EXPECT_EQ(bench.store->stats().rows, 1);  // before it is counted
  const auto other = [&](const auto& change) {
    ChoiceRequest request = first;
    change(request);
    EXPECT_FALSE(bench.answer(request).from_memo);
    EXPECT_TRUE(bench.answer(request).from_memo);
  };
  other([](auto& r) { r.space.tenant = "other"; });
  other([](auto& r) { r.option_counts = {3}; });
  other([](auto& r) { r.slots = {12}; });
  other([](auto& r) { r.route = 0; });
  other([](auto& r) { r.ids.back() = 4; });
  EXPECT_FALSE(bench.answer(first).from_memo);  // it had to go
  EXPECT_EQ(bench.runner.info().memo_entries, 2);
  EXPECT_EQ(bench.runner.info().memo_hits, 6);
  bench.runner.clear();
  EXPECT_FALSE(bench.answer(first).from_memo);
}

// D15: all statistics, and the time of each phase.
TEST(ChoiceGraphs, InfoAndTimings) {
  Bench bench(small_choices(), kNoAdapters);
  const ChoiceResult cold = bench.answer(ask(Tokens(20, 2), {1}));
  const ChoiceInfo info = bench.runner.info();
  EXPECT_EQ(info.stride, 8);
  EXPECT_EQ(info.tail, 2);
  EXPECT_EQ(info.store.max_bytes, size_t{1} << 22);
  EXPECT_GT(info.store.used_bytes, 0U);
  EXPECT_EQ(info.store.checkpoints, 4);
  EXPECT_EQ(info.store.groups, 1);
  EXPECT_EQ(info.store.ckpts_made, 4);
  EXPECT_GT(info.capture_seconds, 0);
  for (const double phase : {cold.timings.lookup, cold.timings.prefix,
                             cold.timings.suffix, cold.timings.save}) {
    EXPECT_GT(phase, 0);
  }
}

// D4: a transformer without adapters splits in its middle, and its answers are
// the whole forward's, cold and warm.
TEST(ChoiceGraphs, Transformers) {
  for (const char* name : {"llama_rope3", "qwen3_5"}) {
    const auto model = load_model(std::string("tests/reference/data/") + name,
                                  {.dtype = at::kFloat});
    const auto routed = make_routed(model);
    EXPECT_EQ(routed->split(), model->config().layers / 2);
    ChoiceOptions options = small_choices();
    options.align = 1;
    options.letters = {7, 3, 12, 60};
    const auto store = std::make_shared<CheckpointStore>(
        StoreOptions{.max_bytes = 1 << 22, .min_prefix = 1});
    ChoiceRunner runner(routed, store, options);
    std::mt19937 random(3);
    Tokens state;
    while (state.size() < 37) state.push_back(random() % 64);
    for (const int64_t length : {37, 37, 20, 36}) {
      ChoiceRequest request = ask({state.begin(), state.begin() + length},
                                  {static_cast<int64_t>(random() % 64), 5, 9});
      request.slots = {length + 2, length};
      request.option_counts = {4, 2};
      const ChoiceResult result = runner.answer(request);
      EXPECT_EQ(result.route, 0);
      options.memo_entries = 0;
      ChoiceRunner plain(
          routed, std::make_shared<CheckpointStore>(StoreOptions{}), options);
      const ChoiceResult cold = plain.answer(request);
      EXPECT_EQ(cold.refusal, ChoiceRefusal::kDisabled);
      EXPECT_EQ(result.probabilities, cold.probabilities);
      const Tensor ids = at::tensor(request.ids, at::kLong).unsqueeze(0);
      const Tensor logits =
          model->forward(ids, {.all_logits = true}).select(0, 0);
      const Tensor whole =
          logits.select(0, length + 2)
              .index_select(0, at::tensor(options.letters, at::kLong))
              .softmax(0);
      constexpr float kExp = 1e-6F;  // another exp, another order of additions
      for (size_t i = 0; i < options.letters.size(); ++i) {
        EXPECT_NEAR(result.probabilities[0][i],
                    whole.const_data_ptr<float>()[i], kExp);
      }
    }
    // Attention restores at any token, a hybrid at checkpoints: 16 and 35.
    const bool hybrid = model->config().linear_attention.has_value();
    EXPECT_EQ(store->stats().hits, hybrid ? 1 : 3);
    EXPECT_EQ(store->stats().partial, hybrid ? 2 : 0);
  }
}

}  // namespace
}  // namespace kvcache::model
