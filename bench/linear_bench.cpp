// bench/linear_bench.cpp - the linears of one forward of SmolLM2-135M.
//
// 30 layers and the head with random weights, as the forward calls them, at 1
// row (which oneDNN runs as two) to 512, in bytes of weights a second. Beside
// them plain reads of 512 MiB, which bound the small row counts.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <vector>

#include "src/model/forward/packed_linear.h"

namespace {

using kvcache::model::PackedLinear;

void read_memory(benchmark::State& state) {
  constexpr int64_t kWords = int64_t{64} << 20;
  const at::Tensor words = at::zeros({kWords}, at::TensorOptions(at::kLong));
  const int64_t* from = words.const_data_ptr<int64_t>();
  for (auto run : state) {
    at::parallel_for(0, kWords, 1 << 20, [&](int64_t first, int64_t last) {
      int64_t sums[8] = {};
      for (int64_t i = first; i + 8 <= last; i += 8) {
        __builtin_prefetch(from + i + 512);
        for (int j = 0; j < 8; ++j) sums[j] += from[i + j];
      }
      for (int64_t& sum : sums) benchmark::DoNotOptimize(sum);
    });
  }
  state.SetBytesProcessed(state.iterations() * kWords * 8);
}

std::vector<PackedLinear> smollm2_linears(at::ScalarType dtype) {
  std::vector<PackedLinear> linears;
  kvcache::model::TileArena arena;
  const auto add = [&](int64_t outputs, int64_t inputs) {
    linears.emplace_back(at::randn({outputs, inputs}).mul(0.05).to(dtype),
                         at::Tensor(), arena);
  };
  for (int layer = 0; layer < 30; ++layer) {
    add(960, 576);
    add(576, 576);
    add(3072, 576);
    add(576, 1536);
  }
  add(49152, 576);
  return linears;
}

void run_linears(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const std::vector<PackedLinear> linears = smollm2_linears(dtype);
  const at::Tensor narrow = at::randn({state.range(0), 576}).to(dtype);
  const at::Tensor wide = at::randn({state.range(0), 1536}).to(dtype);
  int64_t weights = 0;
  for (const PackedLinear& linear : linears) {
    weights += linear.inputs() * linear.outputs();
  }
  for (auto run : state) {
    for (const PackedLinear& linear : linears) {
      benchmark::DoNotOptimize(linear(linear.inputs() == 576 ? narrow : wide));
    }
  }
  state.SetBytesProcessed(state.iterations() * weights *
                          (dtype == at::kFloat ? 4 : 2));
}

BENCHMARK(read_memory)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(run_linears, bfloat16, at::kBFloat16)
    ->Arg(1)
    ->Arg(2)
    ->Arg(8)
    ->Arg(128)
    ->Arg(512)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(run_linears, float32, at::kFloat)
    ->Arg(1)
    ->Arg(2)
    ->Arg(8)
    ->Arg(128)
    ->Arg(512)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
