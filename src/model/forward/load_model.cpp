// src/model/forward/load_model.cpp - a model from its files, and its fit to a
// cache.
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <utility>

#include "kvcache/model/transformer.h"

namespace kvcache::model {
namespace {

std::string describe(const LayerSpec& layer) {
  const auto* attention = std::get_if<AttentionLayer>(&layer);
  if (attention == nullptr) return "a recurrent layer";
  return c10::str("attention with ", attention->heads,
                  " key/value heads of size ", attention->head_dim,
                  attention->sliding == 0
                      ? std::string()
                      : c10::str(" over the last ", attention->sliding));
}

bool packed(const LoadOptions& options) {
  return options.device.is_cpu() && options.forward != ForwardKind::kOps;
}

// Weights stay quantised if the file has them so and nobody asks for a dtype.
bool automatic_packing(const OpenedModel& opened, const LoadOptions& options) {
  return opened.quantised && !options.dtype && packed(options);
}

at::ScalarType automatic_dtype(const OpenedModel& opened) {
  const bool wide = !opened.quantised &&
                    (opened.dtype == at::kFloat || opened.dtype == at::kDouble);
  return wide ? at::kFloat : at::kBFloat16;
}

}  // namespace

void Transformer::check_cache(const CacheSpec& spec) const {
  const CacheSpec wanted = cache_spec(1, spec.capacity);
  constexpr const char* kRemedy = "; make the cache from cache_spec().";
  TORCH_CHECK_VALUE(spec.dtype == wanted.dtype,
                    "[Transformer::check_cache] the cache must hold ",
                    wanted.dtype, " but holds ", spec.dtype, kRemedy);
  TORCH_CHECK_VALUE(
      spec.conv_dtype.value_or(spec.dtype) ==
          wanted.conv_dtype.value_or(wanted.dtype),
      "[Transformer::check_cache] the cache must hold convolution inputs of ",
      wanted.conv_dtype.value_or(wanted.dtype), " but holds ",
      spec.conv_dtype.value_or(spec.dtype), kRemedy);
  TORCH_CHECK_VALUE(
      spec.first_layer == 0 && spec.layers.size() == wanted.layers.size(),
      "[Transformer::check_cache] the cache must have layers 0 to ",
      wanted.layers.size() - 1, " but has ", spec.layers.size(),
      " layers from ", spec.first_layer, " on", kRemedy);
  TORCH_CHECK_VALUE(spec.device == wanted.device,
                    "[Transformer::check_cache] the cache must be on ",
                    wanted.device, " like the model but is on ", spec.device,
                    kRemedy);
  for (size_t i = 0; i < wanted.layers.size(); ++i) {
    TORCH_CHECK_VALUE(spec.layers[i] == wanted.layers[i],
                      "[Transformer::check_cache] layer ", i, " must be ",
                      describe(wanted.layers[i]), " but the cache has ",
                      describe(spec.layers[i]), kRemedy);
  }
}

std::shared_ptr<const Transformer> load_model(const std::string& path,
                                              const LoadOptions& options) {
  OpenedModel opened = open_model(path, {.log = options.log});
  const std::shared_ptr<const WeightSource> weights = std::move(opened.weights);
  LoadOptions chosen = options;
  if (!chosen.packing) {
    chosen.packing = automatic_packing(opened, options) ? WeightPacking::kAuto
                                                        : WeightPacking::kNone;
  }
  if (*chosen.packing != WeightPacking::kNone) {
    return std::make_shared<const Transformer>(opened.config, weights, chosen);
  }
  if (!chosen.dtype) chosen.dtype = automatic_dtype(opened);
  auto model =
      std::make_shared<const Transformer>(opened.config, weights, chosen);
  if (options.dtype || !packed(options) || model->row_exact(Role::kDecode) ||
      model->dtype() == at::kFloat) {
    return model;
  }
  model.reset();
  chosen.dtype = at::kFloat;
  return std::make_shared<const Transformer>(opened.config, weights, chosen);
}

}  // namespace kvcache::model
