// toy_language_model.h - the contract suite's toy model, attention and
// recurrent layers alike, as a LanguageModel. What it says depends on every
// float of the states and keys that its cache holds.
#pragma once

#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "kvcache/concat_cache.h"
#include "kvcache/model/language_model.h"
#include "tests/support/toy_forward.h"

namespace kvcache::model {

class ToyLanguageModel final : public LanguageModel {
 public:
  // The embedding of this id is NaN, and so is all that comes after it.
  static constexpr int64_t kPoison = toy::kVocabulary - 1;

  // `says_exact`: what it says of itself; it is row-exact in any case.
  explicit ToyLanguageModel(toy::Variant variant, int64_t context = 64,
                            bool says_exact = true)
      : model_(toy::make_model(variant)),
        context_(context),
        says_exact_(says_exact) {
    for (int e = 0; e < toy::kWidth; ++e) {
      model_.embedding[static_cast<size_t>(kPoison * toy::kWidth + e)] =
          std::numeric_limits<float>::quiet_NaN();
    }
  }

  int64_t vocab_size() const noexcept override { return toy::kVocabulary; }
  int64_t context_length() const noexcept override { return context_; }
  std::span<const int64_t> end_tokens() const noexcept override { return {}; }
  CacheSpec cache_spec(int64_t rows,
                       std::optional<int64_t> capacity) const override {
    CacheSpec spec;
    spec.rows = rows;
    spec.capacity = capacity;
    spec.dtype = at::kFloat;
    spec.layers = model_.layers;
    return spec;
  }
  void check_cache(const CacheSpec& spec) const override {
    TORCH_CHECK_VALUE(spec.layers == model_.layers,
                      "[ToyLanguageModel::check_cache] layers differ.");
  }

  bool row_exact(Role) const noexcept override { return says_exact_; }
  bool roles_agree() const noexcept override { return says_exact_; }

  Tensor forward(const Tensor& ids, Step& step,
                 const ForwardOptions& options) const override {
    const int64_t rows = step.rows(), tokens = step.tokens();
    const auto* limits = step.limits().const_data_ptr<int64_t>();
    std::vector<int> live(static_cast<size_t>(rows * tokens), toy::kDead);
    for (int64_t i = 0; i < rows * tokens; ++i) {
      if (limits[i] > 0) {
        live[static_cast<size_t>(i)] =
            static_cast<int>(ids.const_data_ptr<int64_t>()[i]);
      }
    }
    const toy::Floats hidden = toy::forward(model_, step, live);
    Tensor logits = at::zeros(
        {rows, options.all_logits ? tokens : 1, toy::kVocabulary}, at::kFloat);
    auto* out = logits.mutable_data_ptr<float>();
    for (int64_t i = 0; i < rows * tokens; ++i) {
      const int64_t row = i / tokens, t = i % tokens;
      if (limits[row * tokens + t] <= 0) continue;
      const int64_t at = options.all_logits ? i : row;
      score(hidden.data() + i * toy::kWidth, out + at * toy::kVocabulary);
    }
    return logits;
  }
  Tensor forward(const Tensor& ids,
                 const ForwardOptions& options) const override {
    ConcatCache memory(cache_spec(ids.size(0), std::nullopt));
    Step step = memory.begin_step({.tokens = ids.size(1)});
    Tensor logits = forward(ids, step, options);
    step.commit();
    return logits;
  }

 private:
  void score(const float* hidden, float* logits) const {
    constexpr float kSharp = 8;  // so that texts are not all one token
    for (int id = 0; id < kPoison; ++id) {
      logits[id] = 0;  // what an earlier token of the row said
      for (int e = 0; e < toy::kWidth; ++e) {
        logits[id] +=
            kSharp * hidden[e] *
            model_.embedding[static_cast<size_t>(id * toy::kWidth + e)];
      }
    }
    logits[kPoison] = -1e4F;  // nobody samples it
  }

  toy::Model model_;
  int64_t context_;
  bool says_exact_;
};

}  // namespace kvcache::model
