// routed_transformer.cpp - a transformer without adapters in two parts, and the
// router's features.
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "kvcache/model/routed_model.h"
#include "kvcache/model/transformer.h"

namespace kvcache::model {
namespace {

class RoutedTransformer final : public RoutedModel {
 public:
  explicit RoutedTransformer(std::shared_ptr<const Transformer> model)
      : model_(std::move(model)) {
    TORCH_CHECK_VALUE(model_, "[make_routed] the model must not be null.");
    TORCH_CHECK_VALUE(layers() >= 2,
                      "[make_routed] a model in two parts must have at least 2 "
                      "layers but has ",
                      layers(), ".");
  }

  int64_t layers() const noexcept override { return model_->config().layers; }
  int64_t split() const noexcept override { return layers() / 2; }
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
    return model_->forward(ids, step, {.last_layer = split()});
  }
  Tensor upper(const Tensor& hidden, Step& step, const Tensor& /*slot*/,
               const Tensor& positions) const override {
    return model_->forward(shape_of(hidden), step,
                           {.logit_positions = positions,
                            .first_layer = split(),
                            .hidden = hidden,
                            .return_hidden = true});
  }
  Tensor choices(const Tensor& hidden, const Tensor& letters) const override {
    return model_
        ->forward(
            shape_of(hidden),
            {.all_logits = true, .first_layer = layers(), .hidden = hidden})
        .index_select(2, letters);
  }

 private:
  // Ids that are not read.
  static Tensor shape_of(const Tensor& hidden) {
    return at::zeros({hidden.size(0), hidden.size(1)},
                     hidden.options().dtype(at::kLong));
  }

  std::shared_ptr<const Transformer> model_;
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
  return std::make_shared<RoutedTransformer>(std::move(model));
}

}  // namespace kvcache::model
