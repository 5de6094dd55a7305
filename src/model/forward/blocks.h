// src/model/forward/blocks.h - what a layer of the packed decoder is made of.
//
// Each block reads normed activations [N, hidden_size] and returns what is
// added to the residual stream, [N, hidden_size]; both in the running dtype.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "src/model/forward/gated_delta.h"
#include "src/model/forward/linear.h"
#include "src/model/forward/loader.h"
#include "src/model/forward/pass.h"
#include "src/model/forward/row_loops_table.h"

namespace kvcache::model {

class Normalisation {
 public:
  Normalisation(const ModelConfig& config, NormWeights weights);

  NormParameters parameters() const;
  int64_t width() const { return weight_.size(0); }

  // hidden += delta (unless undefined), then out = norm(hidden), for each
  // token.
  void add_and_apply(const Tensor& out, const Tensor& hidden,
                     const Tensor& delta, int64_t tokens) const;

 private:
  Tensor weight_, bias_;
  float eps_;
  bool centre_;
};

// What lets a token see earlier ones, between two linears: attention, or a
// state of fixed size.
class Mixer {
 public:
  Mixer(Linear input, Linear output)
      : input_(std::move(input)), output_(std::move(output)) {}
  Mixer(const Mixer&) = delete;
  Mixer& operator=(const Mixer&) = delete;
  virtual ~Mixer() = default;

  Tensor run(Pass& pass, int64_t layer) const;

  const Linear& input() const { return input_; }
  const Linear& output() const { return output_; }
  // What the output reads, [N, ...], from what the input made.
  virtual Tensor mix(Pass& pass, int64_t layer, const Tensor& in) const = 0;

 private:
  Linear input_, output_;
};

class Attention final : public Mixer {
 public:
  struct Parts {
    Linear qkv;  // rows of q, k, v below each other, then gates if any
    Linear output;
    std::optional<Normalisation> q_norm, k_norm;  // per head, before the turn
  };
  Attention(const ModelConfig& config, Parts parts);
  Tensor mix(Pass& pass, int64_t layer, const Tensor& qkv) const override;

 private:
  void turn(const Pass& pass, const Tensor& qkv) const;
  void gate(const Pass& pass, const Tensor& qkv, const Tensor& attended) const;

  std::optional<Normalisation> q_norm_, k_norm_;
  int64_t heads_, kv_heads_, head_dim_;
  bool gated_;  // each attended value times the sigmoid of one of its own
  AttendOptions options_;
};

// Linear attention by the gated delta rule.
class GatedDelta final : public Mixer {
 public:
  struct Parts {
    Linear inputs;  // rows of q | k | v | z | b | a
    Linear output;
    DeltaWeights weights;
  };
  GatedDelta(const ModelConfig& config, Parts parts);
  Tensor mix(Pass& pass, int64_t layer, const Tensor& inputs) const override;

 private:
  GatedDeltaCore core_;
};

class FeedForward {
 public:
  // `up`: rows of gate and up below each other if `gated`, else of up alone.
  FeedForward(const ModelConfig& config, Linear up, Linear down);
  Tensor run(Pass& pass, int64_t layer) const;

  const Linear& up() const { return up_; }
  const Linear& down() const { return down_; }
  bool gated() const { return gated_; }
  // The loop of activations of dtype T.
  template <typename T>
  typename RowLoops<T>::Activate loop() const;

 private:
  Linear up_, down_;
  Activation activation_;
  bool gated_;
};

struct Layer {
  Normalisation mixer_norm;
  std::unique_ptr<Mixer> mixer;
  Normalisation feed_forward_norm;
  FeedForward feed_forward;
};

}  // namespace kvcache::model
