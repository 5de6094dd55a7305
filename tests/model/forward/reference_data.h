// reference_data.h - models of tests/reference/data, their numbers, and runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "kvcache/concat_cache.h"
#include "kvcache/model/transformer.h"
#include "kvcache/preallocated_cache.h"

namespace kvcache::testing {

using model::Transformer;
using Ids = std::vector<int64_t>;

inline std::string data_path(const std::string& name) {
  return "tests/reference/data/" + name;
}

inline nlohmann::json read_json(const std::string& name) {
  std::ifstream file(data_path(name));
  return nlohmann::json::parse(file);
}

inline std::shared_ptr<const Transformer> load_tiny(
    const std::string& name, at::ScalarType dtype = at::kFloat,
    model::WeightPacking packing = model::WeightPacking::kNone) {
  return model::load_model(data_path(name),
                           {.dtype = dtype, .packing = packing});
}

// What a forward runs in.
struct Running {
  const char* name;
  at::ScalarType dtype;  // of K and V
  model::WeightPacking packing = model::WeightPacking::kNone;
};
inline constexpr Running kRunnings[] = {
    {"Float", at::kFloat},
    {"BFloat16", at::kBFloat16},
    {"Packed", at::kBFloat16, model::WeightPacking::kAuto}};

// [1, T] of token ids.
inline Tensor as_row(std::span<const int64_t> ids) {
  return at::tensor(at::ArrayRef<int64_t>(ids.data(), ids.size()), at::kLong)
      .view({1, -1});
}

// Log-probability of each token after the first, from logits [T, V].
inline std::vector<double> log_probs(const Tensor& logits, const Ids& tokens) {
  const Tensor all = at::log_softmax(logits.to(at::kDouble), -1);
  std::vector<double> found;
  for (size_t i = 1; i < tokens.size(); ++i) {
    found.push_back(all[static_cast<int64_t>(i) - 1][tokens[i]].item<double>());
  }
  return found;
}

inline double largest_difference(const std::vector<double>& a,
                                 const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double each = std::abs(a[i] - b[i]);
    if (!(each <= largest)) largest = each;  // a NaN stays
  }
  return largest;
}

enum class Kind { kNone, kConcat, kPreallocated };

inline std::unique_ptr<Cache> make_cache(Kind kind, const Transformer& model,
                                         int64_t rows, int64_t capacity) {
  if (kind == Kind::kConcat) {
    return std::make_unique<ConcatCache>(model.cache_spec(rows, {}));
  }
  return std::make_unique<PreallocatedCache>(model.cache_spec(rows, capacity));
}

// One step of [B, T] ids, committed.
inline Tensor step(const Transformer& model, Cache& cache, const Tensor& ids,
                   bool all_logits = true, std::span<const int64_t> skip = {},
                   std::span<const int64_t> count = {}) {
  Step open =
      cache.begin_step({.tokens = ids.size(1), .skip = skip, .count = count});
  Tensor logits = model.forward(ids, open, {.all_logits = all_logits});
  open.commit();
  return logits;
}

// All logits [T, V] of one sequence, prefilled in steps of `chunk` tokens.
inline Tensor all_logits(const Transformer& model, const Ids& tokens, Kind kind,
                         int64_t chunk) {
  const Tensor ids = as_row(tokens);
  if (kind == Kind::kNone) return model.forward(ids, {.all_logits = true})[0];
  const auto cache =
      make_cache(kind, model, 1, static_cast<int64_t>(tokens.size()));
  std::vector<Tensor> parts;
  for (int64_t at = 0; at < ids.size(1); at += chunk) {
    const int64_t count = std::min(chunk, ids.size(1) - at);
    parts.push_back(step(model, *cache, ids.narrow(1, at, count))[0]);
  }
  return at::cat(parts);
}

// The arg-max of each of `count` steps after `tokens`.
inline Ids greedy(const Transformer& model, const Ids& tokens, Kind kind,
                  int64_t count) {
  const auto best = [](const Tensor& logits) {
    return logits.argmax(-1).view({-1})[0].item<int64_t>();
  };
  Ids all = tokens;
  if (kind == Kind::kNone) {
    for (int64_t i = 0; i < count; ++i) {
      all.push_back(best(model.forward(as_row(all), {})));
    }
  } else {
    const auto cache =
        make_cache(kind, model, 1, static_cast<int64_t>(tokens.size()) + count);
    all.push_back(best(step(model, *cache, as_row(tokens), false)));
    for (int64_t i = 1; i < count; ++i) {
      all.push_back(best(step(model, *cache, as_row({&all.back(), 1}), false)));
    }
  }
  return {all.begin() + static_cast<std::ptrdiff_t>(tokens.size()), all.end()};
}

}  // namespace kvcache::testing
