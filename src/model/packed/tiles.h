// src/model/packed/tiles.h - linears as tiles of quantised weights: how they
// are made, kept and multiplied. N outputs, K inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <span>

#include "kvcache/model/transformer.h"
#include "src/model/packed/row_piece.h"
#include "src/model/packed/tile_table.h"

namespace kvcache::model {

using at::Tensor;

// Memory of zeros. Every 2 MiB of it are one page where the system agrees.
class TileMemory {
 public:
  explicit TileMemory(size_t bytes);
  ~TileMemory();
  TileMemory(const TileMemory&) = delete;
  TileMemory& operator=(const TileMemory&) = delete;

  uint8_t* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out tile memory, so that the linears of a model lie one after the other
// in the order of their use.
class TileArena {
 public:
  struct Piece {
    std::shared_ptr<const TileMemory> memory;  // keeps `data` alive
    uint8_t* data = nullptr;
  };
  Piece take(size_t bytes);

 private:
  std::shared_ptr<const TileMemory> memory_;
  size_t used_ = 0;
};

// One linear: y = W x + bias. Immutable.
class TiledLinear {
 public:
  // Rows of `pieces` below each other. Rows of Q4_0, Q4_1, Q8_0 and Q5_0 blocks
  // keep their values (the first two if all pieces are of them); all others are
  // rounded as `packing` says, with one scale per 32 values: to 8 bits for
  // kAuto, since that is finer than any quantised type that is not kept.
  // `bias` [N] float32 or undefined.
  TiledLinear(const WeightSource& source, std::span<const RowPiece> pieces,
              const Tensor& bias, WeightPacking packing, TileArena& arena);
  // `weight` [N, K] float32, rounded.
  TiledLinear(const Tensor& weight, const Tensor& bias, WeightPacking packing);

  int64_t inputs() const noexcept { return inputs_; }
  int64_t outputs() const noexcept { return matrix_.outputs; }
  TileFormat format() const noexcept { return matrix_.format; }
  const TileMatrix& matrix() const noexcept { return matrix_; }
  const Tensor& bias() const noexcept { return bias_; }
  size_t bytes() const noexcept;  // of tiles

  // `x` [M, K] float32, contiguous. Returns [M, N]. Row-exact, and of one
  // order of additions at any M.
  Tensor operator()(const Tensor& x) const;

  // The bits of the outputs `which` alone, [M, which.size()]: reads 16 rows of
  // weights for each of them.
  Tensor outputs_of(const Tensor& x, std::span<const int64_t> which) const;

  // The weights as they are multiplied with, [N, K] float32.
  Tensor dequantised() const;

 private:
  void check(const Tensor& x) const;
  // Returns zeros to write the tiles to.
  uint8_t* make(int64_t outputs, int64_t inputs, TileFormat format,
                TileArena& arena);

  std::shared_ptr<const TileMemory> memory_;
  TileMatrix matrix_;
  int64_t inputs_ = 0;
  Tensor bias_;
};

}  // namespace kvcache::model
