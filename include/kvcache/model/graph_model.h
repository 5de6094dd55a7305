// kvcache/model/graph_model.h - a language model as GraphDecoder wants it, and
// sampling inside of a recorded step.
//
// B rows, V vocabulary, N steps of a replay.
#pragma once

#include "kvcache/graph_decoder.h"
#include "kvcache/model/language_model.h"
#include "kvcache/model/sampler.h"

namespace kvcache::model {

// The adapters that the rows of recorded steps run with: numbers that a replay
// reads. Nothing of a model without adapters.
class GraphAdapters {
 public:
  GraphAdapters() = default;
  GraphAdapters(const LanguageModel& model, int64_t rows);

  // As in ForwardOptions, for the steps to come.
  void set_row(int64_t row, int64_t adapter, int64_t from) const;
  // `options` of a forward over rows [first, first + rows).
  ForwardOptions in(ForwardOptions options, int64_t first, int64_t rows) const;
  int64_t rows() const { return index_.defined() ? index_.size(0) : 0; }

 private:
  Tensor index_, from_;  // [B] int64 on the model's device, or undefined
};

// `model` must outlive what is made of it. With `adapters` of as many rows as
// the cache has.
GraphModel graph_model(const LanguageModel& model,
                       const GraphAdapters& adapters = {});

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

  // Inside of a step: `logits` [B, V] float32 -> [B] int64. Rows that are not
  // `live` [B] bool have seen nothing new.
  Tensor sample(const Tensor& logits, const Tensor& live, int64_t repeat) const;
  GraphSampler sampler() const;  // the same; this object must outlive it
  std::vector<Tensor> inputs() const;

 private:
  Tensor filtered(const Tensor& logits, const Tensor& weights) const;

  GraphSamplingOptions options_;
  Tensor temperature_, top_p_, min_p_, penalty_;  // [B, 1] float64
  Tensor top_k_;                                  // [B, 1] int64
  Tensor uniform_;                                // [N, B, 1] float64
  Tensor seen_;                                   // [B, V] bool
};

struct GraphRunnerOptions {
  // Null: plain steps, no static window.
  std::shared_ptr<GraphBackend> backend = eager_graphs();
  std::optional<size_t> byte_budget = {};  // of all graphs
  // More than 1: that many tokens are fed and sampled in one replay, and read
  // together. A text that ends inside of them is cut there.
  int64_t steps_per_replay = 1;
  SamplingOptions sampling = {};         // of the texts to come
  std::vector<int64_t> end_tokens = {};  // that end a replay early
};

// What generate() decodes by, in the place of plain steps: recorded steps over
// a cache of one row, and sampling inside of them. Both must outlive it. The
// graphs of one text serve the next ones.
class GraphRunner {
 public:
  GraphRunner(const LanguageModel& model, WindowCache& cache,
              GraphRunnerOptions options = {});
  GraphRunner(const GraphRunner&) = delete;  // the decoder refers to sampling_
  GraphRunner& operator=(const GraphRunner&) = delete;

  int64_t steps_per_replay() const noexcept { return steps_; }
  GraphDecoder& decoder() noexcept { return decoder_; }
  GraphSampling& sampling() noexcept { return sampling_; }
  // Of the text to come, as in ForwardOptions.
  void set_adapter(int64_t adapter, int64_t from) const {
    adapters_.set_row(0, adapter, from);
  }

 private:
  int64_t steps_;
  GraphSampling sampling_;
  GraphAdapters adapters_;
  GraphDecoder decoder_;
};

}  // namespace kvcache::model
