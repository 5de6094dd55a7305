// src/model/forward/linear.h - a linear of the packed decoder: of dense weights
// or of quantised ones.
#pragma once

#include <memory>
#include <utility>

#include "src/model/forward/packed_linear.h"
#include "src/model/packed/tiles.h"

namespace kvcache::model {

// Cheap to copy: copies share the weights.
class Linear {
 public:
  Linear() = default;
  explicit Linear(PackedLinear dense)
      : dense_(std::make_shared<const PackedLinear>(std::move(dense))) {}
  explicit Linear(TiledLinear tiles)
      : tiles_(std::make_shared<const TiledLinear>(std::move(tiles))) {}

  // `x` [M, K], contiguous, in the dtype of activations. Returns a new [M, N].
  Tensor operator()(const Tensor& x) const {
    return tiles_ ? (*tiles_)(x) : (*dense_)(x);
  }

  // nullptr: of dense weights.
  const TiledLinear* tiles() const { return tiles_.get(); }

 private:
  std::shared_ptr<const PackedLinear> dense_;
  std::shared_ptr<const TiledLinear> tiles_;
};

}  // namespace kvcache::model
