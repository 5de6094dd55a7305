// routed_transformer.cpp - a transformer in two parts, its adapters as routes,
// and the router's features.
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "adapter_choice.h"
#include "kvcache/model/routed_model.h"
#include "kvcache/model/transformer.h"

namespace kvcache::model {
namespace {

class RoutedTransformer final : public RoutedModel {
 public:
  // `always`: what every text runs with; none: the adapters are routes.
  RoutedTransformer(std::shared_ptr<const Transformer> model,
                    AdapterChoice always)
      : model_(std::move(model)),
        always_(always),
        split_(model_->config().layers / 2) {
    TORCH_CHECK_VALUE(layers() >= 2,
                      "[make_routed] a model in two parts must have at least 2 "
                      "layers but has ",
                      layers(), ".");
    if (always_.index < 0) add_routes();
  }

  int64_t layers() const noexcept override { return model_->config().layers; }
  int64_t split() const noexcept override { return split_; }
  std::span<const int64_t> routes() const noexcept override { return routes_; }
  int64_t hidden_size() const noexcept override {
    return model_->config().hidden_size;
  }
  int64_t vocab_size() const noexcept override { return model_->vocab_size(); }
  int64_t context_length() const noexcept override {
    return model_->context_length();
  }
  at::Device device() const noexcept override { return model_->device(); }
  CacheSpec cache_spec(ModelPart part,
                       std::optional<int64_t> capacity) const override {
    const bool lower = part == ModelPart::kLower;
    return model_->cache_spec(1, capacity, lower ? 0 : split(),
                              lower ? split() : layers());
  }

  Tensor lower(const Tensor& ids, Step& step,
               const Tensor& /*features*/) const override {
    return model_->forward(ids, step,
                           with_adapter({.last_layer = split()}, always_));
  }
  Tensor upper(const Tensor& hidden, Step& step, const Tensor& slot,
               const Tensor& positions) const override {
    ForwardOptions options = with_adapter({.logit_positions = positions,
                                           .first_layer = split(),
                                           .hidden = hidden,
                                           .return_hidden = true},
                                          always_);
    if (slot.defined()) options.adapters = slot;
    return model_->forward(shape_of(hidden), step, options);
  }
  Tensor choices(const Tensor& hidden, const Tensor& letters) const override {
    return model_->forward(shape_of(hidden), {.all_logits = true,
                                              .logit_ids = letters,
                                              .first_layer = layers(),
                                              .hidden = hidden});
  }

 private:
  void add_routes() {
    for (const AdapterInfo& adapter : model_->adapters()) {
      TORCH_CHECK_VALUE(
          adapter.first_layer > 0,
          "[make_routed] a route must leave layer 0 "
          "as it is but adapter ",
          adapter.name,
          " changes it; name the adapter that all texts run with.");
      split_ = std::min(split_, adapter.first_layer);
    }
    routes_.resize(model_->adapters().size());
    std::iota(routes_.begin(), routes_.end(), 1);
  }

  // Ids that are not read.
  static Tensor shape_of(const Tensor& hidden) {
    return at::zeros({hidden.size(0), hidden.size(1)},
                     hidden.options().dtype(at::kLong));
  }

  std::shared_ptr<const Transformer> model_;
  AdapterChoice always_;
  int64_t split_;
  std::vector<int64_t> routes_;
};

void add_in_order(const Tensor& hidden, const Tensor& limits, float eps,
                  const Tensor& features) {
  const Tensor rows = hidden.contiguous(), live = limits.contiguous();
  const int64_t tokens = hidden.size(1), width = hidden.size(2);
  const auto* row = rows.const_data_ptr<float>();
  auto* sum = features.data_ptr<float>();
  for (int64_t t = 0; t < tokens; ++t, row += width) {
    if (live.const_data_ptr<int64_t>()[t] <= 0) continue;
    float squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += row[i] * row[i];
    const float scale =
        1 / std::sqrt(squares / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; ++i) sum[i] += row[i] * scale;
  }
}

}  // namespace

void add_router_features(const Tensor& hidden, const Tensor& limits, double eps,
                         const Tensor& features) {
  TORCH_CHECK_VALUE(
      hidden.dim() == 3 && hidden.size(0) == 1 &&
          hidden.scalar_type() == at::kFloat && features.dim() == 1 &&
          features.size(0) == hidden.size(2) &&
          features.scalar_type() == at::kFloat && features.is_contiguous(),
      "[add_router_features] hidden must be [1, T, W] and features a dense "
      "[W], "
      "both of Float, but got ",
      hidden.sizes(), " and ", features.sizes(), ".");
  if (hidden.is_cpu()) {
    add_in_order(hidden, limits, static_cast<float>(eps), features);
    return;
  }
  const Tensor live =
      at::where(limits.gt(0).unsqueeze(2), hidden, at::zeros_like(hidden));
  const Tensor scale = at::rsqrt(live.pow(2).mean(-1, true).add(eps));
  features.add_(live.mul(scale).sum(1).squeeze(0));
}

std::shared_ptr<const RoutedModel> make_routed(
    std::shared_ptr<const Transformer> model) {
  TORCH_CHECK_VALUE(model, "[make_routed] the model must not be null.");
  return std::make_shared<RoutedTransformer>(std::move(model), AdapterChoice());
}

std::shared_ptr<const RoutedModel> make_routed(
    std::shared_ptr<const Transformer> model, const std::string& adapter) {
  TORCH_CHECK_VALUE(model, "[make_routed] the model must not be null.");
  const AdapterChoice always =
      choose_adapter("make_routed", *model, adapter, 0);
  TORCH_CHECK_VALUE(always.index >= 0,
                    "[make_routed] the adapter must be named but is empty.");
  return std::make_shared<RoutedTransformer>(std::move(model), always);
}

}  // namespace kvcache::model
