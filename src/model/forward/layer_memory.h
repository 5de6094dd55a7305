// src/model/forward/layer_memory.h - where the blocks keep what layers
// remember.
//
// The seam between the blocks and a cache's Step; the stateless forward puts
// fresh tensors behind the same call.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "kvcache/cache.h"

namespace kvcache::model {

class LayerMemory {
 public:
  LayerMemory() = default;
  LayerMemory(const LayerMemory&) = delete;
  LayerMemory& operator=(const LayerMemory&) = delete;
  virtual ~LayerMemory() = default;

  // Stores `k`, `v` [B, H, T, D] of the new tokens; returns what to attend to,
  // good until the next call.
  virtual const KvView& update(int64_t layer, const Tensor& k,
                               const Tensor& v) = 0;
  // Of a recurrent layer, as Step says; the caller writes next_conv itself or
  // calls extend_conv().
  virtual const StateView& state(int64_t layer) = 0;
  virtual Tensor extend_conv(int64_t layer, const Tensor& x) = 0;
  // As Step::state_window(): null unless the states after each token are
  // wanted.
  virtual const StateWindow* state_window(int64_t layer) = 0;
};

// A cache's.
class StepMemory final : public LayerMemory {
 public:
  explicit StepMemory(Step& step) : step_(step) {}
  const KvView& update(int64_t layer, const Tensor& k,
                       const Tensor& v) override {
    return step_.update(layer, k, v);
  }
  const StateView& state(int64_t layer) override { return step_.state(layer); }
  Tensor extend_conv(int64_t layer, const Tensor& x) override {
    return step_.extend_conv(layer, x);
  }
  const StateWindow* state_window(int64_t layer) override {
    return step_.state_window(layer);
  }

 private:
  Step& step_;
};

// None: the tokens of the step are all there is, at positions from 0.
class NoMemory final : public LayerMemory {
 public:
  // `limits` [B, T] int64: index + 1. `spec`: layers, dtype and device.
  NoMemory(const Tensor& limits, CacheSpec spec) : spec_(std::move(spec)) {
    view_.limits = limits;
    view_.cells = limits.sub(1);
    view_.window = limits.size(1);
    view_.uniform = true;
  }
  const KvView& update(int64_t layer, const Tensor& k,
                       const Tensor& v) override {
    view_.k = k;
    view_.v = v;
    view_.sliding = spec_of<AttentionLayer>(layer).sliding;
    return view_;
  }
  const StateView& state(int64_t layer) override {
    // Layers of a model are alike: zeros serve all of them.
    const auto& of = spec_of<RecurrentLayer>(layer);
    std::vector<int64_t> shape = {view_.limits.size(0)};
    shape.insert(shape.end(), of.state_shape.begin(), of.state_shape.end());
    renew(state_.state, state_.next_state, shape, at::kFloat);
    renew(state_.conv, state_.next_conv,
          {shape[0], of.conv_channels, of.conv_taps},
          spec_.conv_dtype.value_or(spec_.dtype));
    return state_;
  }
  Tensor extend_conv(int64_t layer, const Tensor& x) override {
    const int64_t taps = spec_of<RecurrentLayer>(layer).conv_taps;
    return at::cat({at::zeros({x.size(0), x.size(1), taps}, x.options()), x},
                   2);
  }
  const StateWindow* state_window(int64_t) override { return nullptr; }

 private:
  template <typename Layer>
  const Layer& spec_of(int64_t layer) const {
    return std::get<Layer>(spec_.layers[static_cast<size_t>(layer)]);
  }
  void renew(Tensor& now, Tensor& next, const std::vector<int64_t>& shape,
             at::ScalarType dtype) const {
    if (now.defined() && now.sizes() == at::IntArrayRef(shape)) return;
    now = at::zeros(shape, at::TensorOptions(dtype).device(spec_.device));
    next = at::empty_like(now);
  }

  CacheSpec spec_;
  KvView view_;
  StateView state_;
};

}  // namespace kvcache::model
