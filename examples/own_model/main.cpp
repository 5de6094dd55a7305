// A forward of your own over any kvcache cache; needs LibTorch only.
//
// Two attention layers with random weights. The forward sees a Step and never
// learns which cache is behind it; main() runs the same tokens through two
// kinds, takes a step back, forks, and checks that every bit agrees.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <iostream>
#include <vector>

#include "kvcache/attention.h"
#include "kvcache/concat_cache.h"
#include "kvcache/preallocated_cache.h"

using at::Tensor;

namespace {

constexpr int64_t kVocabulary = 32, kWidth = 32;
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 8;

struct Layer {
  Tensor q, k, v, out;  // [rows out, kWidth]
};

class TinyModel {
 public:
  explicit TinyModel(int64_t layers) {
    embedding_ = at::randn({kVocabulary, kWidth});
    for (int64_t i = 0; i < layers; ++i) {
      layers_.push_back({at::randn({kHeads * kHeadDim, kWidth}) * 0.2,
                         at::randn({kKvHeads * kHeadDim, kWidth}) * 0.2,
                         at::randn({kKvHeads * kHeadDim, kWidth}) * 0.2,
                         at::randn({kWidth, kHeads * kHeadDim}) * 0.2});
    }
  }

  // What a cache must hold for this model.
  kvcache::CacheSpec cache_spec(int64_t capacity) const {
    return {.rows = 1,
            .capacity = capacity,
            .dtype = at::kFloat,
            .layers = std::vector<kvcache::LayerSpec>(
                layers_.size(), kvcache::AttentionLayer{.heads = kKvHeads,
                                                        .head_dim = kHeadDim})};
  }

  // `ids` [1, T] -> logits [1, T, kVocabulary].
  Tensor forward(const Tensor& ids, kvcache::Step& step) const {
    const int64_t tokens = ids.size(1);
    Tensor x = at::embedding(embedding_, ids);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const auto split = [&](const Tensor& weight, int64_t heads) {
        return at::linear(x, weight)
            .view({1, tokens, heads, kHeadDim})
            .transpose(1, 2);
      };
      const kvcache::KvView& seen =
          step.update(static_cast<int64_t>(i), split(layer.k, kKvHeads),
                      split(layer.v, kKvHeads));
      const Tensor y = kvcache::attend(split(layer.q, kHeads), seen);
      x = x + at::linear(y.transpose(1, 2).reshape({1, tokens, -1}), layer.out);
    }
    return at::linear(x, embedding_);
  }

 private:
  Tensor embedding_;
  std::vector<Layer> layers_;
};

// Greedy continuation of what `cache` holds, `first` fed next.
std::vector<int64_t> continue_from(const TinyModel& model,
                                   kvcache::Cache& cache, int64_t first,
                                   int count) {
  std::vector<int64_t> tokens{first};
  for (int i = 0; i < count; ++i) {
    kvcache::Step step = cache.begin_step();
    const Tensor ids = at::empty({1, 1}, at::kLong).fill_(tokens.back());
    const Tensor logits = model.forward(ids, step);
    step.commit();  // from here on the token is part of the cache
    tokens.push_back(logits.argmax(-1).item<int64_t>());
  }
  return tokens;
}

bool check(bool holds, const char* what) {
  std::cout << (holds ? "ok      " : "FAILED  ") << what << '\n';
  return holds;
}

}  // namespace

int main() {
  const at::NoGradGuard no_grad;
  const TinyModel model(2);
  kvcache::ConcatCache concat(model.cache_spec(64));
  kvcache::PreallocatedCache in_place(model.cache_spec(64));

  const Tensor prompt = at::arange(6).view({1, 6});
  for (kvcache::Cache* cache : {static_cast<kvcache::Cache*>(&concat),
                                static_cast<kvcache::Cache*>(&in_place)}) {
    kvcache::Step step = cache->begin_step({.tokens = 6});
    model.forward(prompt, step);
    step.commit();
  }
  const auto fork = in_place.fork();

  const auto first = continue_from(model, concat, 7, 12);
  const auto second = continue_from(model, in_place, 7, 12);
  const auto third = continue_from(model, *fork, 7, 12);
  in_place.truncate(6);  // back to the prompt, as if nothing had followed
  const auto again = continue_from(model, in_place, 7, 12);

  std::cout << concat.describe() << '\n' << in_place.describe() << '\n';
  bool all = check(first == second, "concat and preallocated agree");
  all = check(second == third, "a fork continues as its source") && all;
  all = check(second == again, "a truncated cache continues as before") && all;
  return all ? 0 : 1;
}
