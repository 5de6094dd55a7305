// src/model/forward/loader.h - the blocks of a decoder, made from its weights.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/model/transformer.h"
#include "src/model/forward/blocks.h"

namespace kvcache::model {

// Reads, packs and probes one tensor after the other, so that no more than one
// of them is in memory twice.
class Loader {
 public:
  Loader(const ModelConfig& config, const WeightSource& source,
         at::ScalarType dtype, const LoadOptions& options);

  PackedLinear head();
  Normalisation final_norm() { return norm("output_norm"); }
  Layer layer(int64_t index);

  // Of everything made so far.
  size_t bytes() const noexcept { return bytes_; }
  bool row_exact() const noexcept { return row_exact_; }

 private:
  std::unique_ptr<Mixer> attention(const std::string& prefix);
  FeedForward feed_forward(const std::string& prefix);
  Normalisation norm(const std::string& name);
  // The named matrices below each other; biases likewise, all or none.
  PackedLinear linear(const std::vector<std::string>& names);
  Tensor stacked(const std::vector<std::string>& names) const;
  Tensor stacked_biases(const std::vector<std::string>& names) const;
  void probe(const PackedLinear& linear);

  const ModelConfig& config_;
  const WeightSource& source_;
  at::ScalarType dtype_;
  const LoadOptions& options_;
  size_t bytes_ = 0;
  int64_t values_ = 0;  // made, for progress
  int64_t all_values_ = 0;
  bool row_exact_ = true;
  std::set<std::pair<int64_t, int64_t>> probed_;  // outputs, inputs
};

}  // namespace kvcache::model
