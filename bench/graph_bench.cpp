// graph_bench.cpp - ways to make a decode step, on one machine in one run.
//
// usage: graph_bench MODEL [DEVICE [CONTEXT [TOKENS]]]
//
// Plain steps over a PreallocatedCache, the static step of a WindowCache run
// eagerly and, on CUDA, as graphs, with buckets and with one window, one and
// eight tokens a replay; then all slots of a SlotCache. Rounds go through all
// of them in turn, so that a machine that slows down slows all of them down;
// the median of the rounds counts. `host` is the time in which the calls
// return: on a device, what the host spends on a token.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/model/graph_model.h"
#include "kvcache/model/transformer.h"
#include "kvcache/preallocated_cache.h"
#include "kvcache/slot_graph_decoder.h"
#ifdef KVCACHE_BENCH_CUDA
#include "kvcache/cuda_graphs.h"
#endif

namespace {

using namespace kvcache;
using model::graph_model;
using model::Transformer;

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

struct Settings {
  at::Device device = at::kCPU;
  int64_t context = 512, tokens = 64, rounds = 5;
};

// One way to decode: makes `tokens` of every row, from the context on.
struct Way {
  std::string name;
  int64_t rows = 1;
  std::function<void()> prepare;  // back to the context
  std::function<void()> decode;   // asynchronous on a device
  std::function<const GraphStatistics*()> statistics = {};
  std::vector<double> total_ms = {}, host_ms = {};
};

std::shared_ptr<GraphBackend> graphs_for(at::Device device) {
#ifdef KVCACHE_BENCH_CUDA
  if (device.is_cuda()) return cuda_graphs(device);
#endif
  return device.is_cpu() ? eager_graphs() : nullptr;
}

Tensor prompt_of(const Settings& settings, int64_t rows) {
  return at::full({rows, settings.context}, 42, at::TensorOptions(at::kLong));
}

int64_t capacity_of(const Settings& settings) {
  return settings.context + settings.tokens;
}

Way plain_way(const Transformer& model, const Settings& settings) {
  auto cache = std::make_shared<PreallocatedCache>(
      model.cache_spec(1, capacity_of(settings)));
  const Tensor token =
      at::full({1, 1}, 42, at::TensorOptions(at::kLong)).to(settings.device);
  const auto step = [=, &model](const Tensor& ids, Role role) {
    Step open = cache->begin_step({.tokens = ids.size(1)});
    model.forward(ids, open, {.role = role});
    open.commit();
  };
  step(prompt_of(settings, 1), Role::kPrefill);
  return {.name = "plain steps, PreallocatedCache",
          .prepare = [=] { cache->truncate(settings.context); },
          .decode =
              [=] {
                for (int64_t i = 0; i < settings.tokens; ++i) {
                  step(token, Role::kDecode);
                }
              }};
}

struct Choice {
  const char* name;
  Windows windows = Windows::kBuckets;
  bool recorded = false;  // by the device's graphs, else by the eager twin
  int64_t per_replay = 1;
};

Way window_way(const Transformer& model, const Settings& settings,
               const Choice& choice) {
  auto cache =
      std::make_shared<WindowCache>(model.cache_spec(1, capacity_of(settings)),
                                    WindowOptions{.windows = choice.windows});
  auto decoder = std::make_shared<GraphDecoder>(
      graph_model(model), *cache,
      GraphDecoderOptions{.backend = choice.recorded
                                         ? graphs_for(settings.device)
                                         : eager_graphs(),
                          .steps_per_replay = choice.per_replay});
  const Tensor token =
      at::full({1, 1}, 42, at::TensorOptions(at::kLong)).to(settings.device);
  decoder->prefill(prompt_of(settings, 1), {.last_only = true});
  const int64_t n = choice.per_replay;
  return {.name = choice.name,
          .prepare = [=] { cache->truncate(settings.context); },
          .decode =
              [=] {
                for (int64_t i = 0; i < settings.tokens; i += n) {
                  if (n > 1) {
                    decoder->decode(token, n);
                  } else {
                    decoder->step(token);
                  }
                }
              },
          .statistics =
              [=] {
                return n > 1 ? &decoder->decode_statistics()
                             : &decoder->statistics();
              }};
}

Way slots_way(const Transformer& model, const Settings& settings,
              int64_t slots) {
  auto cache = std::make_shared<SlotCache>(
      model.cache_spec(slots, capacity_of(settings)));
  auto decoder = std::make_shared<SlotGraphDecoder>(
      graph_model(model), *cache,
      GraphDecoderOptions{.backend = graphs_for(settings.device)});
  while (cache->acquire()) {
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    Step open = cache->begin_step(
        {.tokens = settings.context, .first_row = slot, .rows = 1});
    model.forward(prompt_of(settings, 1), open, {});
    open.commit();
  }
  const Tensor token = at::full({slots, 1}, 42, at::TensorOptions(at::kLong))
                           .to(settings.device);
  return {.name = std::to_string(slots) + " slot" + (slots > 1 ? "s" : ""),
          .rows = slots,
          .prepare = [=] { cache->truncate(settings.context); },
          .decode =
              [=] {
                for (int64_t i = 0; i < settings.tokens; ++i) {
                  decoder->step(token);
                }
              },
          .statistics = [=] { return &decoder->statistics(); }};
}

void measure(Way& way, const std::shared_ptr<GraphBackend>& device) {
  way.prepare();
  if (device) device->synchronize();
  const auto start = Clock::now();
  way.decode();
  way.host_ms.push_back(ms_since(start));
  if (device) device->synchronize();
  way.total_ms.push_back(ms_since(start));
}

void print(const Way& way, const Settings& settings) {
  const double ms = median(way.total_ms) / static_cast<double>(settings.tokens);
  const double host =
      1000 * median(way.host_ms) / static_cast<double>(settings.tokens);
  std::printf("| %-36s | %8.3f | %8.1f | %9.1f |", way.name.c_str(), ms,
              static_cast<double>(way.rows) * 1000 / ms, host);
  if (const GraphStatistics* s = way.statistics ? way.statistics() : nullptr) {
    std::printf(" %ld graphs, %.3f s, %ld eager |",
                static_cast<long>(s->captures), s->capture_seconds,
                static_cast<long>(s->eager_runs));
    for (const std::string& failure : s->failures) {
      std::printf(" %s", failure.c_str());
    }
  } else {
    std::printf(" |");
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: graph_bench MODEL [DEVICE [CONTEXT [TOKENS]]]\n");
    return 2;
  }
  const c10::InferenceMode inference;
  Settings settings;
  if (argc > 2) settings.device = at::Device(argv[2]);
  if (argc > 3) settings.context = std::atoll(argv[3]);
  if (argc > 4) settings.tokens = std::atoll(argv[4]);
  const auto transformer =
      model::load_model(argv[1], {.device = settings.device});
  const auto device =
      settings.device.is_cpu() ? nullptr : graphs_for(settings.device);

  std::vector<Way> ways;
  ways.push_back(plain_way(*transformer, settings));
  std::vector<Choice> choices = {
      {.name = "static steps, buckets"},
      {.name = "static steps, one window", .windows = Windows::kOne},
      {.name = "static steps, 8 a replay", .per_replay = 8}};
  if (device) {
    choices.push_back({.name = "graph, buckets", .recorded = true});
    choices.push_back({.name = "graph, one window",
                       .windows = Windows::kOne,
                       .recorded = true});
    for (const int64_t n : {8, 32}) {
      choices.push_back(
          {.name = n == 8 ? "graph, 8 a replay" : "graph, 32 a replay",
           .recorded = true,
           .per_replay = n});
    }
  }
  for (const Choice& choice : choices) {
    ways.push_back(window_way(*transformer, settings, choice));
  }
  for (const int64_t slots : {1, 8}) {
    ways.push_back(slots_way(*transformer, settings, slots));
  }
  for (int64_t round = -1; round < settings.rounds; ++round) {
    for (Way& way : ways) {
      measure(way, device);
      if (round < 0) way.total_ms.clear(), way.host_ms.clear();
    }
  }
  std::printf("%s, %s, %ld tokens after %ld, median of %ld rounds\n\n", argv[1],
              settings.device.str().c_str(), static_cast<long>(settings.tokens),
              static_cast<long>(settings.context),
              static_cast<long>(settings.rounds));
  std::printf("| step | ms | tok/s | host us | recordings |\n");
  std::printf("| --- | --- | --- | --- | --- |\n");
  for (const Way& way : ways) print(way, settings);
  return 0;
}
