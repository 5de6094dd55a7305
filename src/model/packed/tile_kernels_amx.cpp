// src/model/packed/tile_kernels_amx.cpp - the tile kernels, compiled for
// avx512_vnni, and products of many rows on the matrix unit (AMX-INT8).
//
// A 16-bit activation is 256 h + l, h signed and l unsigned 8 bits, so that
// x . w = 256 (h . w) + l . w: two 8-bit products, whose sums are the integers
// of the other levels. What follows is theirs too, so all bits are.
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/model/packed/tile_table.h"

namespace kvcache::model::amx {
namespace {
// clang-format off
#include "src/model/packed/tile_vec_avx512.inc"
#include "src/model/packed/tile_kernels.inc"
// clang-format on

// Rows of one matrix register, and from how many on it is worth its setup.
constexpr int64_t kMatrixRows = 16;
constexpr int64_t kFewestRows = 8;

// --- activations: h of 32 inputs, then l of them -----------------------------

// Bytes of a 32-bit lane of weights that are taken apart lie in this order:
// inputs 0, 2, 1 and 3 of four.
inline void split_planes(int16_t* q) {
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(1, 5, 3, 7, 9, 13, 11, 15, 0, 4, 2, 6, 8, 12, 10, 14));
  const __m512i halves = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const Ints planes = _mm512_shuffle_epi8(load(q), order);
  store(q, _mm512_permutexvar_epi64(halves, planes));
}

void quantise_rows(const float* x, int64_t inputs, const TileRows& to,
                   int64_t row) {
  quantise(x, inputs, to, row);
  if (to.rows < kFewestRows) return;
  for (int64_t group = 0; group < tile_groups(inputs); ++group) {
    split_planes(to.q + (group * to.rows + row) * kTileInputs);
  }
}

// --- weights as bytes: a lane is an output, 4 inputs of it -------------------

constexpr int64_t kWeightVectors = 8;
constexpr int64_t kWeightBytes = kWeightVectors * kVectorBytes;
constexpr int64_t kUnpackedGroups = 32;

template <TileFormat kFormat>
inline void unpack_bytes(const uint8_t* tile, uint8_t* to) {
  if constexpr (kFormat == TileFormat::kQ8) {
    for (int64_t j = 0; j < kWeightVectors; ++j) {
      store(to + j * kVectorBytes, load(tile + j * kVectorBytes));
    }
    return;
  }
  const Ints nibbles = _mm512_set1_epi8(0x0f), low = all16(0x00ff);
  for (int64_t j = 0; j < kWeightVectors / 2; ++j) {
    const Ints w = load(tile + j * kVectorBytes);
    const Ints even = bits_and(w, nibbles);             // 0, 4, 1, 5
    const Ints odd = bits_and(right16<4>(w), nibbles);  // 2, 6, 3, 7
    store(to + 2 * j * kVectorBytes,
          _mm512_or_si512(bits_and(even, low), left16<8>(odd)));
    store(to + (2 * j + 1) * kVectorBytes,
          _mm512_or_si512(right16<8>(even), _mm512_andnot_si512(low, odd)));
  }
}

// --- the matrix unit ---------------------------------------------------------

// Registers, which the intrinsics want as literals: 0 and 1 are the sums of h
// and of l, 2 and 3 are h and l, 4 the weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t count) {
    const auto set = [&](int tile, int64_t height, int64_t bytes) {
      rows[tile] = static_cast<uint8_t>(height);
      row_bytes[tile] = static_cast<uint16_t>(bytes);
    };
    set(0, count, kVectorBytes);
    set(1, count, kVectorBytes);
    set(2, count, kTileInputs);
    set(3, count, kTileInputs);
    set(4, kWeightVectors, kVectorBytes);
  }
};

struct alignas(64) Sums {
  int32_t high[kMatrixRows][kTileOutputs];
  int32_t low[kMatrixRows][kTileOutputs];
};

// GCC 12's intrinsics do not say that they read memory.
inline void finish_writes() { asm volatile("" ::: "memory"); }

inline void dot_planes(const int16_t* q, const uint8_t* weights, Sums& sums) {
  constexpr int64_t kStride = kTileInputs * sizeof(int16_t);
  finish_writes();
  _tile_loadd(4, weights, kVectorBytes);
  _tile_loadd(2, q, kStride);
  _tile_loadd(3, reinterpret_cast<const int8_t*>(q) + kTileInputs, kStride);
  _tile_zero(0);
  _tile_zero(1);
  _tile_dpbssd(0, 2, 4);
  _tile_dpbusd(1, 3, 4);
  _tile_stored(0, sums.high, kVectorBytes);
  _tile_stored(1, sums.low, kVectorBytes);
}

// Groups of 16 outputs, for some rows.
struct MatrixStep {
  const uint8_t* tiles;    // of the first group
  const uint8_t* weights;  // the same as bytes
  const TileRows* x;
  int64_t group, groups, row;
  float* f;  // [rows, 16], of the first row
};

// f += w . x; kRows = 0: `rows` of them, else so many, whose sums stay in
// registers.
template <TileFormat kFormat, int kRows>
__attribute__((noinline)) void add_groups(const MatrixStep& step,
                                          int64_t rows) {
  constexpr int kKept = kRows == 0 ? 1 : kRows;
  Floats f[kKept];
  Sums sums;
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r) f[r] = load(step.f + r * kTileOutputs);
  for (int64_t i = 0; i < step.groups; ++i) {
    const int64_t at = (step.group + i) * step.x->rows + step.row;
    const uint8_t* tile = step.tiles + i * tile_bytes(kFormat);
    const float *scale = step.x->scale + at, *offset = step.x->offset + at;
    dot_planes(step.x->q + at * kTileInputs, step.weights + i * kWeightBytes,
               sums);
    const auto add_row = [&](Floats& to, int64_t r) {
      const Ints sum =
          add(_mm512_slli_epi32(load(sums.high[r]), 8), load(sums.low[r]));
      add_tile<kFormat>(&to, &sum, tile, scale[r], offset[r]);
    };
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r) add_row(f[r], r);
    if constexpr (kRows == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        f[0] = load(step.f + r * kTileOutputs);
        add_row(f[0], r);
        store(step.f + r * kTileOutputs, f[0]);
      }
    }
  }
#pragma GCC unroll kUnroll
  for (int r = 0; r < kRows; ++r) store(step.f + r * kTileOutputs, f[r]);
}

// Rows [row, row + count) of x: at most kBlockRows, and a multiple of 16 if
// more than 15.
constexpr int64_t kBlockRows = 256;

template <TileFormat kFormat>
void multiply_block(const TileMatrix& w, const TileRows& x, int64_t row,
                    int64_t count, float* out, int64_t stride, int64_t first,
                    int64_t last) {
  constexpr int64_t kBytes = tile_bytes(kFormat);
  alignas(64) uint8_t weights[kUnpackedGroups * kWeightBytes];
  alignas(64) float f[kBlockRows * kTileOutputs];
  const int64_t step_rows = count < kMatrixRows ? count : kMatrixRows;
  const TileConfig config(step_rows);
  finish_writes();
  _tile_loadconfig(&config);
  for (int64_t block = first; block < last; ++block) {
    std::memset(f, 0, static_cast<size_t>(count * kTileOutputs) * sizeof(*f));
    for (int64_t group = 0; group < w.groups; group += kUnpackedGroups) {
      const int64_t left = w.groups - group;
      const int64_t groups = left < kUnpackedGroups ? left : kUnpackedGroups;
      const uint8_t* tiles = w.tiles + (block * w.groups + group) * kBytes;
      for (int64_t i = 0; i < groups; ++i) {
        unpack_bytes<kFormat>(tiles + i * kBytes, weights + i * kWeightBytes);
      }
      for (int64_t r = 0; r < count; r += step_rows) {
        const MatrixStep step{
            tiles, weights, &x, group, groups, row + r, f + r * kTileOutputs};
        if (step_rows == kMatrixRows) {
          add_groups<kFormat, kMatrixRows>(step, kMatrixRows);
        } else {
          add_groups<kFormat, 0>(step, step_rows);
        }
      }
    }
    const int64_t output = block * kTileOutputs;
    for (int64_t r = 0; r < count; ++r) {
      const Floats values = load(f + r * kTileOutputs);
      store_outputs(out + (row + r) * stride + output, &values,
                    w.outputs - output);
    }
  }
  _tile_release();
}

template <TileFormat kFormat>
void multiply_many(const TileMatrix& w, const TileRows& x, float* out,
                   int64_t stride, int64_t first, int64_t last) {
  for (int64_t row = 0; row < x.rows;) {
    const int64_t left = x.rows - row;
    const int64_t whole = left / kMatrixRows * kMatrixRows;
    const int64_t count = whole == 0           ? left
                          : whole < kBlockRows ? whole
                                               : kBlockRows;
    multiply_block<kFormat>(w, x, row, count, out, stride, first, last);
    row += count;
  }
}

void multiply_rows_or_matrix(const TileMatrix& w, const TileRows& x, float* out,
                             int64_t stride, int64_t first, int64_t last) {
  if (x.rows < kFewestRows) return multiply(w, x, out, stride, first, last);
  if (w.format == TileFormat::kQ4) {
    return multiply_many<TileFormat::kQ4>(w, x, out, stride, first, last);
  }
  multiply_many<TileFormat::kQ8>(w, x, out, stride, first, last);
}

constexpr TileKernels kMatrixKernels = {quantise_rows, multiply_rows_or_matrix,
                                        multiply_dense, multiply_pairs};

}  // namespace

const TileKernels& tile_kernels() { return kMatrixKernels; }

}  // namespace kvcache::model::amx
