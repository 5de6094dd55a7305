// src/model/packed/pair_kernels_amx.cpp - products of bfloat16 weights on the
// matrix unit (AMX-BF16).
//
// An instruction adds the products of 32 inputs to 16 rows by 16 outputs. What
// a row gets depends on itself and the weights alone, and the inputs come in
// ascending order: one set of bits for a row, whatever runs along.
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/model/packed/tile_table.h"

namespace kvcache::model::amx {
namespace {

constexpr int64_t kMatrixRows = 16;
constexpr int64_t kStepBytes = 2 * kTileInputs;  // of a row and an instruction
constexpr int64_t kStepWeights = kTileOutputs * kStepBytes;  // in bytes
constexpr int64_t kAhead = 8192;  // of the weights that a few rows read

// GCC 12's intrinsics do not say that they read memory.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// Registers, which the intrinsics want as literals: 0 and 1 are the sums of the
// upper rows for two blocks of outputs, 2 and 3 those of the lower rows, 4 and
// 5 the rows, 6 and 7 the weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int64_t upper, int64_t lower) {
    constexpr int64_t kWhole = 64;
    const int64_t heights[] = {upper, upper, lower,       lower,
                               upper, lower, kMatrixRows, kMatrixRows};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = static_cast<uint8_t>(heights[tile]);
      row_bytes[tile] = static_cast<uint16_t>(heights[tile] > 0 ? kWhole : 0);
    }
  }
};

// Up to 32 rows and 32 outputs.
struct Product {
  const PairRows* x;
  int64_t row, upper, lower;  // of x; how many, of 16 each
  const uint8_t* weights[2];  // of two blocks
};

// The last inputs of rows, where there are fewer than 32 of them.
struct alignas(64) Tail {
  uint16_t of[2 * kMatrixRows][kTileInputs] = {};
};

template <bool kLower, bool kTwo>
inline void add_step(const uint8_t* upper, const uint8_t* lower, int64_t stride,
                     const uint8_t* w0, const uint8_t* w1) {
  _tile_loadd(6, w0, 64);
  _tile_loadd(4, upper, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTwo) {
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kLower) {
    _tile_loadd(5, lower, stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwo) _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kLower, bool kTwo>
inline void add_inputs(const Product& p, const Tail& tail) {
  const int64_t inputs = p.x->inputs, stride = 2 * inputs;
  const auto* upper = reinterpret_cast<const uint8_t*>(p.x->x + p.row * inputs);
  const uint8_t* lower = upper + kMatrixRows * stride;
  const uint8_t *w0 = p.weights[0], *w1 = p.weights[1];
  _tile_zero(0);
  if constexpr (kTwo) _tile_zero(1);
  if constexpr (kLower) _tile_zero(2);
  if constexpr (kLower && kTwo) _tile_zero(3);
  for (int64_t step = 0; step < inputs / kTileInputs; ++step) {
    if constexpr (!kLower) {
      for (int64_t line = 0; line < kStepWeights; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(w0) + kAhead + line,
                     _MM_HINT_T0);
        if constexpr (kTwo) {
          _mm_prefetch(reinterpret_cast<const char*>(w1) + kAhead + line,
                       _MM_HINT_T0);
        }
      }
    }
    add_step<kLower, kTwo>(upper, lower, stride, w0, w1);
    upper += kStepBytes;
    lower += kStepBytes;
    w0 += kStepWeights;
    w1 += kStepWeights;
  }
  if (inputs % kTileInputs == 0) return;
  add_step<kLower, kTwo>(reinterpret_cast<const uint8_t*>(tail.of[0]),
                         reinterpret_cast<const uint8_t*>(tail.of[kMatrixRows]),
                         kStepBytes, w0, w1);
}

struct alignas(64) Sums {
  float of[2][2][kMatrixRows][kTileOutputs];  // lower, block
};

template <bool kTwo>
void add_rows(const Product& p, const Tail& tail, Sums& sums) {
  finish_writes();
  if (p.lower > 0) {
    add_inputs<true, kTwo>(p, tail);
    _tile_stored(2, sums.of[1][0], 64);
    if constexpr (kTwo) _tile_stored(3, sums.of[1][1], 64);
  } else {
    add_inputs<false, kTwo>(p, tail);
  }
  _tile_stored(0, sums.of[0][0], 64);
  if constexpr (kTwo) _tile_stored(1, sums.of[0][1], 64);
}

// 16 sums, or as many as `some` says, to where their output goes.
inline void write_sums(const PairRows& x, const float* sums, int64_t at,
                       int64_t output, __mmask16 some) {
  __m512 values = _mm512_load_ps(sums);
  if (x.bias != nullptr) {
    values =
        _mm512_add_ps(values, _mm512_maskz_loadu_ps(some, x.bias + output));
  }
  if (x.sums != nullptr) {
    _mm512_mask_storeu_ps(x.sums + at + output, some, values);
  } else {
    const auto rounded = (__m256i)_mm512_cvtneps_pbh(values);
    _mm256_mask_storeu_epi16(x.rounded + at + output, some, rounded);
  }
}

void write_block(const DenseMatrix& w, const Product& p, const Sums& sums,
                 int64_t block, int which) {
  const int64_t output = block * kTileOutputs, left = w.outputs - output;
  const auto some =
      static_cast<__mmask16>(left >= kTileOutputs ? 0xffff : (1 << left) - 1);
  for (int64_t r = 0; r < p.upper + p.lower; ++r) {
    write_sums(*p.x, sums.of[r / kMatrixRows][which][r % kMatrixRows],
               (p.row + r) * w.outputs, output, some);
  }
}

void copy_tail(const Product& p, Tail& tail) {
  const int64_t inputs = p.x->inputs, left = inputs % kTileInputs;
  if (left == 0) return;
  for (int64_t r = 0; r < p.upper + p.lower; ++r) {
    std::memcpy(tail.of[r], p.x->x + (p.row + r + 1) * inputs - left,
                static_cast<size_t>(left) * sizeof(uint16_t));
  }
}

// Rows [row, row + count) of x: a multiple of 32 of them, or fewer than 32.
void multiply_block(const DenseMatrix& w, const PairRows& x, int64_t row,
                    int64_t count, int64_t first, int64_t last) {
  constexpr int64_t kBoth = 2 * kMatrixRows;
  const int64_t upper = count < kMatrixRows ? count : kMatrixRows;
  const int64_t lower = (count < kBoth ? count : kBoth) - upper;
  const int64_t block_bytes = tile_groups(w.inputs) * kStepWeights;
  const auto* weights = static_cast<const uint8_t*>(w.weights);
  const TileConfig config(upper, lower);
  finish_writes();
  _tile_loadconfig(&config);
  Tail tail;
  Sums sums;
  for (int64_t block = first; block < last; block += 2) {
    const bool two = block + 1 < last;
    const uint8_t* one = weights + block * block_bytes;
    for (int64_t r = 0; r < count; r += kBoth) {
      const Product p{&x, row + r, upper, lower, {one, one + block_bytes}};
      copy_tail(p, tail);
      two ? add_rows<true>(p, tail, sums) : add_rows<false>(p, tail, sums);
      write_block(w, p, sums, block, 0);
      if (two) write_block(w, p, sums, block + 1, 1);
    }
  }
  _tile_release();
}

}  // namespace

void multiply_pairs(const DenseMatrix& w, const PairRows& x, int64_t first,
                    int64_t last) {
  // Rows that stay in the second cache while weights pass by.
  constexpr int64_t kRowBytes = 1 << 20;
  const int64_t fit = kRowBytes / (2 * w.inputs) / 32 * 32;
  const int64_t most = fit < 32 ? 32 : fit;
  for (int64_t row = 0; row < x.rows;) {
    const int64_t left = x.rows - row;
    const int64_t whole = left < most ? left / 32 * 32 : most;
    const int64_t count = whole > 0 ? whole : left;
    multiply_block(w, x, row, count, first, last);
    row += count;
  }
}

}  // namespace kvcache::model::amx
