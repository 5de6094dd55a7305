// support/toy_arithmetic.h - the toy model's arithmetic, token by token and key
// by key in a fixed order: the forward over a cache and the oracle without one
// share it, so that what they give is compared bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include "tests/support/toy_model.h"

namespace kvcache::toy {

// To the values that `dtype` can hold.
inline float rounded(float value, at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? static_cast<float>(c10::BFloat16(value))
                                : value;
}

// A row of numbers as KvFormat::kInt8 keeps it, by its definition.
struct Codes {
  Codes(const float* x, int64_t dim) {
    float top = 0;
    for (int64_t d = 0; d < dim; ++d) {
      top = std::max(top, std::abs(x[d]));
    }
    scale = top / 127;
    for (int64_t d = 0; d < dim; ++d) {
      codes.push_back(scale > 0 ? std::nearbyint(x[d] / scale) : 0);
    }
  }
  std::vector<float> codes;
  float scale = 0;
};

// The same row as it is read again.
inline void as_stored(float* x, int64_t dim, KvFormat format) {
  if (format == KvFormat::kPlain) {
    return;
  }
  const Codes kept(x, dim);
  for (int64_t d = 0; d < dim; ++d) {
    x[d] = kept.codes[static_cast<size_t>(d)] * kept.scale;
  }
}

[[gnu::noinline]] inline void project(const Floats& weights, const float* in,
                                      int inputs, float* out, int outputs) {
  for (int o = 0; o < outputs; ++o) {
    float sum = 0;
    for (int i = 0; i < inputs; ++i) {
      sum += weights[static_cast<size_t>(o * inputs + i)] * in[i];
    }
    out[o] = sum;
  }
}

// h = tanh(h + out x)
[[gnu::noinline]] inline void add_output(const Floats& weights, const float* x,
                                         int inputs, float* hidden) {
  float y[kWidth];
  project(weights, x, inputs, y, kWidth);
  for (int e = 0; e < kWidth; ++e) {
    hidden[e] = std::tanh(hidden[e] + y[e]);
  }
}

inline void embed(const Model& model, int id, int64_t position, float* hidden) {
  for (int e = 0; e < kWidth; ++e) {
    hidden[e] = id == kDead
                    ? std::numeric_limits<float>::quiet_NaN()
                    : model.embedding[static_cast<size_t>(id * kWidth + e)] +
                          std::sin(0.3F * static_cast<float>(position) +
                                   static_cast<float>(e));
  }
}

// One query head over keys [first, end) in their order; `key`, `value` give
// element d of position p. Nothing seen gives 0.
template <typename Key, typename Value>
[[gnu::noinline]] void attend_head(const float* q, int64_t dim, int64_t first,
                                   int64_t end, const Key& key,
                                   const Value& value, float* out) {
  Floats scores;
  float best = -std::numeric_limits<float>::infinity();
  for (int64_t p = first; p < end; ++p) {
    float score = 0;
    for (int64_t d = 0; d < dim; ++d) {
      score += q[d] * key(p, d);
    }
    scores.push_back(score);
    best = std::max(best, score);
  }
  float sum = 0;
  for (float& score : scores) {
    score = std::exp(score - best);
    sum += score;
  }
  for (int64_t d = 0; d < dim; ++d) {
    float mixed = 0;
    for (int64_t p = first; p < end; ++p) {
      mixed += scores[static_cast<size_t>(p - first)] * value(p, d);
    }
    out[d] = scores.empty() ? 0 : mixed / sum;
  }
}

// A short convolution: `window` is [C, Kc + 1], the token itself last.
[[gnu::noinline]] inline void convolve(const Floats& weights,
                                       const float* window, int64_t taps,
                                       float* out) {
  for (int c = 0; c < kChannels; ++c) {
    float sum = 0;
    for (int64_t j = 0; j <= taps; ++j) {
      const auto at = static_cast<size_t>(c * (taps + 1) + j);
      sum += weights[at] * window[at];
    }
    out[c] = std::tanh(sum);
  }
}

// A gated delta rule: decays `state` [key, value], writes one value, reads.
[[gnu::noinline]] inline void delta_rule(const Floats& gates,
                                         const float* hidden, const float* qkv,
                                         float* state, float* out) {
  float gate[2];
  project(gates, hidden, kWidth, gate, 2);
  const float decay = 1 / (1 + std::exp(-gate[0]));
  const float beta = 1 / (1 + std::exp(-gate[1]));
  const float *q = qkv, *k = qkv + kKey, *v = k + kKey;
  for (int j = 0; j < kValue; ++j) {
    float held = 0;
    for (int i = 0; i < kKey; ++i) {
      state[i * kValue + j] *= decay;
      held += state[i * kValue + j] * k[i];
    }
    out[j] = 0;
    for (int i = 0; i < kKey; ++i) {
      state[i * kValue + j] += beta * k[i] * (v[j] - held);
      out[j] += state[i * kValue + j] * q[i];
    }
  }
}

// Reads and writes elements of a float32, bfloat16 or int8 tensor by strides.
struct Elements {
  explicit Elements(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        half(tensor.scalar_type() == at::kBFloat16),
        byte(tensor.scalar_type() == at::kChar),
        strides(tensor.strides().vec()) {}
  int64_t at(std::initializer_list<int64_t> index) const {
    int64_t offset = 0;
    size_t i = 0;
    for (const int64_t n : index) {
      offset += n * strides[i++];
    }
    return offset;
  }
  float get(std::initializer_list<int64_t> index) const {
    const int64_t i = at(index);
    if (byte) {
      return reinterpret_cast<int8_t*>(data)[i];
    }
    return half ? static_cast<float>(reinterpret_cast<c10::BFloat16*>(data)[i])
                : reinterpret_cast<float*>(data)[i];
  }
  void set(std::initializer_list<int64_t> index, float value) const {
    const int64_t i = at(index);
    if (byte) {
      reinterpret_cast<int8_t*>(data)[i] = static_cast<int8_t>(value);
    } else if (half) {
      reinterpret_cast<c10::BFloat16*>(data)[i] = value;
    } else {
      reinterpret_cast<float*>(data)[i] = value;
    }
  }
  char* data;
  bool half, byte;
  std::vector<int64_t> strides;
};

}  // namespace kvcache::toy
