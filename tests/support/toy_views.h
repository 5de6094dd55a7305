// support/toy_views.h - what a view says of K and V, to the letter: plain
// numbers or codes and scales, rings, sinks.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <utility>

#include "tests/support/toy_arithmetic.h"

namespace kvcache::toy {

// Token `t` of a row and head into its cell.
inline void write_cell(const Tensor& to, const Tensor& scale,
                       const std::array<int64_t, 3>& at, const Elements& from,
                       int64_t t, int64_t dim) {
  Floats x;
  for (int64_t d = 0; d < dim; ++d) {
    x.push_back(from.get({at[0], at[1], t, d}));
  }
  if (scale.defined()) {
    Codes kept(x.data(), dim);
    Elements(scale).set({at[0], at[1], at[2], 0}, kept.scale);
    x = std::move(kept.codes);
  }
  for (int64_t d = 0; d < dim; ++d) {
    Elements(to).set({at[0], at[1], at[2], d}, x[static_cast<size_t>(d)]);
  }
}

// What token `i` of a step reads, in `row`, by the view's own words.
inline void read_view(const KvView& view, int64_t row, int64_t i,
                      const float* q, int64_t heads, int64_t dim,
                      Floats& mixed) {
  const Elements k(view.k), v(view.v);
  const bool scaled = view.k_scale.defined();
  const Elements k_scale(scaled ? view.k_scale : view.k);
  const Elements v_scale(scaled ? view.v_scale : view.v);
  const int64_t end = view.limits.data_ptr<int64_t>()[i];
  const int64_t first =
      view.sliding > 0 ? std::max<int64_t>(0, end - view.sliding) : 0;
  const auto cell = [&](int64_t p) {
    return view.ring > 0 && p >= view.sinks
               ? view.sinks + (p - view.sinks) % view.ring
               : p;
  };
  const int64_t sinks = std::min(view.sinks, first);
  const auto seen = [&](int64_t n) {  // the n-th visible key's cell
    return cell(n < sinks ? n : first + n - sinks);
  };
  for (int64_t h = 0; h < heads; ++h) {
    attend_head(
        q + h * dim, dim, 0, sinks + end - first,
        [&](int64_t n, int64_t d) {
          const float x = k.get({row, h, seen(n), d});
          return scaled ? x * k_scale.get({row, h, seen(n), 0}) : x;
        },
        [&](int64_t n, int64_t d) {
          const float x = v.get({row, h, seen(n), d});
          return scaled ? x * v_scale.get({row, h, seen(n), 0}) : x;
        },
        mixed.data() + h * dim);
  }
}

}  // namespace kvcache::toy
