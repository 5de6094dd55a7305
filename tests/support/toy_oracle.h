// support/toy_oracle.h - the toy model without any cache: all tokens of a row
// at once, from nothing.
#pragma once

#include <span>
#include <vector>

#include "tests/support/toy_arithmetic.h"

namespace kvcache::toy {

struct OracleRow {
  Floats hidden;                     // [L, E]
  std::vector<Floats> keys, values;  // per attention layer [L, H * D], as read
};

inline void oracle_attention(const AttentionLayer& layer,
                             const Model::Weights& weights,
                             at::ScalarType dtype, KvFormat format,
                             OracleRow& row) {
  const int64_t heads = layer.heads, dim = layer.head_dim;
  const int64_t size = heads * dim;
  const auto length = static_cast<int64_t>(row.hidden.size()) / kWidth;
  Floats qkv(static_cast<size_t>(3 * size)), keys, values, queries;
  for (int64_t p = 0; p < length; ++p) {
    project(weights.in, row.hidden.data() + p * kWidth, kWidth, qkv.data(),
            static_cast<int>(qkv.size()));
    for (int64_t i = 0; i < size; ++i) {
      queries.push_back(qkv[i]);
      keys.push_back(rounded(qkv[size + i], dtype));
      values.push_back(rounded(qkv[2 * size + i], dtype));
    }
    for (int64_t h = 0; h < heads; ++h) {
      as_stored(keys.data() + p * size + h * dim, dim, format);
      as_stored(values.data() + p * size + h * dim, dim, format);
    }
  }
  Floats mixed(static_cast<size_t>(size));
  for (int64_t p = 0; p < length; ++p) {
    const int64_t first =
        layer.sliding > 0 ? std::max<int64_t>(0, p + 1 - layer.sliding) : 0;
    const int64_t sinks = std::min(layer.sinks, first);
    const auto seen = [&](int64_t n) {
      return n < sinks ? n : first + n - sinks;
    };
    for (int64_t h = 0; h < heads; ++h) {
      attend_head(
          queries.data() + p * size + h * dim, dim, 0, sinks + p + 1 - first,
          [&](int64_t n, int64_t d) {
            return keys[seen(n) * size + h * dim + d];
          },
          [&](int64_t n, int64_t d) {
            return values[seen(n) * size + h * dim + d];
          },
          mixed.data() + h * dim);
    }
    add_output(weights.out, mixed.data(), static_cast<int>(size),
               row.hidden.data() + p * kWidth);
  }
  row.keys.push_back(std::move(keys));
  row.values.push_back(std::move(values));
}

inline void oracle_recurrent(const RecurrentLayer& layer,
                             const Model::Weights& weights,
                             at::ScalarType dtype, OracleRow& row) {
  const int64_t taps = layer.conv_taps;
  const auto length = static_cast<int64_t>(row.hidden.size()) / kWidth;
  std::vector<Floats> inputs;  // [L][C]
  float state[kKey * kValue] = {};
  for (int64_t p = 0; p < length; ++p) {
    float* hidden = row.hidden.data() + p * kWidth;
    Floats channels(kChannels);
    project(weights.in, hidden, kWidth, channels.data(), kChannels);
    if (layer.conv_channels > 0) {
      inputs.push_back(channels);
      Floats window;
      for (int c = 0; c < kChannels; ++c) {
        for (int64_t j = p - taps; j <= p; ++j) {
          window.push_back(j < 0 ? 0 : rounded(inputs[j][c], dtype));
        }
      }
      convolve(weights.conv, window.data(), taps, channels.data());
    }
    if (layer.state_shape.empty()) {
      add_output(weights.out, channels.data(), kChannels, hidden);
      continue;
    }
    float read[kValue];
    delta_rule(weights.gates, hidden, channels.data(), state, read);
    add_output(weights.out, read, kValue, hidden);
  }
}

inline OracleRow oracle(const Model& model, std::span<const int> ids,
                        at::ScalarType dtype = at::kFloat,
                        at::ScalarType conv_dtype = at::kFloat,
                        KvFormat format = KvFormat::kPlain) {
  OracleRow row;
  row.hidden.resize(ids.size() * kWidth);
  for (size_t p = 0; p < ids.size(); ++p) {
    embed(model, ids[p], static_cast<int64_t>(p),
          row.hidden.data() + p * kWidth);
  }
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (const auto* a = std::get_if<AttentionLayer>(&model.layers[i])) {
      oracle_attention(*a, model.weights[i], dtype, format, row);
    } else {
      oracle_recurrent(std::get<RecurrentLayer>(model.layers[i]),
                       model.weights[i], conv_dtype, row);
    }
  }
  return row;
}

}  // namespace kvcache::toy
