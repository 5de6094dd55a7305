// src/model/packed/dense_tiles.cpp - dense weights, 16 outputs side by side.
#include "src/model/packed/dense_tiles.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "src/model/packed/tile_kernels.h"

namespace kvcache::model {
namespace {

// Multiplications that make a thread worth waking.
constexpr int64_t kWorkOfThread = 64 * 1024;

template <typename W>
void write_tiles(const DenseMatrix& shape, const W* weight, W* tiles) {
  const int64_t inputs = shape.inputs;
  at::parallel_for(0, shape.blocks(), 1, [&](int64_t first, int64_t last) {
    const int64_t end = std::min(shape.outputs, last * kTileOutputs);
    for (int64_t n = first * kTileOutputs; n < end; ++n) {
      W* to =
          tiles + n / kTileOutputs * kTileOutputs * inputs + n % kTileOutputs;
      for (int64_t k = 0; k < inputs; ++k) {
        to[k * kTileOutputs] = weight[n * inputs + k];
      }
    }
  });
}

// [N / 16, K / 2, 16, 2].
void write_pairs(const DenseMatrix& shape, const uint16_t* weight,
                 uint16_t* tiles) {
  const int64_t padded = shape.padded_inputs();
  at::parallel_for(0, shape.blocks(), 1, [&](int64_t first, int64_t last) {
    const int64_t end = std::min(shape.outputs, last * kTileOutputs);
    for (int64_t n = first * kTileOutputs; n < end; ++n) {
      uint16_t* to = tiles + n / kTileOutputs * kTileOutputs * padded +
                     n % kTileOutputs * 2;
      for (int64_t k = 0; k < shape.inputs; ++k) {
        to[k / 2 * 2 * kTileOutputs + k % 2] = weight[n * shape.inputs + k];
      }
    }
  });
}

// Blocks of outputs that make a thread worth waking.
int64_t grain_of(const DenseMatrix& shape, int64_t rows) {
  const int64_t work = rows * shape.inputs * kTileOutputs;
  return std::max<int64_t>(1, kWorkOfThread / std::max<int64_t>(1, work));
}

}  // namespace

bool DenseTiles::have_matrix_unit() {
  return tile_kernels().multiply_pairs != nullptr;
}

DenseMatrix DenseTiles::shape_of(const Tensor& weight) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat ||
                       weight.scalar_type() == at::kBFloat16,
                   "[DenseTiles] weight must be float32 or bfloat16 but got ",
                   weight.scalar_type(), ".");
  DenseMatrix shape;
  shape.outputs = weight.size(0);
  shape.inputs = weight.size(1);
  shape.bfloat16 = weight.scalar_type() == at::kBFloat16;
  shape.pairs = shape.bfloat16 && have_matrix_unit();
  return shape;
}

size_t DenseTiles::bytes_of(const Tensor& weight) {
  const DenseMatrix shape = shape_of(weight);
  return static_cast<size_t>(shape.blocks() * kTileOutputs *
                             shape.padded_inputs()) *
         weight.element_size();
}

DenseTiles::DenseTiles(const Tensor& weight, TileArena& arena) {
  const TileArena::Piece piece = arena.take(bytes_of(weight));
  memory_ = piece.memory;
  write(weight, piece.data);
}

DenseTiles::DenseTiles(const Tensor& weight) {
  const auto bytes = static_cast<int64_t>(bytes_of(weight));
  const Tensor memory = at::zeros({bytes}, at::TensorOptions(at::kByte));
  memory_ = std::make_shared<const Tensor>(memory);
  write(weight, memory.data_ptr());
}

void DenseTiles::write(const Tensor& weight, void* tiles) {
  matrix_ = shape_of(weight);
  matrix_.weights = tiles;
  const Tensor rows = weight.contiguous();
  if (matrix_.pairs) {
    multiply_pairs_ = tile_kernels().multiply_pairs;
    write_pairs(matrix_, static_cast<const uint16_t*>(rows.const_data_ptr()),
                static_cast<uint16_t*>(tiles));
  } else if (matrix_.bfloat16) {
    write_tiles(matrix_, static_cast<const uint16_t*>(rows.const_data_ptr()),
                static_cast<uint16_t*>(tiles));
  } else {
    write_tiles(matrix_, rows.const_data_ptr<float>(),
                static_cast<float*>(tiles));
  }
}

Tensor DenseTiles::pairs(const Tensor& x, const Tensor& bias,
                         at::ScalarType dtype) const {
  PairRows rows;
  rows.x = static_cast<const uint16_t*>(x.const_data_ptr());
  rows.rows = x.size(0);
  rows.inputs = matrix_.inputs;
  if (bias.defined()) rows.bias = bias.const_data_ptr<float>();
  Tensor out =
      at::empty({rows.rows, matrix_.outputs}, x.options().dtype(dtype));
  if (dtype == at::kFloat) {
    rows.sums = out.mutable_data_ptr<float>();
  } else {
    rows.rounded = static_cast<uint16_t*>(out.mutable_data_ptr());
  }
  at::parallel_for(0, matrix_.blocks(), grain_of(matrix_, rows.rows),
                   [&](int64_t first, int64_t last) {
                     multiply_pairs_(matrix_, rows, first, last);
                   });
  return out;
}

Tensor DenseTiles::operator()(const Tensor& x) const {
  if (matrix_.pairs) return pairs(x.contiguous(), {}, at::kFloat);
  const int64_t rows = x.size(0);
  const Tensor wide = x.to(at::kFloat).contiguous();
  Tensor out = at::empty({rows, matrix_.outputs}, wide.options());
  const auto* from = wide.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  const auto multiply = tile_kernels().multiply_dense;
  at::parallel_for(0, matrix_.blocks(), grain_of(matrix_, rows),
                   [&](int64_t first, int64_t last) {
                     multiply(matrix_, from, rows, to, first, last);
                   });
  return out;
}

Tensor DenseTiles::rounded(const Tensor& x, const Tensor& bias) const {
  if (matrix_.pairs) return pairs(x.contiguous(), bias, x.scalar_type());
  Tensor sums = (*this)(x);
  if (bias.defined()) sums.add_(bias);
  return sums.to(x.scalar_type());
}

}  // namespace kvcache::model
