// kvcache/model/routed_model.h - a model in two parts: lower layers that are
// the same for every text, upper ones that run with an adapter chosen by a
// router.
//
// T tokens of a step, one row, W numbers of a hidden state, S slots.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kvcache/cache.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

class Transformer;

enum class ModelPart : uint8_t {
  kLower,  // layers [0, split)
  kUpper   // layers [split, layers)
};

// What chooses the adapter of a text.
struct Router {
  int64_t layer = 0;  // reads the hidden states that enter it; at most split
  // It reads x / rms(x), summed over the tokens. Nothing else can be continued
  // from a checkpoint.
  bool normalised = true;
};

// Immutable: safe to share between threads, each with caches of its own.
class RoutedModel {
 public:
  virtual ~RoutedModel() = default;

  virtual int64_t layers() const noexcept = 0;
  virtual int64_t split() const noexcept = 0;
  virtual int64_t hidden_size() const noexcept = 0;  // W
  virtual int64_t vocab_size() const noexcept = 0;
  virtual int64_t context_length() const noexcept = 0;  // tokens
  virtual at::Device device() const noexcept = 0;
  // Empty: a text runs with the route that its request names, else 0.
  virtual std::optional<Router> router() const noexcept { return {}; }
  // Routes whose adapter is loaded, without 0, which is no adapter.
  virtual std::span<const int64_t> routes() const noexcept { return {}; }

  // Of one row; CacheSpec::first_layer is that of the part.
  virtual CacheSpec cache_spec(ModelPart part,
                               std::optional<int64_t> capacity) const = 0;

  // `ids` [1, T] int64 on the device -> what enters layer `split`, float32
  // [1, T, W]. Adds the router's features of the live tokens to `features` [W]
  // float32; undefined: there is no router. Does not commit. Reads no number of
  // the host, so that it can be recorded.
  virtual Tensor lower(const Tensor& ids, Step& step,
                       const Tensor& features) const = 0;
  // `hidden` [1, T, W] -> what leaves the last layer at `positions` [1, S]
  // int64, tokens counted from the first of the step, -1: none; float32
  // [1, S, W]. `slot`: [1] int64 on the device, which of routes() from 0 on;
  // undefined: no adapter.
  virtual Tensor upper(const Tensor& hidden, Step& step, const Tensor& slot,
                       const Tensor& positions) const = 0;
  // `hidden` [1, S, W] from upper(), `letters` [N] int64 on the device: the
  // head's logits of these tokens, float32 [1, S, N].
  virtual Tensor choices(const Tensor& hidden, const Tensor& letters) const = 0;
  // `features` [W]: the mean over all tokens of a text.
  virtual int64_t route(const Tensor& /*features*/) const { return 0; }
};

// features += x * rsqrt(mean(x^2) + eps) for x of each live token, `limits`
// [1, T] above 0. Token by token on the CPU: the sum of a text does not depend
// on where it was cut.
void add_router_features(const Tensor& hidden, const Tensor& limits, double eps,
                         const Tensor& features);

// Route n + 1 is the n-th of the model's adapters; there is no router, so that
// a request names its route, or runs without. split = layers / 2, or the first
// layer that an adapter changes if that is lower: the layers below serve all
// routes. Throws for less than two layers, and for an adapter that changes the
// lowest.
std::shared_ptr<const RoutedModel> make_routed(
    std::shared_ptr<const Transformer> model);

// Every text runs with that one adapter, in all layers; there are no routes.
// Its texts need a Namespace of their own.
std::shared_ptr<const RoutedModel> make_routed(
    std::shared_ptr<const Transformer> model, const std::string& adapter);

}  // namespace kvcache::model
