// support/attention_cases.h - views for attend(), and what it must answer.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvcache/attention.h"
#include "src/kv_format.h"

namespace kvcache::testing {

// The shape of one attend() call over a row-wise prefix plus `tokens` new keys.
struct AttentionShape {
  int64_t rows = 1;
  int64_t heads = 1;
  int64_t group = 1;
  int64_t head_dim = 64;
  int64_t prefix = 0;
  int64_t tokens = 1;
  int64_t capacity = 0;  // cells; 0: prefix + tokens
  int64_t sliding = 0;
  int64_t sinks = 0;
  int64_t ring = 0;
  bool position_major = false;  // storage [B, S, H, D] instead of [B, H, S, D]
  at::ScalarType dtype = at::kFloat;
  KvFormat format = KvFormat::kPlain;
};

struct AttentionCase {
  Tensor q;
  KvView view;
};

// A storage of NaN, as [B, H, cells, D].
inline Tensor empty_cells(const AttentionShape& s, int64_t cells) {
  const auto options = at::TensorOptions().dtype(s.dtype);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (s.position_major) {
    return at::full({s.rows, cells, s.heads, s.head_dim}, nan, options)
        .transpose(1, 2);
  }
  return at::full({s.rows, s.heads, cells, s.head_dim}, nan, options);
}

// Where a position lies, as KvView says.
inline int64_t cell_of(int64_t position, int64_t sinks, int64_t ring) {
  if (ring == 0 || position < sinks) return position;
  return sinks + (position - sinks) % ring;
}

// Keys and values of `all` ([B, H, n, D]) where a view of `s` expects them;
// whatever no position lies in is NaN.
inline Tensor store(const AttentionShape& s, const Tensor& all) {
  const int64_t n = all.size(2);
  const int64_t cells = std::max(s.ring > 0 ? s.sinks + s.ring : n, s.capacity);
  Tensor stored = empty_cells(s, cells);
  for (int64_t p = 0; p < n; ++p) {
    if (s.ring > 0 && p >= s.sinks && p < n - s.ring) continue;  // overwritten
    stored.select(2, cell_of(p, s.sinks, s.ring)).copy_(all.select(2, p));
  }
  return stored;
}

// limits of a causal step: query t sees prefix + t + 1 keys.
inline Tensor causal_limits(int64_t rows, int64_t prefix, int64_t tokens) {
  Tensor limits = at::empty({rows, tokens}, at::kLong);
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      limits.mutable_data_ptr<int64_t>()[b * tokens + t] = prefix + t + 1;
    }
  }
  return limits;
}

// K and V of a view as codes and scales; NaN cells have NaN scales.
inline void quantise(const AttentionShape& s, KvView& view) {
  const auto records = [&](const Tensor& plain) {
    return s.position_major ? quantised(plain.transpose(1, 2)).transpose(1, 2)
                            : quantised(plain);
  };
  const Tensor k = records(view.k), v = records(view.v);
  view.format = KvFormat::kInt8;
  view.k = codes_of(k, s.head_dim);
  view.v = codes_of(v, s.head_dim);
  view.k_scale = scales_of(k);
  view.v_scale = scales_of(v);
}

// A causal step over keys, values and queries drawn from torch's generator.
inline AttentionCase make_case(const AttentionShape& s) {
  const auto options = at::TensorOptions().dtype(s.dtype);
  const int64_t n = s.prefix + s.tokens;
  AttentionCase c;
  at::manual_seed(1);  // or each run has other numbers
  c.q = at::randn({s.rows, s.tokens, s.heads * s.group, s.head_dim}, options)
            .transpose(1, 2);
  const std::vector<int64_t> all = {s.rows, s.heads, n, s.head_dim};
  c.view.k = store(s, at::randn(all, options));
  c.view.v = store(s, at::randn(all, options));
  c.view.limits = causal_limits(s.rows, s.prefix, s.tokens);
  c.view.window = c.view.k.size(2);
  c.view.sliding = s.sliding;
  c.view.sinks = s.sinks;
  c.view.ring = s.ring;
  if (s.format == KvFormat::kInt8) quantise(s, c.view);
  return c;
}

// The positions that a query with this limit sees, ascending.
inline std::vector<int64_t> positions_seen(const KvView& view, int64_t limit) {
  std::vector<int64_t> seen;
  for (int64_t p = 0; p < limit; ++p) {
    if (view.sliding == 0 || p < view.sinks || p >= limit - view.sliding) {
      seen.push_back(p);
    }
  }
  return seen;
}

// The definition, one key at a time, in float64.
inline Tensor reference_attend(const Tensor& q, const KvView& view,
                               double scale) {
  const Tensor q64 = q.to(at::kDouble).contiguous();
  const auto numbers = [](const Tensor& stored, const Tensor& scale) {
    const Tensor x = stored.to(at::kDouble);
    return (scale.defined() ? x.mul(scale) : x).contiguous();
  };
  const Tensor k64 = numbers(view.k, view.k_scale);
  const Tensor v64 = numbers(view.v, view.v_scale);
  const Tensor limits = view.limits.contiguous();
  const int64_t B = q.size(0), Hq = q.size(1), T = q.size(2), D = q.size(3);
  const int64_t group = Hq / view.k.size(1), cells = view.k.size(2);
  Tensor out = at::zeros({B, Hq, T, D}, at::kDouble);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < Hq; ++h) {
      const int64_t base = (b * view.k.size(1) + h / group) * cells * D;
      for (int64_t t = 0; t < T; ++t) {
        const std::vector<int64_t> seen =
            positions_seen(view, limits.const_data_ptr<int64_t>()[b * T + t]);
        const int64_t query = ((b * Hq + h) * T + t) * D;
        const double* qs = q64.const_data_ptr<double>() + query;
        double* o = out.mutable_data_ptr<double>() + query;
        std::vector<double> weight;
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        for (const int64_t p : seen) {
          const int64_t cell = cell_of(p, view.sinks, view.ring);
          const double* key = k64.const_data_ptr<double>() + base + cell * D;
          double dot = 0;
          for (int64_t d = 0; d < D; ++d) dot += qs[d] * key[d];
          weight.push_back(dot * scale);
          top = std::max(top, weight.back());
        }
        for (double& w : weight) sum += w = std::exp(w - top);
        for (size_t i = 0; i < seen.size(); ++i) {
          const int64_t cell = cell_of(seen[i], view.sinks, view.ring);
          const double* value = v64.const_data_ptr<double>() + base + cell * D;
          for (int64_t d = 0; d < D; ++d) o[d] += weight[i] / sum * value[d];
        }
      }
    }
  }
  return out;
}

}  // namespace kvcache::testing
