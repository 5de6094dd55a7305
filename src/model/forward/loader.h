// src/model/forward/loader.h - the weights of a decoder, one piece at a time.
#pragma once

#include <string>
#include <vector>

#include "kvcache/model/transformer.h"
#include "src/model/packed/row_piece.h"

namespace kvcache::model {

// What a linear is made of, on the CPU; may lie on the mapped file.
struct LinearWeights {
  Tensor weight;                    // [N, K]; undefined if weights stay packed
  Tensor bias;                      // [N] in the same dtype, or undefined
  std::vector<RowPiece> rows = {};  // of the file, in place of `weight`
};

// Float32 copies, on the CPU.
struct NormWeights {
  Tensor weight;  // [width]; 1 + w of Norm::kRmsPlusOne is made here
  Tensor bias;    // [width] or undefined
};

// The rest of a linear-attention layer. Float32 copies, on the CPU.
struct DeltaWeights {
  Tensor conv;     // [channels, taps], the current token's last
  Tensor decay;    // [value heads], -exp(A_log)
  Tensor dt_bias;  // [value heads]
  Tensor norm;     // [value head size], as it is whatever the model's Norm
};

// Reads in the order it is asked, so that whoever packs or moves each piece
// before the next has no more than one of them in memory twice.
class Loader {
 public:
  Loader(const ModelConfig& config, const WeightSource& source,
         at::ScalarType dtype, const LoadOptions& options,
         bool stays_packed = false);

  LinearWeights head();
  std::string head_name() const;  // without ".weight"
  // Rows of q, k, v below each other, then those of the gates if there are.
  LinearWeights qkv(int64_t layer);
  LinearWeights attention_output(int64_t layer);
  // Of linear attention: rows of q | k | v | z | b | a.
  LinearWeights delta_inputs(int64_t layer);
  LinearWeights delta_output(int64_t layer);
  DeltaWeights delta(int64_t layer);
  LinearWeights up(int64_t layer);  // rows of gate, then of up, if gated
  LinearWeights down(int64_t layer);

  NormWeights final_norm() { return norm("output_norm"); }
  NormWeights attention_norm(int64_t layer);
  NormWeights q_norm(int64_t layer);
  NormWeights k_norm(int64_t layer);
  NormWeights feed_forward_norm(int64_t layer);

  // A linear is where it belongs: its pages of the file are given back.
  void finished() const;

  // Of linears and norms read so far, in the dtype they run in; of weights that
  // stay packed the biases alone.
  size_t bytes() const noexcept { return bytes_; }

 private:
  NormWeights norm(const std::string& name);
  Tensor copy(const std::string& name);
  // Of rows [heads, q | gate, ...] all of q, then all gates.
  Tensor gates_apart(const Tensor& rows) const;
  LinearWeights gated_qkv(const std::string& prefix);
  std::vector<RowPiece> gated_rows(const std::string& prefix) const;
  void count(const LinearWeights& weights);
  // The named matrices below each other; biases likewise, all or none.
  LinearWeights linear(const std::vector<std::string>& names);
  Tensor stacked(const std::vector<std::string>& names) const;
  Tensor stacked_biases(const std::vector<std::string>& names) const;

  const ModelConfig& config_;
  const WeightSource& source_;
  at::ScalarType dtype_;
  const LoadOptions& options_;
  bool stays_packed_;
  size_t bytes_ = 0;
  int64_t values_ = 0;  // read, for progress
  int64_t all_values_ = 0;
};

}  // namespace kvcache::model
