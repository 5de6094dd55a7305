// src/model/packed/dense_tiles.h - dense weights in the order of their use, for
// CPUs on which oneDNN packs none, or not so that rows keep their bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "src/model/packed/tile_table.h"
#include "src/model/packed/tiles.h"

namespace kvcache::model {

// y = W x. Immutable.
class DenseTiles {
 public:
  // `weight` [N, K], float32 or bfloat16; not kept.
  DenseTiles(const Tensor& weight, TileArena& arena);
  explicit DenseTiles(const Tensor& weight);  // in memory of its own

  // Whether bfloat16 weights run on the CPU's matrix unit.
  static bool have_matrix_unit();

  // `x` [M, K] in the dtype of the weights, contiguous. Returns float32 sums
  // [M, N]. Row-exact, and of one order of additions at any M.
  Tensor operator()(const Tensor& x) const;
  // The same, and `bias` [N] float32 or undefined, rounded to the dtype of x.
  Tensor rounded(const Tensor& x, const Tensor& bias) const;

 private:
  Tensor pairs(const Tensor& x, const Tensor& bias, at::ScalarType dtype) const;
  static DenseMatrix shape_of(const Tensor& weight);
  static size_t bytes_of(const Tensor& weight);
  void write(const Tensor& weight, void* tiles);

  std::shared_ptr<const void> memory_;
  DenseMatrix matrix_;
  PairsKernel multiply_pairs_ = nullptr;  // matrix_.pairs
};

}  // namespace kvcache::model
