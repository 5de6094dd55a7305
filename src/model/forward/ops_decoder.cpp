// src/model/forward/ops_decoder.cpp - the decoder by operators: embedding,
// layers, head.
//
// What must hold for a recorded step: shapes hang on B, T and the options only;
// no value comes back to the host or goes from it (a masked_fill instead of a
// where with a scalar, which would be copied over); every tensor that is not
// made anew each step is made at load. Numbers that are data, ids, positions
// and limits, are read on the device alone.
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <vector>

#include "src/model/forward/decoder.h"
#include "src/model/forward/low_rank.h"
#include "src/model/forward/ops_blocks.h"
#include "src/model/forward/ops_gated_delta.h"

namespace kvcache::model {
namespace {

struct OpsLayer {
  OpsNorm mixer_norm;
  std::unique_ptr<OpsMixer> mixer;
  OpsNorm feed_forward_norm;
  OpsFeedForward feed_forward;
};

// Rows of `table` for `indices` [B, T]: float32 [B, T, width].
Tensor rows_of(const Tensor& table, const Tensor& indices) {
  return table.index_select(0, indices.reshape(-1))
      .view({indices.size(0), indices.size(1), table.size(1)})
      .to(at::kFloat);
}

class OpsDecoder final : public Decoder {
 public:
  explicit OpsDecoder(const DecoderParts& parts);
  Tensor run(const Tokens& tokens, LayerMemory& memory,
             const ForwardOptions& options) const override;
  bool row_exact() const noexcept override { return false; }
  bool roles_agree() const noexcept override { return false; }
  size_t weight_bytes() const noexcept override { return weight_bytes_; }
  std::shared_ptr<const DecoderAdapters> prepare(
      const std::vector<Adapter>& adapters) const override {
    return std::make_shared<OpsAdapters>(adapters, config_, device_);
  }

 private:
  Tensor embed(const Tokens& tokens, const Tensor& dead,
               const Tensor& positions) const;
  void run_layers(const Tensor& hidden, OpsPass& pass, int64_t first,
                  int64_t last) const;
  Tensor chosen(const Tokens& tokens, const ForwardOptions& options) const;
  void write_logits(const Tensor& hidden, const Tensor& logit_ids,
                    const Tensor& logits) const;

  const ModelConfig& config_;
  at::Device device_;
  at::ScalarType dtype_;
  std::optional<OpsLinear> head_;
  std::vector<OpsLayer> layers_;
  std::optional<OpsNorm> final_norm_;
  std::optional<OpsRotary> rotary_;  // empty: learned positions
  Tensor embeddings_;                // [V, hidden_size], exact
  Tensor position_embeddings_;       // [context, hidden_size] or undefined
  size_t weight_bytes_ = 0;
};

// The table in the narrowest dtype that keeps the values of the file: they are
// added up in float32, as the packed decoder reads them from the file.
Tensor exact_table(const WeightSource& source, const char* name,
                   at::Device device) {
  const WeightInfo& info = source.info(name);
  const bool narrow = !info.quantised &&
                      (info.dtype == at::kBFloat16 || info.dtype == at::kHalf);
  const Tensor table = source.read(name, narrow ? info.dtype : at::kFloat);
  return table.to(table.options().device(device), /*non_blocking=*/false,
                  /*copy=*/true);
}

std::unique_ptr<OpsMixer> make_mixer(const ModelConfig& config, Loader& loader,
                                     int64_t layer, const OpsPlace& place) {
  if (config.layer_types[static_cast<size_t>(layer)] == LayerType::kLinear) {
    return std::make_unique<OpsGatedDelta>(config, loader, layer, place);
  }
  return std::make_unique<OpsAttention>(config, loader, layer, place);
}

OpsDecoder::OpsDecoder(const DecoderParts& parts)
    : config_(parts.config), device_(parts.device), dtype_(parts.dtype) {
  const OpsPlace place{dtype_, device_};
  const WeightSource& source = *parts.source;
  Loader loader(config_, source, dtype_, parts.options);
  head_.emplace(loader.head(), place);
  loader.finished();
  for (int64_t i = 0; i < config_.layers; ++i) {
    // In the order of use, and in braces: evaluated from left to right.
    layers_.push_back(
        OpsLayer{OpsNorm(config_, loader.attention_norm(i), device_),
                 make_mixer(config_, loader, i, place),
                 OpsNorm(config_, loader.feed_forward_norm(i), device_),
                 OpsFeedForward(config_, loader, i, place)});
  }
  final_norm_.emplace(config_, loader.final_norm(), device_);
  weight_bytes_ = loader.bytes();
  // A tied head serves as the table where it has every bit of the file.
  const WeightInfo& info = source.info(kEmbedding);
  const bool exact =
      dtype_ == at::kFloat || (!info.quantised && info.dtype == dtype_);
  embeddings_ = config_.tie_word_embeddings && exact
                    ? head_->weight()
                    : exact_table(source, kEmbedding, device_);
  if (config_.positions == Positions::kRotary) {
    rotary_.emplace(config_, device_);
  } else {
    position_embeddings_ = exact_table(source, kPositions, device_);
  }
}

// Dead tokens are 0, whatever their ids.
Tensor OpsDecoder::embed(const Tokens& tokens, const Tensor& dead,
                         const Tensor& positions) const {
  const Tensor ids =
      tokens.ids.masked_fill(dead, 0).clamp(0, config_.vocab_size - 1);
  Tensor hidden = rows_of(embeddings_, ids);
  if (position_embeddings_.defined()) {
    hidden.add_(rows_of(position_embeddings_, positions));
  }
  return hidden.masked_fill_(dead.unsqueeze(-1), 0);
}

void OpsDecoder::write_logits(const Tensor& hidden, const Tensor& logit_ids,
                              const Tensor& logits) const {
  const OpsLinear head =
      logit_ids.defined()
          ? head_->outputs_of(logit_ids.clamp(0, config_.vocab_size - 1))
          : *head_;
  const Tensor from = hidden.view({-1, hidden.size(-1)});
  const Tensor to = logits.view({-1, logits.size(-1)});
  for (int64_t first = 0; first < to.size(0); first += kHeadRows) {
    const int64_t rows = std::min(kHeadRows, to.size(0) - first);
    const Tensor normed = (*final_norm_)(from.narrow(0, first, rows));
    to.narrow(0, first, rows).copy_(head(normed.to(dtype_)));
  }
}

// The tokens that outputs are wanted of, [B, n]; undefined: each one. No number
// (-1) gives 0, as a dead token does.
Tensor OpsDecoder::chosen(const Tokens& tokens,
                          const ForwardOptions& options) const {
  const int64_t T = tokens.ids.size(1);
  if (options.logit_positions.defined()) return options.logit_positions;
  if (outputs_per_row(options, T) == T) return {};
  // The last live token has the largest limit of its row.
  return tokens.limits.argmax(1, /*keepdim=*/true);
}

void OpsDecoder::run_layers(const Tensor& hidden, OpsPass& pass, int64_t first,
                            int64_t last) const {
  for (int64_t i = first; i < last; ++i) {
    const OpsLayer& layer = layers_[static_cast<size_t>(i)];
    hidden.add_(layer.mixer->run(layer.mixer_norm(hidden).to(dtype_), pass, i));
    hidden.add_(layer.feed_forward.run(
        layer.feed_forward_norm(hidden).to(dtype_), pass, i));
  }
}

Tensor OpsDecoder::run(const Tokens& tokens, LayerMemory& memory,
                       const ForwardOptions& options) const {
  const int64_t B = tokens.ids.size(0), T = tokens.ids.size(1);
  // Made outside of inference mode, so that a caller may change it in place.
  Tensor out = at::empty(
      {B, outputs_per_row(options, T), output_width(options, config_)},
      at::TensorOptions(at::kFloat).device(device_));
  const c10::InferenceMode inference;
  Tensor dead = tokens.limits.le(0);
  const Tensor positions =
      tokens.positions.clamp(0, config_.context_length - 1);
  OpsPass pass{memory, options.role, dead, {}};
  if (rotary_) pass.turn = rotary_->turn(positions);
  std::optional<RowAdapters> adapters;
  if (tokens.adapters != nullptr) {
    adapters.emplace(static_cast<const OpsAdapters&>(*tokens.adapters),
                     tokens.positions, options);
    pass.adapters = &*adapters;
  }

  Tensor hidden = options.hidden.defined()
                      ? options.hidden.masked_fill(dead.unsqueeze(-1), 0)
                      : embed(tokens, dead, positions);
  run_layers(hidden, pass, options.first_layer, *options.last_layer);
  if (const Tensor which = chosen(tokens, options); which.defined()) {
    const Tensor index = which.clamp(0, T - 1);
    dead = dead.gather(1, index).logical_or(which.lt(0));
    hidden = hidden.gather(
        1, index.unsqueeze(-1).expand({B, -1, config_.hidden_size}));
  }
  if (options.return_hidden) {
    out.copy_(hidden);
  } else {
    write_logits(hidden, options.logit_ids, out);
  }
  return out.masked_fill_(dead.unsqueeze(-1), 0);
}

}  // namespace

std::unique_ptr<Decoder> make_ops_decoder(const DecoderParts& parts) {
  return std::make_unique<OpsDecoder>(parts);
}

}  // namespace kvcache::model
