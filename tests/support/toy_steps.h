// support/toy_steps.h - short ways to feed a toy model through a cache, and to
// say what a cache holds.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/toy_forward.h"
#include "tests/support/toy_kinds.h"
#include "tests/support/toy_oracle.h"

namespace kvcache::toy {

using Ids = std::vector<int>;

inline CacheSpec spec_of(const Model& model, int64_t rows = 1,
                         int64_t capacity = 16,
                         at::ScalarType dtype = at::kFloat) {
  return {.rows = rows,
          .capacity = capacity,
          .dtype = dtype,
          .first_layer = model.first_layer,
          .layers = model.layers};
}

inline ForwardOptions options_for(const Cache& cache, bool fused = false) {
  const CacheSpec& spec = cache.spec();
  return {.fused = fused,
          .dtype = spec.dtype,
          .conv_dtype = spec.conv_dtype.value_or(spec.dtype)};
}

inline OracleRow oracle_for(const Cache& cache, const Model& model,
                            const Ids& ids) {
  const ForwardOptions with = options_for(cache);
  return oracle(model, ids, with.dtype, with.conv_dtype,
                cache.spec().kv_format);
}

// The last `count` tokens' hidden states after `ids`, by the oracle.
inline Floats last_of(const Cache& cache, const Model& model, const Ids& ids,
                      size_t count) {
  const Floats all = oracle_for(cache, model, ids).hidden;
  return {all.end() - static_cast<std::ptrdiff_t>(count * kWidth), all.end()};
}

// Right-padded ids of a step, one list per row.
struct Padded {
  explicit Padded(const std::vector<Ids>& rows) {
    for (const Ids& row : rows) {
      tokens = std::max(tokens, static_cast<int64_t>(row.size()));
    }
    for (const Ids& row : rows) {
      count.push_back(static_cast<int64_t>(row.size()));
      ids.insert(ids.end(), row.begin(), row.end());
      ids.resize(count.size() * static_cast<size_t>(tokens), kDead);
    }
  }
  StepSpec spec() const { return {.tokens = tokens, .count = count}; }
  int64_t tokens = 1;
  std::vector<int64_t> count;
  Ids ids;
};

// One committed step; the live tokens' hidden states of each row.
inline std::vector<Floats> feed(Cache& cache, const Model& model,
                                const std::vector<Ids>& rows,
                                bool fused = false) {
  const Padded padded(rows);
  Step step = cache.begin_step(padded.spec());
  const Floats hidden =
      forward(model, step, padded.ids, options_for(cache, fused));
  step.commit();
  std::vector<Floats> live;
  for (size_t row = 0; row < rows.size(); ++row) {
    const auto first = hidden.begin() + static_cast<std::ptrdiff_t>(
                                            row * padded.tokens * kWidth);
    live.emplace_back(
        first, first + static_cast<std::ptrdiff_t>(rows[row].size() * kWidth));
  }
  return live;
}

// One committed step of `ids` in one row, beside the others.
inline void feed_row(Cache& cache, const Model& model, int64_t row,
                     const Ids& ids, bool state_window = false) {
  Step step = cache.begin_step({.tokens = static_cast<int64_t>(ids.size()),
                                .first_row = row,
                                .rows = 1,
                                .state_window = state_window});
  forward(model, step, ids, options_for(cache));
  step.commit();
}

// The same tokens in every row.
inline std::vector<Floats> feed_all(Cache& cache, const Model& model,
                                    const Ids& ids, bool fused = false) {
  return feed(cache, model,
              std::vector<Ids>(static_cast<size_t>(cache.spec().rows), ids),
              fused);
}

inline Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// `count` ids, others for another `seed`.
inline Ids some_ids(size_t count, int seed = 0) {
  Ids ids;
  for (size_t i = 0; i < count; ++i) {
    // No two seeds below the vocabulary begin alike; larger ones differ later.
    const auto from = static_cast<size_t>(seed);
    ids.push_back(static_cast<int>(
        (i * 5 + i * i * 3 + from + i * (from / kVocabulary) * 2) %
        kVocabulary));
  }
  return ids;
}

inline std::string bytes_of(const Tensor& t) {
  if (!t.defined()) {
    return "-";
  }
  const Tensor dense = t.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

inline std::string bytes_of(const Checkpoint& from) {
  std::string all = std::to_string(from.length) + ':';
  for (const KvTensors& pair : from.kv) {
    all += bytes_of(pair.k) + bytes_of(pair.v);
  }
  for (const auto& point : from.points) {
    all += std::to_string(point->position) + bytes_of(point->conv) +
           bytes_of(point->state);
  }
  return all;
}

// Every value that a cache holds, its lengths and its restore points, as a
// short text: equal texts for equal bytes.
inline std::string picture(const Cache& cache) {
  std::string all;
  for (int64_t row = 0; row < cache.spec().rows; ++row) {
    const Checkpoint held = cache.checkpoint(row);
    all += std::to_string(held.length) + " tokens, " +
           std::to_string(held.points.size()) + " points, bytes " +
           std::to_string(std::hash<std::string>{}(bytes_of(held))) + "; ";
  }
  return all;
}

// The text that `call` throws; empty if it does not.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

}  // namespace kvcache::toy
