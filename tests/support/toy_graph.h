// support/toy_graph.h - the toy model as a decoder wants it: its hidden states
// are the logits, so the vocabulary of what it answers is kWidth.
#pragma once

#include <ATen/ops/zeros.h>

#include <cstring>

#include "kvcache/graph_decoder.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {

inline GraphModel toy_graph_model(const Model& model, const Cache& cache,
                                  int64_t context = 1 << 20) {
  const ForwardOptions with = options_for(cache);
  return {
      .forward =
          [&model, with](const Tensor& ids, Step& step,
                         const GraphModel::Call& call) {
            const int64_t rows = step.rows(), tokens = step.tokens();
            const Tensor dense = ids.contiguous();
            const auto* id = dense.const_data_ptr<int64_t>();
            const auto* limit = step.limits().const_data_ptr<int64_t>();
            Ids live;
            for (int64_t i = 0; i < rows * tokens; ++i) {
              live.push_back(limit[i] > 0 ? static_cast<int>(id[i]) : kDead);
            }
            const Floats hidden = forward(model, step, live, with);
            Tensor out =
                at::zeros({rows, call.all_logits ? tokens : 1, kWidth});
            for (int64_t i = 0; i < rows * tokens; ++i) {
              if (limit[i] > 0) {
                std::memcpy(out.data_ptr<float>() +
                                (call.all_logits ? i : i / tokens) * kWidth,
                            hidden.data() + i * kWidth, kWidth * sizeof(float));
              }
            }
            return out;
          },
      .context = context,
      .vocab_size = kWidth};
}

// [B, T] int64 of rows of equal length.
inline Tensor ids_of(const std::vector<Ids>& rows) {
  Tensor ids = at::zeros(
      {static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size())},
      at::kLong);
  auto* id = ids.data_ptr<int64_t>();
  for (const Ids& row : rows) {
    for (const int token : row) {
      *id++ = token;
    }
  }
  return ids;
}

// Token t of row b out of [B, T, kWidth].
inline Floats logits_at(const Tensor& logits, int64_t row, int64_t t = 0) {
  const Tensor one = logits.select(0, row).select(0, t).contiguous();
  return {one.const_data_ptr<float>(), one.const_data_ptr<float>() + kWidth};
}

}  // namespace kvcache::toy
