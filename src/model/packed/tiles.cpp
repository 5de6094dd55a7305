// src/model/packed/tiles.cpp - linears as tiles of quantised weights.
#include "src/model/packed/tiles.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "src/model/packed/activations.h"
#include "src/model/packed/tile_kernels.h"
#include "src/model/packed/tile_writer.h"

namespace kvcache::model {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// What kernels ask for ahead of time lies behind the last tile.
constexpr size_t kBehind = 8192;

// Where the rows of a linear come from.
class RowReader {
 public:
  RowReader(const WeightSource& source, std::span<const RowPiece> pieces)
      : source_(source), pieces_(pieces) {}

  int64_t inputs() const { return source_.shape(pieces_[0].name).at(1); }
  int64_t outputs() const {
    int64_t rows = 0;
    for (const RowPiece& piece : pieces_) rows += piece.count;
    return rows;
  }
  bool all_keep(TileFormat format) const {
    return std::all_of(pieces_.begin(), pieces_.end(), [&](const auto& piece) {
      return keeps(format, source_.block_type(piece.name));
    });
  }

  // f(piece, its row) for an output.
  template <typename F>
  void at(int64_t output, const F& f) const {
    for (const RowPiece& piece : pieces_) {
      if (output < piece.count) return f(piece.name, piece.first + output);
      output -= piece.count;
    }
  }
  const WeightSource& source() const { return source_; }

 private:
  const WeightSource& source_;
  std::span<const RowPiece> pieces_;
};

// f(output, scratch for a row) for all outputs, 16 of them a task.
template <typename Value, typename F>
void for_outputs(int64_t outputs, size_t row_values, const F& f) {
  const int64_t blocks = (outputs + kTileOutputs - 1) / kTileOutputs;
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    std::vector<Value> row(row_values);
    const int64_t end = std::min(outputs, last * kTileOutputs);
    for (int64_t n = first * kTileOutputs; n < end; ++n) f(n, row);
  });
}

// Writes the rows that `read(output, row of floats)` fills in, rounded.
template <typename Read>
void write_rounded(const TileMatrix& shape, uint8_t* tiles, int64_t inputs,
                   const Read& read) {
  const auto padded = static_cast<size_t>(shape.groups * kTileInputs);
  for_outputs<float>(shape.outputs, padded, [&](int64_t n, auto& row) {
    read(n, row.data());
    std::fill(row.begin() + inputs, row.end(), 0.0F);
    for (int64_t group = 0; group < shape.groups; ++group) {
      const float* w = row.data() + group * kTileInputs;
      write_group(shape, tiles, n, group,
                  shape.format == TileFormat::kQ4 ? round_q4(w) : round_q8(w));
    }
  });
}

void write_kept(const TileMatrix& shape, uint8_t* tiles,
                const RowReader& rows) {
  constexpr int64_t kMostBytes = 34;  // of a block
  const auto row_bytes = static_cast<size_t>(shape.groups * kMostBytes);
  for_outputs<std::byte>(shape.outputs, row_bytes, [&](int64_t n, auto& row) {
    rows.at(n, [&](const std::string& name, int64_t index) {
      const BlockType type = rows.source().block_type(name);
      rows.source().read_blocks(name, index, 1, row.data());
      for (int64_t group = 0; group < shape.groups; ++group) {
        write_group(shape, tiles, n, group,
                    group_of_block(type, shape.format,
                                   row.data() + group * block_bytes(type)));
      }
    });
  });
}

TileFormat rounded_format(WeightPacking packing) {
  return packing == WeightPacking::kQ4 ? TileFormat::kQ4 : TileFormat::kQ8;
}

}  // namespace

TileMemory::TileMemory(size_t bytes)
    : bytes_((bytes + kBehind + kHugePage - 1) / kHugePage * kHugePage) {
  // A whole page more, to start at the edge of one.
  void* mapped = mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* start = static_cast<uint8_t*>(mapped);
  const size_t before =
      (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (before > 0) munmap(start, before);
  if (before < kHugePage) {
    munmap(start + before + bytes_, kHugePage - before);
  }
  data_ = start + before;
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

TileMemory::~TileMemory() { munmap(data_, bytes_); }

TileArena::Piece TileArena::take(size_t bytes) {
  constexpr size_t kChunk = size_t{32} << 20;
  constexpr size_t kLine = 64;
  if (memory_ == nullptr || used_ + bytes + kBehind > memory_->bytes()) {
    memory_ = std::make_shared<const TileMemory>(std::max(bytes, kChunk));
    used_ = 0;
  }
  const Piece piece{memory_, memory_->data() + used_};
  used_ += (bytes + kLine - 1) / kLine * kLine;
  return piece;
}

TiledLinear::TiledLinear(const WeightSource& source,
                         std::span<const RowPiece> pieces, const Tensor& bias,
                         WeightPacking packing, TileArena& arena)
    : bias_(bias) {
  const RowReader rows(source, pieces);
  const bool q4 = rows.all_keep(TileFormat::kQ4);
  const bool kept = q4 || rows.all_keep(TileFormat::kQ8);
  uint8_t* tiles = make(rows.outputs(), rows.inputs(),
                        q4     ? TileFormat::kQ4
                        : kept ? TileFormat::kQ8
                               : rounded_format(packing),
                        arena);
  if (kept) {
    write_kept(matrix_, tiles, rows);
    return;
  }
  write_rounded(matrix_, tiles, inputs_, [&](int64_t n, float* row) {
    rows.at(n, [&](const std::string& name, int64_t index) {
      source.read_rows(name, index, 1, row);
    });
  });
}

TiledLinear::TiledLinear(const Tensor& weight, const Tensor& bias,
                         WeightPacking packing)
    : bias_(bias) {
  TileArena arena;
  uint8_t* tiles =
      make(weight.size(0), weight.size(1), rounded_format(packing), arena);
  const Tensor dense = weight.contiguous();
  const auto* values = dense.const_data_ptr<float>();
  write_rounded(matrix_, tiles, inputs_, [&](int64_t n, float* row) {
    std::copy_n(values + n * inputs_, inputs_, row);
  });
}

uint8_t* TiledLinear::make(int64_t outputs, int64_t inputs, TileFormat format,
                           TileArena& arena) {
  inputs_ = inputs;
  matrix_.outputs = outputs;
  matrix_.groups = tile_groups(inputs);
  matrix_.format = format;
  const TileArena::Piece piece = arena.take(bytes());
  memory_ = piece.memory;
  matrix_.tiles = piece.data;
  return piece.data;
}

size_t TiledLinear::bytes() const noexcept {
  return static_cast<size_t>(matrix_.blocks() * matrix_.groups *
                             tile_bytes(matrix_.format));
}

void TiledLinear::check(const Tensor& x) const {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == inputs_ &&
                        x.scalar_type() == at::kFloat && x.is_contiguous(),
                    "[TiledLinear] x must be a dense [M, ", inputs_,
                    "] of float32 but got ", x.sizes(), " of ", x.scalar_type(),
                    ".");
}

Tensor TiledLinear::operator()(const Tensor& x) const {
  check(x);
  const int64_t rows = x.size(0);
  Tensor out = at::empty({rows, outputs()}, x.options());
  multiply_tiles(matrix_, x.const_data_ptr<float>(), inputs_, rows,
                 out.mutable_data_ptr<float>());
  if (bias_.defined()) out.add_(bias_);
  return out;
}

Tensor TiledLinear::outputs_of(const Tensor& x,
                               std::span<const int64_t> which) const {
  check(x);
  const int64_t rows = x.size(0), count = std::ssize(which);
  const int64_t block_bytes = matrix_.groups * tile_bytes(matrix_.format);
  Tensor out = at::empty({rows, count}, x.options());
  auto* to = out.mutable_data_ptr<float>();
  std::vector<float> block(static_cast<size_t>(rows * kTileOutputs));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t output = which[static_cast<size_t>(i)];
    TileMatrix one = matrix_;  // the block that holds it
    one.tiles += output / kTileOutputs * block_bytes;
    one.outputs = kTileOutputs;
    multiply_tiles(one, x.const_data_ptr<float>(), inputs_, rows, block.data());
    const auto at = static_cast<size_t>(output % kTileOutputs);
    for (int64_t m = 0; m < rows; ++m) {
      to[m * count + i] = block[static_cast<size_t>(m * kTileOutputs) + at];
      if (bias_.defined()) {
        to[m * count + i] += bias_.const_data_ptr<float>()[output];
      }
    }
  }
  return out;
}

Tensor TiledLinear::dequantised() const {
  Tensor out = at::empty({outputs(), inputs_}, at::TensorOptions(at::kFloat));
  auto* to = out.mutable_data_ptr<float>();
  const auto value = [](uint16_t bits) {
    return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
  };
  for (int64_t n = 0; n < outputs(); ++n) {
    for (int64_t k = 0; k < inputs_; k += kTileInputs) {
      const TileGroup group = read_group(matrix_, n, k / kTileInputs);
      const int64_t end = std::min(kTileInputs, inputs_ - k);
      for (int64_t i = 0; i < end; ++i) {
        to[n * inputs_ + k + i] =
            value(group.d) * static_cast<float>(group.q[i]) + value(group.m);
      }
    }
  }
  return out;
}

}  // namespace kvcache::model
