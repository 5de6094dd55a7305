// bench/speculation_bench.cpp - drafts of which all but one are wrong, on a
// hybrid model of the 0.8B shape: by a replay, and by a window of states.
//
// Both in turns in one run; medians. `step` is the forward of range(0) tokens,
// `accept` what keeping the first of them costs, its replay included.
#include <ATen/ops/full.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "bench/random_model.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/speculation.h"

namespace {

using at::Tensor;
using kvcache::PreallocatedCache;
using kvcache::Role;
using kvcache::Speculation;

double milliseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> taken =
      std::chrono::steady_clock::now() - start;
  return taken.count();
}

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

class Verification {
 public:
  explicit Verification(int64_t tokens)
      : tokens_(tokens), cache_(model().cache_spec(1, 512)) {
    feed(64, Role::kPrefill, false);
    cache_.mark();  // so that each turn begins where the last did
  }
  // One turn; with a window or a replay.
  void turn(bool window) {
    Times& times = window ? window_ : replay_;
    Speculation drafts(cache_, 0, {.window_bytes = window ? ~size_t{0} : 0});
    times.step.push_back(milliseconds(
        [&] { feed(tokens_, Role::kDecode, drafts.window(tokens_)); }));
    times.accept.push_back(milliseconds([&] {
      const int64_t again = drafts.accept(1);
      if (again > 0) feed(again, Role::kDecode, false);
    }));
    cache_.truncate(64);
  }
  void report(benchmark::State& state) const {
    const auto put = [&](const char* name, double value) {
      state.counters[name] = value;
    };
    put("step_ms", median(replay_.step));
    put("window_step_ms", median(window_.step));
    put("replay_ms", median(replay_.accept));
    put("window_accept_ms", median(window_.accept));
    put("step_ratio", median(window_.step) / median(replay_.step));
    put("all_ratio", (median(window_.step) + median(window_.accept)) /
                         (median(replay_.step) + median(replay_.accept)));
  }

 private:
  struct Times {
    std::vector<double> step, accept;
  };
  static const kvcache::model::Transformer& model() {
    static const auto made = kvcache::bench::random_hybrid(at::kBFloat16);
    return *made;
  }
  void feed(int64_t tokens, Role role, bool window) {
    const Tensor ids = at::full({1, tokens}, 7, at::kLong);
    kvcache::Step step =
        cache_.begin_step({.tokens = tokens, .state_window = window});
    benchmark::DoNotOptimize(
        model().forward(ids, step, {.role = role, .all_logits = true}));
    step.commit();
  }

  int64_t tokens_;
  PreallocatedCache cache_;
  Times replay_, window_;
};

void verify(benchmark::State& state) {
  const c10::InferenceMode inference;
  Verification verification(state.range(0));
  verification.turn(true);  // makes the window's memory
  for (auto each : state) {
    verification.turn(false);
    verification.turn(true);
  }
  verification.report(state);
}
BENCHMARK(verify)->Arg(2)->Arg(5)->Arg(9)->UseRealTime()->Iterations(15);

}  // namespace
