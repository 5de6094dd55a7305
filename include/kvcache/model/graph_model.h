// kvcache/model/graph_model.h - a language model as GraphDecoder wants it, and
// sampling inside of a recorded step.
//
// B rows, V vocabulary, N steps of a replay.
#pragma once

#include "kvcache/graph_decoder.h"
#include "kvcache/model/language_model.h"
#include "kvcache/model/sampler.h"

namespace kvcache::model {

// `model` must outlive what is made of it.
GraphModel graph_model(const LanguageModel& model);

struct GraphSamplingOptions {
  int64_t rows = 1;   // B
  int64_t steps = 1;  // N
  int64_t vocab_size = 0;
  at::Device device = at::kCPU;
  // What a row may ask for; each costs every step of every row.
  bool draws = false;      // a temperature above 0
  bool filters = false;    // top-k, top-p or min-p: a sort of V
  bool penalties = false;  // a repetition penalty
};

// Sampler's arithmetic by ATen ops: the same filters in the same order, and the
// same draw for the same random number, which comes from the host before the
// replay. Chances are added up in another order than Sampler's, so that a draw
// within 1e-12 of a border between two tokens may differ.
class GraphSampling {
 public:
  explicit GraphSampling(const GraphSamplingOptions& options);

  // Before a replay: what row `row` samples by, which tokens it has seen, and
  // the random numbers of its next tokens, at most N, taken from `sampler`.
  // Throws if the row asks for what GraphSamplingOptions leaves out.
  void set_row(int64_t row, const SamplingOptions& options, Sampler& sampler,
               std::span<const int64_t> history);

  // Inside of a step: `logits` [B, V] float32 -> [B] int64.
  Tensor sample(const Tensor& logits, int64_t repeat) const;
  GraphSampler sampler() const;  // the same; this object must outlive it
  std::vector<Tensor> inputs() const;

 private:
  Tensor filtered(const Tensor& logits, const Tensor& weights) const;

  GraphSamplingOptions options_;
  Tensor temperature_, top_p_, min_p_;  // [B, 1] float64
  Tensor penalty_;                      // [B, 1] float32
  Tensor top_k_;                        // [B, 1] int64
  Tensor uniform_;                      // [N, B, 1] float64
  Tensor seen_;                         // [B, V] bool
};

}  // namespace kvcache::model
