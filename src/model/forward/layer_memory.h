// src/model/forward/layer_memory.h - where the blocks keep what layers
// remember.
//
// The seam between the blocks and a cache's Step; the stateless forward puts
// fresh tensors behind the same call.
#pragma once

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
};

// A cache's.
class StepMemory final : public LayerMemory {
 public:
  explicit StepMemory(Step& step) : step_(step) {}
  const KvView& update(int64_t layer, const Tensor& k,
                       const Tensor& v) override {
    return step_.update(layer, k, v);
  }

 private:
  Step& step_;
};

// None: the tokens of the step are all there is, at positions from 0.
class NoMemory final : public LayerMemory {
 public:
  // `limits` [B, T] int64: index + 1. `sliding` [layers]: see KvView::sliding.
  NoMemory(const Tensor& limits, std::vector<int64_t> sliding)
      : sliding_(std::move(sliding)) {
    view_.limits = limits;
    view_.cells = limits.sub(1);
    view_.window = limits.size(1);
    view_.uniform = true;
  }
  const KvView& update(int64_t layer, const Tensor& k,
                       const Tensor& v) override {
    view_.k = k;
    view_.v = v;
    view_.sliding = sliding_[static_cast<size_t>(layer)];
    return view_;
  }

 private:
  std::vector<int64_t> sliding_;
  KvView view_;
};

}  // namespace kvcache::model
