// bench/gated_delta_bench.cpp - linear attention between its two projections.
//
// One layer of Qwen3.5-0.8B: 16 key and 16 value heads of 128, convolution of
// 4 taps, bfloat16, a state of 1 MiB. Decode goes round 128 states, as the
// weights of a whole step would push them out of the caches, and beside it
// stands an out-of-place scale of the same states; prefill of 256 tokens stands
// beside the chunked form of the same rule by LibTorch's operators.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "src/model/forward/gated_delta.h"

namespace {

using at::Tensor;
using kvcache::StateView;
using kvcache::model::DeltaWeights;
using kvcache::model::GatedDeltaCore;
using kvcache::model::LinearAttentionConfig;
using kvcache::model::ModelConfig;

constexpr int64_t kHeads = 16, kDim = 128, kTaps = 4;
constexpr int64_t kStates = 128;
constexpr int64_t kChannels = 3 * kHeads * kDim;

GatedDeltaCore make_core() {
  ModelConfig config;
  config.linear_attention = LinearAttentionConfig{.key_heads = kHeads,
                                                  .value_heads = kHeads,
                                                  .key_head_dim = kDim,
                                                  .value_head_dim = kDim,
                                                  .conv_kernel = kTaps};
  return {config,
          DeltaWeights{at::randn({kChannels, kTaps}), at::rand({kHeads}).neg(),
                       at::randn({kHeads}), at::ones({kDim})}};
}

// The tokens of one row behind the states of one layer.
class Run {
 public:
  explicit Run(int64_t tokens, int64_t states)
      : core_(make_core()),
        numbers_(static_cast<size_t>(tokens)),
        limits_(static_cast<size_t>(tokens)),
        in_(at::randn({tokens, core_.inputs()}).to(at::kBFloat16)),
        out_(at::empty({tokens, core_.outputs()}, in_.options())),
        states_(at::zeros({2, states, kHeads, kDim, kDim})),
        conv_(at::zeros({2, 1, kChannels, kTaps - 1}, in_.options())) {
    std::iota(limits_.begin(), limits_.end(), 1);
  }
  void operator()(int64_t index) {
    core_.run(
        {1, static_cast<int64_t>(limits_.size()), numbers_, numbers_, limits_},
        in_,
        {conv_[0], conv_[1], states_[0].narrow(0, index, 1),
         states_[1].narrow(0, index, 1)},
        out_);
  }
  const Tensor& states() const { return states_; }

 private:
  GatedDeltaCore core_;
  std::vector<int64_t> numbers_, limits_;
  Tensor in_, out_, states_, conv_;
};

double microseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::micro> taken =
      std::chrono::steady_clock::now() - start;
  return taken.count();
}

// One token behind each of range(0) states, and a scale of a state out of
// place, in turn; the least of each, so that other processes matter little.
void decode(benchmark::State& state) {
  constexpr int64_t kAtOnce = 8;
  const c10::InferenceMode inference;
  const int64_t states = state.range(0);
  Run run(1, states);
  const Tensor factor = at::ones({}) * 1.5;
  const auto scale = [&](int64_t index) {
    Tensor to = run.states()[1][index];
    at::mul_out(to, run.states()[0][index], factor);
  };
  double fastest = 1e9, fastest_scale = 1e9;
  int64_t index = 0;
  const auto some = [&](auto& each) {
    const int64_t first = index;
    index = (index + kAtOnce) % states;
    return microseconds([&] {
             for (int64_t i = 0; i < kAtOnce; ++i) each((first + i) % states);
           }) /
           kAtOnce;
  };
  for (auto each : state) {
    fastest = std::min(fastest, some(run));
    fastest_scale = std::min(fastest_scale, some(scale));
  }
  state.counters["us"] = fastest;
  state.counters["scale_us"] = fastest_scale;
  state.counters["of_scale"] = fastest_scale / fastest;
}
BENCHMARK(decode)->Arg(kStates)->Arg(24)->Arg(1)->UseRealTime();

void prefill(benchmark::State& state) {
  const c10::InferenceMode inference;
  Run run(state.range(0), 1);
  for (auto each : state) run(0);
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(prefill)->Arg(16)->Arg(64)->Arg(256)->Arg(1024)->UseRealTime();

// The chunked form: see section "chunkwise" of Gated Delta Networks (arXiv
// 2412.06464). q, k, v [H, T, D] normed, g [H, T] log decay, beta [H, T]; T a
// multiple of `chunk`.
Tensor chunked(const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& g, const Tensor& beta, Tensor state,
               int64_t chunk) {
  const Tensor below = at::ones({chunk, chunk}, at::kBool).tril();
  const Tensor strictly_below = below.tril(-1);
  std::vector<Tensor> outputs;
  for (int64_t first = 0; first < q.size(1); first += chunk) {
    const auto part = [&](const Tensor& x) {
      return x.narrow(1, first, chunk);
    };
    const Tensor total = part(g).cumsum(1);  // [H, C]
    const Tensor decay =
        (total.unsqueeze(2) - total.unsqueeze(1))
            .masked_fill(below.logical_not(),
                         -std::numeric_limits<double>::infinity())
            .exp();
    const Tensor rate = part(beta).unsqueeze(2);
    const Tensor kept = total.exp().unsqueeze(2);
    const Tensor scaled = part(k) * rate;
    const Tensor mix =
        scaled.matmul(part(k).transpose(1, 2)) * decay * strictly_below;
    const auto solve = [&](const Tensor& right) {
      return at::linalg_solve_triangular(mix, right, /*upper=*/false,
                                         /*left=*/true, /*unitriangular=*/true);
    };
    const Tensor fresh =
        solve(part(v) * rate) - solve(scaled * kept).matmul(state);
    outputs.push_back(
        (part(q) * kept).matmul(state) +
        (part(q).matmul(part(k).transpose(1, 2)) * decay).matmul(fresh));
    const Tensor last = total.narrow(1, chunk - 1, 1);
    state = state * last.exp().unsqueeze(2) +
            (part(k) * (last - total).exp().unsqueeze(2))
                .transpose(1, 2)
                .matmul(fresh);
  }
  return outputs.back();
}

void chunked_by_operators(benchmark::State& state) {
  const c10::InferenceMode inference;
  const int64_t tokens = state.range(0);
  const auto unit = [&] {
    const Tensor x = at::randn({kHeads, tokens, kDim});
    return x / x.norm(2, -1, true);
  };
  const Tensor q = unit(), k = unit(), v = at::randn({kHeads, tokens, kDim});
  const Tensor g = at::rand({kHeads, tokens}).neg();
  const Tensor beta = at::rand({kHeads, tokens});
  const Tensor zero = at::zeros({kHeads, kDim, kDim});
  for (auto each : state) {
    benchmark::DoNotOptimize(chunked(q, k, v, g, beta, zero, state.range(1)));
  }
  state.SetItemsProcessed(state.iterations() * tokens);
}
BENCHMARK(chunked_by_operators)
    ->Args({256, 16})
    ->Args({256, 32})
    ->Args({256, 64})
    ->Args({1024, 32})
    ->UseRealTime();

}  // namespace
