// Decode by recorded steps, from a forward of your own; docs/cuda-graphs.md
// explains it. Runs on the CPU, where a replay is the function run again, and
// with `graph_decode cuda` as real CUDA graphs if built with the CUDA target.
//
// One attention layer with random weights. The same prompt is continued by
// plain steps, by one replay per token, and by eight tokens per replay; all
// three must agree.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <iostream>
#include <string_view>
#include <vector>

#include "kvcache/attention.h"
#include "kvcache/graph_decoder.h"
#ifdef GRAPH_DECODE_CUDA
#include "kvcache/cuda_graphs.h"
#endif

using at::Tensor;

namespace {

constexpr int64_t kVocabulary = 64, kWidth = 32, kContext = 256;
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 8;

struct TinyModel {
  explicit TinyModel(at::Device on) : device(on) {
    const auto weight = [&](int64_t rows, double scale) {
      return (at::randn({rows, kWidth}) * scale).to(device);
    };
    embedding = weight(kVocabulary, 1);
    positions = weight(kContext, 1);
    q = weight(kHeads * kHeadDim, 0.2);
    k = weight(kKvHeads * kHeadDim, 0.2);
    v = weight(kKvHeads * kHeadDim, 0.2);
    out = weight(kWidth, 0.2);
  }

  // Tensors only: positions and views are on the device, so that a replay finds
  // its own numbers there. `ids` [1, T] -> logits [1, 1 or T, kVocabulary].
  Tensor forward(const Tensor& ids, kvcache::Step& step, bool all) const {
    Tensor x = at::embedding(embedding, ids) +
               at::embedding(positions, step.positions());
    const auto split = [&](const Tensor& weight, int64_t heads) {
      return at::linear(x, weight)
          .view({1, ids.size(1), heads, kHeadDim})
          .transpose(1, 2);
    };
    const kvcache::KvView& seen =
        step.update(0, split(k, kKvHeads), split(v, kKvHeads));
    const Tensor y = kvcache::attend(split(q, kHeads), seen);
    x = x + at::linear(y.transpose(1, 2).reshape({1, ids.size(1), -1}), out);
    return at::linear(all ? x : x.narrow(1, ids.size(1) - 1, 1), embedding);
  }

  kvcache::CacheSpec cache_spec() const {
    return {.rows = 1,
            .capacity = kContext,
            .dtype = at::kFloat,
            .device = device,
            .layers = {kvcache::AttentionLayer{.heads = kKvHeads,
                                               .head_dim = kHeadDim}}};
  }

  at::Device device;
  Tensor embedding, positions, q, k, v, out;
};

std::shared_ptr<kvcache::GraphBackend> backend_for(at::Device device) {
#ifdef GRAPH_DECODE_CUDA
  if (device.is_cuda()) return kvcache::cuda_graphs(device);
#else
  (void)device;
#endif
  return kvcache::eager_graphs();
}

// The prompt, then `count` greedy tokens, `per_replay` of them at a time.
std::vector<int64_t> continued(const TinyModel& model,
                               kvcache::GraphDecoderOptions options,
                               int64_t count) {
  kvcache::WindowCache cache(model.cache_spec(),
                             {.buckets = {16, 64, kContext}});
  const kvcache::GraphModel wrapped{
      .forward =
          [&](const Tensor& ids, kvcache::Step& step,
              const kvcache::GraphModel::Call& call) {
            return model.forward(ids, step, call.all_logits);
          },
      .context = kContext,
      .vocab_size = kVocabulary,
      .device = model.device};
  const int64_t per_replay = options.steps_per_replay;
  kvcache::GraphDecoder decoder(wrapped, cache, std::move(options));
  const Tensor prompt = at::arange(6).view({1, 6}).to(model.device);
  const Tensor logits = decoder.prefill(prompt, {.last_only = true});
  Tensor token = logits.argmax(-1);  // [1, 1], stays on the device
  std::vector<int64_t> tokens{token.item<int64_t>()};
  while (static_cast<int64_t>(tokens.size()) < count) {
    if (per_replay > 1) {
      const Tensor made = decoder.decode(token, per_replay).ids;
      const auto* ids = made.const_data_ptr<int64_t>();
      tokens.insert(tokens.end(), ids, ids + made.size(0));
      token = made.narrow(0, made.size(0) - 1, 1).to(model.device);
    } else {
      token = decoder.step(token).argmax(-1);
      tokens.push_back(token.item<int64_t>());
    }
  }
  const kvcache::GraphStatistics& by_step = decoder.statistics();
  const kvcache::GraphStatistics& many = decoder.decode_statistics();
  std::cout << per_replay << " a replay: " << by_step.captures + many.captures
            << " recordings, " << by_step.replays + many.replays
            << " replays, length " << cache.lengths()[0] << '\n';
  tokens.resize(static_cast<size_t>(count));
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  const at::NoGradGuard no_grad;
  const at::Device device = argc > 1 && std::string_view(argv[1]) == "cuda"
                                ? at::Device("cuda:0")
                                : at::Device("cpu");
  const TinyModel model(device);
  const auto plain = continued(model, {.backend = nullptr}, 97);
  const auto replayed = continued(model, {.backend = backend_for(device)}, 97);
  const auto many = continued(
      model, {.backend = backend_for(device), .steps_per_replay = 8}, 97);
  const bool same = plain == replayed && plain == many;
  std::cout << (same ? "ok      " : "FAILED  ")
            << "plain steps, replays and eight tokens a replay agree\n";
  return same ? 0 : 1;
}
