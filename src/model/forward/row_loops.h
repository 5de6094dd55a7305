// src/model/forward/row_loops.h - the elementwise work of a decoder, per row.
//
// Own loops, since LibTorch's activations have other bits in vector tails when
// a width is no multiple of 32. Here every element takes the same instructions
// at any width: a tail runs in full vectors over a padded copy. A row is never
// split, so threads and neighbours change nothing.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "src/model/forward/row_loops_table.h"

namespace kvcache::model {

// The loops for kernels::cpu_level(). T is float or Bf16.
template <typename T>
const RowLoops<T>& row_loops();
template <>
const RowLoops<float>& row_loops<float>();
template <>
const RowLoops<Bf16>& row_loops<Bf16>();

template <typename T>
T* data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls f(T{}) with the T that `dtype`, float32 or bfloat16, is computed in.
template <typename F>
decltype(auto) with_row_type(at::ScalarType dtype, F&& f) {
  return dtype == at::kFloat ? f(float{}) : f(Bf16{});
}

// f(row) for rows of [0, rows), on several threads if `row_values` values a row
// make that worth it.
template <typename F>
void for_each_row(int64_t rows, int64_t row_values, const F& f) {
  constexpr int64_t kValuesPerThread = 16384;  // some 5 us of work
  const int64_t grain =
      std::max<int64_t>(1, kValuesPerThread / std::max<int64_t>(1, row_values));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) f(row);
  });
}

}  // namespace kvcache::model
