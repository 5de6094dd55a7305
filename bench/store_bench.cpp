// bench/store_bench.cpp - a store with 10,000 texts of 2,000 tokens, and what
// policies would have reused of made-up traces.
//
// The texts have a state of 64 bytes at their end and no K/V, so that only the
// search is measured. No model, one thread.
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <map>
#include <random>

#include "kvcache/checkpoint_store.h"
#include "kvcache/reuse_simulator.h"

namespace {

using namespace kvcache;
using Ids = std::vector<int64_t>;

constexpr int64_t kTokens = 2000;
constexpr int64_t kAsked = 997;  // texts asked for in turn; prime

// Text i is [0, shared) of all texts, then its own. `branches`: each leaves the
// first text at a point of its own, the deepest tree there is.
Ids text_of(int64_t i, int64_t shared, bool branches) {
  Ids tokens(kTokens);
  const int64_t from = branches ? i % kTokens : shared;
  for (int64_t t = 0; t < kTokens; ++t) {
    tokens[t] = t < from ? t : 100000 + i * 7 + t % 7;
  }
  return tokens;
}

StoredText state_at_end(const Ids& tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  Checkpoint part{.length = n, .layers = {RecurrentLayer{.state_shape = {16}}}};
  part.points.push_back(std::make_shared<const RestorePoint>(
      RestorePoint{.position = n, .conv = {}, .state = at::zeros({1, 16})}));
  return {.parts = {std::move(part)}};
}

void put(CheckpointStore& store, const Ids& tokens) {
  PutRequest request;
  request.tokens = tokens;
  request.bytes = 64;
  store.put(request, [&] { return state_at_end(tokens); });
}

void lookup(benchmark::State& state) {
  const int64_t groups = state.range(0);
  const int64_t shared = state.range(1);
  const bool branches = state.range(2) != 0;
  CheckpointStore store({.max_bytes = size_t{1} << 30U, .min_prefix = 1});
  for (int64_t i = 0; i < groups; ++i) put(store, text_of(i, shared, branches));
  std::vector<Ids> requests;
  for (int64_t i = 0; i < kAsked; ++i) {
    requests.push_back(text_of(i * 7919 % groups, shared, branches));
    requests.back().push_back(1);
  }
  int64_t at = 0;
  int64_t found = 0;
  for (auto run : state) {
    LookupRequest request;
    request.tokens = requests[at++ % kAsked];
    const Hit hit = store.lookup(request);
    found += hit.position == kTokens ? 1 : 0;
    benchmark::DoNotOptimize(hit);
  }
  state.counters["found"] =
      static_cast<double>(found) / static_cast<double>(state.iterations());
}

// A put that evicts one text and adds one.
void put_and_evict(benchmark::State& state) {
  const int64_t groups = state.range(0);
  CheckpointStore store(
      {.max_bytes = static_cast<size_t>(groups) * 64, .min_prefix = 1});
  for (int64_t i = 0; i < groups; ++i) put(store, text_of(i, 1000, false));
  int64_t next = groups;
  for (auto run : state) {
    state.PauseTiming();
    const Ids tokens = text_of(next++, 1000, false);
    state.ResumeTiming();
    put(store, tokens);
  }
}

// --- traces

Ids fresh(int64_t n, int64_t& next) {
  Ids tokens(static_cast<size_t>(n));
  for (int64_t& token : tokens) token = next++ % 1000000000;
  return tokens;
}

void append(Ids& to, const Ids& tokens) {
  to.insert(to.end(), tokens.begin(), tokens.end());
}

// Conversations of 3 products with a system prompt each, 40 open at once; some
// answers are edited a few turns up, and many questions come only once.
std::vector<TraceRequest> agents() {
  int64_t next = 1;
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  std::vector<Ids> systems;
  for (int64_t n : {900, 1700, 3100}) systems.push_back(fresh(n, next));
  std::map<int64_t, Ids> open;
  std::vector<TraceRequest> trace;
  for (int i = 0; i < 600; ++i) {
    if (below(4) == 0) {
      trace.push_back({.tokens = fresh(200 + below(600), next)});
      continue;
    }
    Ids& text = open[below(40)];
    const Ids& system = systems[below(3)];
    if (text.empty() || below(15) == 0) text = system;
    if (below(10) == 0 && text.size() > 4000) text.resize(text.size() - 1200);
    append(text, fresh(50 + below(500), next));
    trace.push_back(
        {.tokens = text, .marks = {static_cast<int64_t>(system.size())}});
  }
  return trace;
}

void simulated(benchmark::State& state, const PlacementOptions& options,
               EvictionPolicy eviction) {
  const std::vector<TraceRequest> trace = agents();
  // Qwen3.5-0.8B in bfloat16: states of 18 layers, K/V of 6.
  constexpr SimulatedModel kModel = {.point_bytes = 19 << 20,
                                     .token_bytes = 12 << 10};
  const auto budget = static_cast<size_t>(state.range(0)) << 20U;
  SimulationResult result;
  for (auto run : state) {
    result =
        simulate(PlacementPolicy(options), trace, budget, kModel, eviction);
  }
  state.counters["reused"] = result.reused();
  state.counters["checkpoints"] = static_cast<double>(result.stats.ckpts_made);
}

PlacementOptions rule(double ladder, bool marks, bool divergence) {
  return {.rule = PlacementRule::kGeneration,
          .stride = 256,
          .align = 1,
          .ladder = ladder,
          .marks = marks,
          .divergence = divergence};
}

void add(const std::string& name, const PlacementOptions& options) {
  for (const EvictionPolicy policy :
       {EvictionPolicy::kLru, EvictionPolicy::kCostAware}) {
    const bool lru = policy == EvictionPolicy::kLru;
    benchmark::RegisterBenchmark(
        ("simulate/" + name + (lru ? "/lru" : "/cost")).c_str(),
        [options, policy](benchmark::State& state) {
          simulated(state, options, policy);
        })
        ->ArgName("MiB")
        ->Arg(1024)
        ->Arg(4096)
        ->Iterations(1)
        ->Unit(benchmark::kMillisecond);
  }
}

const bool kAdded = [] {
  add("end", rule(0, false, false));
  add("chunk_ends", {.align = 1});
  add("ladder", rule(2, false, false));
  add("divergence", rule(0, false, true));
  add("marks", rule(0, true, false));
  add("marks_divergence", rule(0, true, true));
  add("all", rule(2, true, true));
  return true;
}();

BENCHMARK(lookup)
    ->ArgNames({"groups", "shared", "branches"})
    ->Args({10000, 0, 0})
    ->Args({10000, 1000, 0})
    ->Args({10000, 0, 1})
    ->Args({100, 1000, 0})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(put_and_evict)
    ->ArgName("groups")
    ->Arg(10000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
