// cuda_graphs_test.cpp - recorded steps as CUDA graphs, where there is a GPU.

#include "kvcache/cuda_graphs.h"

#include <ATen/Context.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <thread>

#include "cuda/device.h"
#include "kvcache/model/graph_model.h"
#include "kvcache/model/transformer.h"
#include "kvcache/slot_graph_decoder.h"

namespace kvcache {
namespace {

using model::graph_model;
using model::Transformer;

constexpr const char* kModel = "tests/reference/data/llama";
const at::Device kGpu(at::kCUDA, 0);

TEST(CudaGraphs, RefusesWhatIsNoUsableGpu) {
  ASSERT_TRUE(at::Context::hasCUDART()) << "libtorch_cuda is not loaded";
  EXPECT_THROW(cuda_graphs(at::kCPU), c10::Error);
  EXPECT_THROW(cuda_graphs(at::Device(at::kCUDA, 100)), c10::Error);
}

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = cuda::unusable_reason(0)) {
      GTEST_SKIP() << "no usable GPU: " << *reason;
    }
    transformer = model::load_model(kModel, {.device = kGpu});
  }

  // Greedy tokens after `prompt`, on the host.
  std::vector<int64_t> decode(WindowCache& cache, GraphDecoderOptions options,
                              int64_t count) {
    const c10::InferenceMode inference;
    const int64_t steps = options.steps_per_replay;
    GraphDecoder decoder(graph_model(*transformer), cache, std::move(options));
    Tensor prompt = at::zeros({1, 5}, at::kLong);
    prompt.fill_(7);
    Tensor token = decoder.prefill(prompt, {.last_only = true}).argmax(-1);
    std::vector<int64_t> made{token.item<int64_t>()};
    while (static_cast<int64_t>(made.size()) < count) {
      if (steps == 1) {
        const Tensor logits = decoder.step(token);
        last_logits = logits.cpu();
        token = logits.argmax(-1);
        made.push_back(token.item<int64_t>());
        continue;
      }
      const Tensor ids = decoder.decode(token, steps).ids;
      for (int64_t i = 0; i < steps; ++i) {
        made.push_back(ids[i][0].item<int64_t>());
      }
      token = ids.narrow(0, steps - 1, 1).to(kGpu);
    }
    statistics =
        steps == 1 ? decoder.statistics() : decoder.decode_statistics();
    made.resize(static_cast<size_t>(count));
    return made;
  }

  std::shared_ptr<const Transformer> transformer;
  Tensor last_logits;
  GraphStatistics statistics;
};

// K16, K22: each replay is the eager twin's step, bit for bit, across buckets.
TEST_F(OnGpu, AReplayIsTheEagerStep) {
  constexpr int64_t kTokens = 81;
  for (const Windows windows : {Windows::kBuckets, Windows::kOne}) {
    const WindowOptions with{.windows = windows, .buckets = {16, 32, 96}};
    WindowCache eager(transformer->cache_spec(1, 96), with);
    WindowCache graph(transformer->cache_spec(1, 96), with);
    const auto wanted = decode(eager, {.backend = eager_graphs()}, kTokens);
    const Tensor logits = last_logits;
    EXPECT_EQ(decode(graph, {.backend = cuda_graphs(kGpu)}, kTokens), wanted);
    EXPECT_TRUE(last_logits.equal(logits));
    EXPECT_EQ(statistics.eager_runs, 0)
        << (statistics.failures.empty() ? "" : statistics.failures[0]);
    EXPECT_EQ(statistics.captures, windows == Windows::kOne ? 1 : 3);
    graph.reset();
    EXPECT_EQ(
        decode(graph, {.backend = cuda_graphs(kGpu), .steps_per_replay = 8},
               kTokens),
        wanted);
    EXPECT_EQ(statistics.eager_runs, 0);
  }
}

// K19: a graph is the first work of its thread on the GPU.
TEST_F(OnGpu, AGraphMayBeTheFirstWorkOfAThread) {
  std::exception_ptr failure;
  std::thread([&] {
    try {
      const c10::InferenceMode inference;
      WindowCache cache(transformer->cache_spec(1, 32));
      GraphDecoder decoder(graph_model(*transformer), cache,
                           {.backend = cuda_graphs(kGpu)});
      decoder.capture();
      EXPECT_EQ(cache.lengths()[0], 0);
      decoder.step(at::zeros({1, 1}, at::kLong));
      EXPECT_EQ(decoder.statistics().eager_runs, 0);
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

// Work that cannot be captured is reported, and goes on eagerly.
TEST_F(OnGpu, AFailedCaptureLeavesNothingBehind) {
  const c10::InferenceMode inference;
  WindowCache cache(transformer->cache_spec(1, 32));
  bool synchronising = true;
  StepGraph graph(cache,
                  [&](Step& step, int64_t) {
                    const Tensor ids = at::zeros(
                        {1, 1}, at::TensorOptions(at::kLong).device(kGpu));
                    const Tensor logits = transformer->forward(
                        ids, step, {.role = Role::kDecode});
                    if (synchronising) logits.sum().item<float>();
                  },
                  {.backend = cuda_graphs(kGpu)});
  graph.run({});
  EXPECT_EQ(cache.lengths()[0], 1);
  EXPECT_EQ(graph.statistics().eager_runs, 1);
  ASSERT_EQ(graph.statistics().failures.size(), 1U);
  EXPECT_EQ(cache.memory().graphs.used, 0U);
  synchronising = false;
  graph.clear();
  graph.run({});
  EXPECT_EQ(graph.statistics().replays, 1);
  EXPECT_EQ(cache.lengths()[0], 2);
}

// K28, K32: slots of other lengths beside each other, some of them free.
TEST_F(OnGpu, SlotsAreRowsAlone) {
  const c10::InferenceMode inference;
  SlotCache slots(transformer->cache_spec(4, 64), {.buckets = {16, 64}});
  SlotGraphDecoder recorded(graph_model(*transformer), slots,
                            {.backend = cuda_graphs(kGpu)});
  const auto fork = slots.fork();
  auto& twin = dynamic_cast<SlotCache&>(*fork);
  SlotGraphDecoder eager(graph_model(*transformer), twin);
  for (SlotCache* cache : {&slots, &twin}) {
    for (int64_t slot = 0; slot < 3; ++slot) {
      ASSERT_EQ(cache->acquire(), slot);
      Step step = cache->begin_step(
          {.tokens = 3 + 5 * slot, .first_row = slot, .rows = 1});
      transformer->forward(at::zeros({1, 3 + 5 * slot}, at::kLong), step, {});
      step.commit();
    }
    cache->release(1);
  }
  for (int i = 0; i < 30; ++i) {
    const Tensor tokens = at::zeros({4, 1}, at::kLong).fill_(i);
    ASSERT_TRUE(recorded.step(tokens).equal(eager.step(tokens))) << i;
  }
  EXPECT_EQ(recorded.statistics().eager_runs, 0);
}

}  // namespace
}  // namespace kvcache
