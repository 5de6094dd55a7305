// batcher_stress_test.cpp - threads that submit, cancel and look on while one
// steps. Built again under ThreadSanitizer as batcher_tsan_test.

#include <ATen/Parallel.h>

#include <thread>

#include "tests/model/generate/batch_fixture.h"

namespace kvcache::model {
namespace {

constexpr int kThreads = 4;
constexpr int kEach = 60;

BatchRequest numbered(int thread, int i) {
  std::vector<int64_t> tokens = {thread, i % 60, (7 * i + thread) % 60};
  return {.tokens = std::move(tokens),
          .options = {
              .max_new_tokens = 1 + i % 9,
              .sampling = {.temperature = 1, .seed = static_cast<uint64_t>(i)},
              .chunk = 2}};
}

struct Submitted {
  BatchRequest request;
  bool cancelled = false;  // cancel() was called; it may have come too late
};

// What one thread asks for, by id.
using Asked = std::map<uint64_t, Submitted>;

Asked ask(Batcher& batcher, int thread) {
  Asked asked;
  std::mt19937 random(static_cast<unsigned>(thread));
  for (int i = 0; i < kEach; ++i) {
    const BatchRequest request = numbered(thread, i);
    const uint64_t id = batcher.submit(request);
    asked[id].request = request;
    if (random() % 4 == 0) {
      auto victim = asked.begin();
      std::advance(victim, random() % asked.size());
      victim->second.cancelled |= batcher.cancel(victim->first);
    }
    if (random() % 8 == 0) std::this_thread::yield();
    EXPECT_LE(batcher.stats().occupied_rows, 4);
  }
  return asked;
}

void expect_right(const LanguageModel& model, const BatchResult& got,
                  const Submitted& wanted) {
  SCOPED_TRACE(got.id);
  ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
  const auto expected = alone(model, CacheKind::kPreallocated, wanted.request);
  if (got.result.finish_reason == FinishReason::kCancelled) {
    EXPECT_TRUE(wanted.cancelled);
    expect_start_of(got.result, expected);
  } else {
    expect_same(got.result, expected);
  }
}

TEST(BatcherStressTest, ManyThreadsAskWhileOneServes) {
  at::set_num_threads(1);  // the OpenMP runtime is not what is tested here
  const auto model = FakeModel::hashed(64, 32);
  std::map<uint64_t, BatchResult> results;
  Batcher batcher(model,
                  make_cache(CacheKind::kPreallocated, *model, {.rows = 4}),
                  {.on_finished = [&](BatchResult result) {
                    const uint64_t id = result.id;
                    EXPECT_TRUE(results.emplace(id, std::move(result)).second);
                  }});
  std::vector<Asked> asked(kThreads);
  {
    std::jthread server(
        [&](const std::stop_token& stop) { batcher.serve(stop); });
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back(
          [&, t] { asked[static_cast<size_t>(t)] = ask(batcher, t); });
    }
    threads.clear();  // all have asked; what is left is done below
  }
  batcher.run();
  EXPECT_EQ(results.size(), static_cast<size_t>(kThreads * kEach));
  for (const Asked& of_one : asked) {
    for (const auto& [id, wanted] : of_one) {
      ASSERT_TRUE(results.contains(id));
      expect_right(*model, results.at(id), wanted);
    }
  }
  const BatchStats stats = batcher.stats();
  EXPECT_EQ(stats.submitted, kThreads * kEach);
  EXPECT_EQ(stats.finished, kThreads * kEach);
  EXPECT_EQ(stats.queued + stats.occupied_rows, 0);
}

// A thread that polls for results and one that serves.
TEST(BatcherStressTest, ResultsMayBeTakenByAnyThread) {
  at::set_num_threads(1);
  const auto model = FakeModel::hashed(64, 32);
  Batcher batcher(model, make_cache(CacheKind::kConcat, *model, {.rows = 3}));
  std::jthread server(
      [&](const std::stop_token& stop) { batcher.serve(stop); });
  std::map<uint64_t, BatchRequest> asked;
  std::map<uint64_t, BatchResult> results;
  for (int i = 0; i < kEach || results.size() < asked.size(); ++i) {
    if (i < kEach) {
      const BatchRequest request = numbered(0, i);
      asked.emplace(batcher.submit(request), request);
    } else {
      std::this_thread::yield();
    }
    for (BatchResult& result : batcher.take_finished()) {
      const uint64_t id = result.id;
      results.emplace(id, std::move(result));
    }
  }
  for (const auto& [id, request] : asked) {
    expect_right(*model, results.at(id), {.request = request});
  }
}

// A server that sleeps wakes for what is submitted, and for its end.
TEST(BatcherStressTest, ServingSleepsAndWakes) {
  at::set_num_threads(1);
  const auto model = FakeModel::hashed(64, 32);
  std::atomic<int> finished = 0;
  Batcher batcher(model,
                  make_cache(CacheKind::kPreallocated, *model, {.rows = 2}),
                  {.on_finished = [&](const BatchResult&) {
                    ++finished;
                    finished.notify_all();
                  }});
  std::jthread server(
      [&](const std::stop_token& stop) { batcher.serve(stop); });
  for (int i = 0; i < 5; ++i) {
    batcher.submit(numbered(0, i));
    finished.wait(i);  // asleep again, or about to be
    EXPECT_EQ(finished, i + 1);
  }
  batcher.submit({});  // refused: also a result
  finished.wait(5);
  EXPECT_EQ(finished, 6);
}

}  // namespace
}  // namespace kvcache::model
