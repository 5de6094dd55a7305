// src/model/forward/packed_linear.h - x W^T + b with W packed once.
//
// Why not at::linear: its arithmetic changes with the number of rows (float32
// at 1 to 3 and 5 to 7, bfloat16 at 1), so that a row's bits depend on its
// neighbours. oneDNN's product over packed weights has one order of additions
// from two rows on; a single row therefore runs as two.
//
// oneDNN compiles a kernel for every number of rows, and keeps it: 0.75 MB and
// 1 ms each. So rows are padded to one of few counts, see padded_rows().
// M rows, N outputs, K inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "src/model/packed/dense_tiles.h"

namespace kvcache::model {

using at::Tensor;

class PackedLinear {
 public:
  PackedLinear() = default;
  // `weight` [N, K], contiguous; `bias` [N] in its dtype, or undefined. Neither
  // is kept. Tiles, where oneDNN does not pack, come from `arena`.
  PackedLinear(const Tensor& weight, const Tensor& bias, TileArena& arena);
  PackedLinear(const Tensor& weight, const Tensor& bias);

  // Whether oneDNN packs float32 or bfloat16 weights on this CPU. Where it does
  // not (bfloat16 without AVX-512), or not row-exact (bfloat16 with AMX), they
  // are multiplied as DenseTiles.
  static bool packs(at::ScalarType dtype);

  int64_t inputs() const noexcept { return inputs_; }
  int64_t outputs() const noexcept { return outputs_; }
  bool has_bias() const noexcept { return bias_.has_value(); }
  at::ScalarType dtype() const noexcept { return dtype_; }

  // The number of rows that `rows` run as: 2, 4, 8, 16, multiples of 32 up to
  // 256, then of a quarter of a power of two.
  static int64_t padded_rows(int64_t rows);

  // `x` [M, K], contiguous. Returns a new [M, N]. Used as it is if M is
  // padded_rows(M), else copied and padded; tiles take any M as it is.
  Tensor operator()(const Tensor& x) const;

  // Measures whether a row has the same bits among other row counts, at other
  // places among them, beside NaN and on one thread. A few ms for a million
  // weights; keeps kernels for row counts that are used anyway.
  bool probe_row_exact() const;

 private:
  Tensor multiply(const Tensor& x) const;  // M is padded_rows(M), or tiles

  Tensor weight_;  // packed by oneDNN; undefined: tiles_
  std::optional<DenseTiles> tiles_;
  std::optional<Tensor> bias_;  // of tiles_: float32
  int64_t inputs_ = 0;
  int64_t outputs_ = 0;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace kvcache::model
