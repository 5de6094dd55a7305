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

}  // namespace

DenseMatrix DenseTiles::shape_of(const Tensor& weight) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat ||
                       weight.scalar_type() == at::kBFloat16,
                   "[DenseTiles] weight must be float32 or bfloat16 but got ",
                   weight.scalar_type(), ".");
  DenseMatrix shape;
  shape.outputs = weight.size(0);
  shape.inputs = weight.size(1);
  shape.bfloat16 = weight.scalar_type() == at::kBFloat16;
  return shape;
}

size_t DenseTiles::bytes_of(const Tensor& weight) {
  const DenseMatrix shape = shape_of(weight);
  return static_cast<size_t>(shape.blocks() * kTileOutputs * shape.inputs) *
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
  if (matrix_.bfloat16) {
    write_tiles(matrix_, static_cast<const uint16_t*>(rows.const_data_ptr()),
                static_cast<uint16_t*>(tiles));
  } else {
    write_tiles(matrix_, rows.const_data_ptr<float>(),
                static_cast<float*>(tiles));
  }
}

Tensor DenseTiles::operator()(const Tensor& x) const {
  const int64_t rows = x.size(0);
  const Tensor wide = x.to(at::kFloat).contiguous();
  Tensor out = at::empty({rows, matrix_.outputs}, wide.options());
  const auto* from = wide.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  const auto multiply = tile_kernels().multiply_dense;
  const int64_t work = rows * matrix_.inputs * kTileOutputs;
  const int64_t grain =
      std::max<int64_t>(1, kWorkOfThread / std::max<int64_t>(1, work));
  at::parallel_for(0, matrix_.blocks(), grain,
                   [&](int64_t first, int64_t last) {
                     multiply(matrix_, from, rows, to, first, last);
                   });
  return out;
}

}  // namespace kvcache::model
