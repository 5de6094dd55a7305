// attention_bench.cpp - attend() beside LibTorch's attention and the memory.
//
// Each repetition measures the read bandwidth, attend() and LibTorch's
// scaled_dot_product_attention one after the other, so that a machine that
// slows down slows all of them down. Times are medians over single calls, times
// the layers: a call that another process interrupts does not count.
// The shape is SmolLM2-135M's: 30 layers of 9 query and 3 key/value heads
// of 64.

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/read_memory.h"
#include "kvcache/attention.h"
#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"

namespace {

using at::Tensor;
using kvcache::KvFormat;
using kvcache::KvView;
using kvcache::Role;
using kvcache::bench::Read;

constexpr int64_t kLayers = 30, kHeads = 3, kGroup = 3, kHeadDim = 64;

template <class F>
double seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  const std::chrono::duration<double> taken =
      std::chrono::steady_clock::now() - start;
  return taken.count();
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}

// --- read bandwidth --------------------------------------------------------

// Bytes a second of the best of three ways to read 512 MB on all threads, each
// the median over slices.
class Probe {
 public:
  void read() {
    read_slices<Read::kPlain>();
    read_slices<Read::kPrefetched>();
    read_slices<Read::kStreaming>();
  }
  double rate() const {
    double best = 0;
    for (const auto& rates : rates_) best = std::max(best, median(rates));
    return best;
  }

 private:
  static constexpr int64_t kBytes = 512 << 20, kSlice = 8 << 20;

  template <Read kHow>
  void read_slices() {
    const char* p = static_cast<const char*>(memory_.const_data_ptr());
    const int64_t threads = at::get_num_threads();
    const int64_t share = kSlice / threads / 4096 * 4096;
    for (int64_t i = 0; i < kBytes; i += kSlice) {
      const double taken = seconds([&] {
        at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
          benchmark::DoNotOptimize(kvcache::bench::read_memory<kHow>(
              p + i + begin * share, (end - begin) * share));
        });
      });
      rates_[static_cast<size_t>(kHow)].push_back(
          static_cast<double>(share * threads) / taken);
    }
  }

  Tensor memory_ = at::full({kBytes / 8}, 1, at::kLong);
  std::array<std::vector<double>, 3> rates_;
};

// --- the two attentions ----------------------------------------------------

enum Layout { kHeadMajor, kPositionMajor };

// What the last `tokens` of `length` tokens read in each of `layers` layers of
// a cache: head-major in ConcatCache, position-major in PreallocatedCache.
std::vector<KvView> views_of(int64_t layers, int64_t length, int64_t tokens,
                             Layout layout, at::ScalarType dtype,
                             KvFormat format = KvFormat::kPlain) {
  const kvcache::AttentionLayer layer{.heads = kHeads, .head_dim = kHeadDim};
  const kvcache::CacheSpec spec{
      .capacity = length,
      .dtype = dtype,
      .kv_format = format,
      .layers = std::vector<kvcache::LayerSpec>(layers, layer)};
  std::unique_ptr<kvcache::Cache> cache;
  if (layout == kHeadMajor) {
    cache = std::make_unique<kvcache::ConcatCache>(spec);
  } else {
    cache = std::make_unique<kvcache::PreallocatedCache>(spec);
  }
  std::vector<KvView> views;  // they keep the memory when the cache is gone
  kvcache::Step step = cache->begin_step({.tokens = length});
  for (int64_t i = 0; i < layers; ++i) {
    views.push_back(
        step.update(i, at::randn({1, kHeads, length, kHeadDim}, dtype),
                    at::randn({1, kHeads, length, kHeadDim}, dtype)));
    views.back().limits =
        at::arange(length - tokens + 1, length + 1, at::kLong).unsqueeze(0);
  }
  step.commit();
  return views;
}

Tensor queries(int64_t tokens, at::ScalarType dtype) {
  return at::randn({1, tokens, kHeads * kGroup, kHeadDim}, dtype)
      .transpose(1, 2);
}

void decode(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const int64_t length = state.range(0);
  const auto layout = static_cast<Layout>(state.range(1));
  const std::vector<KvView> layers =
      views_of(kLayers, length, 1, layout, dtype);
  const Tensor q = queries(1, dtype);
  // LibTorch at its best: the group as rows of one head, K and V read once.
  const Tensor rows = q.view({1, kHeads, kGroup, kHeadDim});
  Probe probe;
  std::vector<double> ours, torch, torch_rows;
  for (auto _ : state) {
    probe.read();
    double total = 0;
    for (const KvView& view : layers) {
      ours.push_back(seconds([&] {
        benchmark::DoNotOptimize(
            kvcache::attend(q, view, {.role = Role::kDecode}));
      }));
      total += ours.back();
    }
    for (const KvView& view : layers) {
      torch.push_back(seconds([&] {
        benchmark::DoNotOptimize(at::scaled_dot_product_attention(
            q, view.k, view.v, {}, 0, false, {}, /*enable_gqa=*/true));
      }));
    }
    for (const KvView& view : layers) {
      torch_rows.push_back(seconds([&] {
        benchmark::DoNotOptimize(
            at::scaled_dot_product_attention(rows, view.k, view.v));
      }));
    }
    state.SetIterationTime(total);
  }
  const double bytes = static_cast<double>(2 * kHeads * kHeadDim * length *
                                           c10::elementSize(dtype));
  const double layer = median(ours);
  state.counters["ms"] = kLayers * layer * 1e3;
  state.counters["GB_s"] = bytes / layer / 1e9;
  state.counters["probe_GB_s"] = probe.rate() / 1e9;
  state.counters["share"] = bytes / layer / probe.rate();
  state.counters["sdpa_ms"] = kLayers * median(torch) * 1e3;
  state.counters["sdpa_rows_ms"] = kLayers * median(torch_rows) * 1e3;
  state.counters["faster"] = median(torch) / layer;
  state.counters["faster_rows"] = median(torch_rows) / layer;
}

// K and V as 8-bit codes and as they are, in turns.
void decode_int8(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const int64_t length = state.range(0);
  const std::vector<KvView> plain =
      views_of(kLayers, length, 1, kPositionMajor, dtype);
  const std::vector<KvView> codes =
      views_of(kLayers, length, 1, kPositionMajor, dtype, KvFormat::kInt8);
  const Tensor q = queries(1, dtype);
  Probe probe;
  std::vector<double> of_plain, of_codes;
  const auto run = [&](const std::vector<KvView>& layers,
                       std::vector<double>& to) {
    double total = 0;
    for (const KvView& view : layers) {
      to.push_back(seconds([&] {
        benchmark::DoNotOptimize(
            kvcache::attend(q, view, {.role = Role::kDecode}));
      }));
      total += to.back();
    }
    return total;
  };
  for (auto _ : state) {
    probe.read();
    run(plain, of_plain);
    state.SetIterationTime(run(codes, of_codes));
  }
  const double layer = median(of_codes);
  const double bytes =
      static_cast<double>(2 * kHeads * (kHeadDim + 4) * length);
  state.counters["ms"] = kLayers * layer * 1e3;
  state.counters["GB_s"] = bytes / layer / 1e9;
  state.counters["probe_GB_s"] = probe.rate() / 1e9;
  state.counters["share"] = bytes / layer / probe.rate();
  state.counters["plain_ms"] = kLayers * median(of_plain) * 1e3;
  state.counters["faster"] = median(of_plain) / layer;
}

void prefill(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const int64_t length = state.range(0);
  const KvView view = views_of(1, length, length, kPositionMajor, dtype)[0];
  const Tensor q = queries(length, dtype);
  std::vector<double> ours, torch;
  for (auto _ : state) {
    for (int64_t i = 0; i < 5; ++i) {
      ours.push_back(
          seconds([&] { benchmark::DoNotOptimize(kvcache::attend(q, view)); }));
    }
    torch.push_back(seconds([&] {
      benchmark::DoNotOptimize(at::scaled_dot_product_attention(
          q, view.k, view.v, {}, 0, true, {}, /*enable_gqa=*/true));
    }));
    state.SetIterationTime(ours.back());
  }
  // Two products, a multiplication and an addition each, over visible keys.
  const double flops = static_cast<double>(4 * kHeads * kGroup * kHeadDim) *
                       static_cast<double>(length * (length + 1) / 2);
  const double layer = median(ours);
  state.counters["ms"] = kLayers * layer * 1e3;
  state.counters["GFLOP_s"] = flops / layer / 1e9;
  state.counters["sdpa_ms"] = kLayers * median(torch) * 1e3;
  state.counters["faster"] = median(torch) / layer;
}

void decode_layouts(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"keys", "position_major"})
      ->ArgsProduct({{128, 512, 2000, 4096}, {kHeadMajor, kPositionMajor}})
      ->Iterations(15)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}
void prefill_lengths(benchmark::internal::Benchmark* bench) {
  bench->ArgName("tokens")
      ->Arg(512)
      ->Arg(2000)
      ->Iterations(9)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(decode, bfloat16, at::kBFloat16)->Apply(decode_layouts);
BENCHMARK_CAPTURE(decode, float32, at::kFloat)->Apply(decode_layouts);
BENCHMARK_CAPTURE(decode_int8, bfloat16, at::kBFloat16)
    ->ArgName("keys")
    ->Arg(2000)
    ->Arg(8000)
    ->Iterations(15)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, bfloat16, at::kBFloat16)->Apply(prefill_lengths);
BENCHMARK_CAPTURE(prefill, float32, at::kFloat)->Apply(prefill_lengths);

}  // namespace
