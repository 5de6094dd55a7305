// toy_routed_model.h - the contract suite's toy layers in two parts: a router
// between the lower ones, and upper ones that differ by route.
#pragma once

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <vector>

#include "kvcache/model/routed_model.h"
#include "tests/support/toy_forward.h"
#include "tests/support/toy_oracle.h"

namespace kvcache::model {

struct ToyRouted {
  std::vector<int64_t> routes = {1, 2};  // loaded
  bool has_router = true;
  Router router = {.layer = 1};
  bool hybrid = true;
};

class ToyRoutedModel final : public RoutedModel {
 public:
  static constexpr int64_t kSplit = 2, kLayers = 4, kRoutes = 3;
  static constexpr double kEps = 1e-6;

  explicit ToyRoutedModel(const ToyRouted& with = {}) : with_(with) {
    const auto kind =
        with.hybrid ? toy::Variant::kHybrid : toy::Variant::kAttention;
    auto layers = toy::layers_of(kind);
    if (!with.hybrid) layers = {layers[0], layers[0], layers[0], layers[0]};
    for (int64_t route = 0; route < kRoutes; ++route) {
      whole_.push_back(toy::make_model(layers, 1));
      const toy::Model other =
          toy::make_model(layers, static_cast<unsigned>(10 + route));
      for (size_t i = kSplit; i < kLayers; ++i) {
        whole_.back().weights[i] = other.weights[i];
      }
    }
  }

  int64_t layers() const noexcept override { return kLayers; }
  int64_t split() const noexcept override { return kSplit; }
  int64_t hidden_size() const noexcept override { return toy::kWidth; }
  int64_t vocab_size() const noexcept override { return toy::kVocabulary; }
  int64_t context_length() const noexcept override { return 200; }
  at::Device device() const noexcept override { return at::kCPU; }
  std::optional<Router> router() const noexcept override {
    return with_.has_router ? std::optional(with_.router) : std::nullopt;
  }
  std::span<const int64_t> routes() const noexcept override {
    return with_.routes;
  }
  CacheSpec cache_spec(ModelPart part,
                       std::optional<int64_t> capacity) const override {
    const toy::Model of = part == ModelPart::kLower ? slice(0, 0, kSplit)
                                                    : slice(0, kSplit, kLayers);
    CacheSpec spec;
    spec.capacity = capacity;
    spec.dtype = at::kFloat;
    spec.first_layer = of.first_layer;
    spec.layers = of.layers;
    return spec;
  }

  Tensor lower(const Tensor& ids, Step& step,
               const Tensor& features) const override {
    ++lower_calls;
    fail_if_planned();
    const auto* limits = step.limits().const_data_ptr<int64_t>();
    std::vector<int> live;
    for (int64_t t = 0; t < step.tokens(); ++t) {
      live.push_back(limits[t] > 0
                         ? static_cast<int>(ids.const_data_ptr<int64_t>()[t])
                         : toy::kDead);
    }
    const int64_t read = with_.router.layer;
    const toy::Floats below = toy::forward(slice(0, 0, read), step, live);
    if (features.defined()) {
      add_router_features(tensor_of(below), step.limits(), kEps, features);
    }
    return tensor_of(toy::forward(slice(0, read, kSplit), step, live,
                                  {.hidden = below.data()}));
  }
  Tensor upper(const Tensor& hidden, Step& step, const Tensor& slot,
               const Tensor& positions) const override {
    ++upper_calls;
    fail_if_planned();
    const int64_t route =
        slot.defined() ? with_.routes[static_cast<size_t>(slot.item<int64_t>())]
                       : 0;
    const Tensor dense = hidden.contiguous();
    const std::vector<int> none(static_cast<size_t>(step.tokens()));
    const Tensor all =
        tensor_of(toy::forward(slice(route, kSplit, kLayers), step, none,
                               {.hidden = dense.const_data_ptr<float>()}));
    Tensor chosen = at::zeros({1, positions.size(1), toy::kWidth}, at::kFloat);
    for (int64_t i = 0; i < positions.size(1); ++i) {
      const int64_t at = positions.const_data_ptr<int64_t>()[i];
      if (at >= 0) chosen.select(1, i).copy_(all.select(1, at));
    }
    return chosen;
  }
  Tensor choices(const Tensor& hidden, const Tensor& letters) const override {
    Tensor logits = at::zeros({1, hidden.size(1), letters.size(0)}, at::kFloat);
    const Tensor dense = hidden.contiguous();
    for (int64_t i = 0; i < logits.numel(); ++i) {
      const float* row =
          dense.const_data_ptr<float>() + i / letters.size(0) * toy::kWidth;
      logits.mutable_data_ptr<float>()[i] =
          logit(row, letters.const_data_ptr<int64_t>()[i % letters.size(0)]);
    }
    return logits;
  }
  int64_t route(const Tensor& features) const override {
    return route_of(features.const_data_ptr<float>());
  }

  // What a request gives without any memory.
  struct Answer {
    int64_t route = 0;
    std::vector<std::vector<float>> probabilities = {};
  };
  Answer stateless(const std::vector<int64_t>& ids,
                   const std::vector<int64_t>& slots,
                   const std::vector<int64_t>& counts,
                   const std::vector<int64_t>& letters,
                   std::optional<int64_t> pinned = {}) const {
    const std::vector<int> tokens(ids.begin(), ids.end());
    Answer answer{.route = pinned.value_or(
                      with_.has_router ? stateless_route(tokens) : 0)};
    const toy::Floats hidden =
        toy::oracle(whole_[static_cast<size_t>(answer.route)], tokens).hidden;
    for (size_t i = 0; i < slots.size(); ++i) {
      std::vector<float> values;
      for (int64_t j = 0; j < counts[i]; ++j) {
        values.push_back(logit(hidden.data() + slots[i] * toy::kWidth,
                               letters[static_cast<size_t>(j)]));
      }
      const float most = *std::max_element(values.begin(), values.end());
      float sum = 0;
      for (float& value : values) sum += value = std::exp(value - most);
      for (float& value : values) value /= sum;
      answer.probabilities.push_back(values);
    }
    return answer;
  }

  mutable int lower_calls = 0, upper_calls = 0;
  mutable int fail_after = -1;  // n: n more calls succeed, the next throws

 private:
  toy::Model slice(int64_t route, int64_t first, int64_t last) const {
    const toy::Model& of = whole_[static_cast<size_t>(route)];
    return {.layers = {of.layers.begin() + first, of.layers.begin() + last},
            .first_layer = first,
            .embedding = of.embedding,
            .weights = {of.weights.begin() + first, of.weights.begin() + last}};
  }
  void fail_if_planned() const {
    TORCH_CHECK(fail_after < 0 || fail_after-- > 0,
                "[ToyRoutedModel] failed, as planned.");
  }
  static Tensor tensor_of(const toy::Floats& hidden) {
    const auto tokens = static_cast<int64_t>(hidden.size()) / toy::kWidth;
    Tensor made = at::zeros({1, tokens, toy::kWidth}, at::kFloat);
    std::copy(hidden.begin(), hidden.end(), made.mutable_data_ptr<float>());
    return made;
  }
  float logit(const float* hidden, int64_t id) const {
    float sum = 0;
    for (int e = 0; e < toy::kWidth; ++e) {
      sum += 8 * hidden[e] *
             whole_[0].embedding[static_cast<size_t>(id * toy::kWidth + e)];
    }
    return sum;
  }
  // Hangs on small differences, so that a suffix decides and no bit is lost.
  static int64_t route_of(const float* mean) {
    float score = 0;
    for (int e = 0; e < toy::kWidth; ++e) {
      score += mean[e] * std::sin(static_cast<float>(3 * e + 1));
    }
    const auto fine = static_cast<int64_t>(std::floor(score * 1000));
    return (fine % kRoutes + kRoutes) % kRoutes;
  }
  int64_t stateless_route(const std::vector<int>& tokens) const {
    const toy::Floats below =
        toy::oracle(slice(0, 0, with_.router.layer), tokens).hidden;
    toy::Floats sum(toy::kWidth);
    for (size_t t = 0; t < tokens.size(); ++t) {
      const float* x = below.data() + t * toy::kWidth;
      float squares = 0;
      for (int e = 0; e < toy::kWidth; ++e) squares += x[e] * x[e];
      const float scale =
          1 / std::sqrt(squares / toy::kWidth + static_cast<float>(kEps));
      for (int e = 0; e < toy::kWidth; ++e) sum[e] += x[e] * scale;
    }
    for (float& value : sum) value /= static_cast<float>(tokens.size());
    return route_of(sum.data());
  }

  ToyRouted with_;
  std::vector<toy::Model> whole_;  // [route]
};

}  // namespace kvcache::model
