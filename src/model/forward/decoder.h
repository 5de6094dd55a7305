// src/model/forward/decoder.h - the arithmetic of a Transformer.
//
// Two of them, one meaning. The packed one is for the CPU: own loops over
// packed weights, row-exact. The other is LibTorch's operators, for any device,
// and may be recorded in a CUDA graph.
#pragma once

#include <memory>
#include <vector>

#include "kvcache/model/transformer.h"
#include "src/model/forward/layer_memory.h"

namespace kvcache::model {

inline constexpr const char* kEmbedding = "token_embd.weight";
inline constexpr const char* kPositions = "position_embd.weight";

// Rows of the head that run together: bounds the memory of all_logits.
inline constexpr int64_t kHeadRows = 256;

// Adapters in the form that a decoder runs them.
class DecoderAdapters {
 public:
  DecoderAdapters() = default;
  DecoderAdapters(const DecoderAdapters&) = delete;
  DecoderAdapters& operator=(const DecoderAdapters&) = delete;
  virtual ~DecoderAdapters() = default;
};

// The tokens of a forward, [B, T] int64 each; alive where limits > 0.
struct Tokens {
  Tensor ids;        // any number where dead
  Tensor positions;  // 0 where dead
  Tensor limits;     // keys seen
  // Those that prepare() made, if options.adapters names any of them.
  const DecoderAdapters* adapters = nullptr;
};

// Tokens of each row that a forward of T tokens gives an output for.
inline int64_t outputs_per_row(const ForwardOptions& options, int64_t T) {
  if (options.logit_positions.defined()) return options.logit_positions.size(1);
  return options.all_logits || options.return_hidden ? T : 1;
}

// Numbers of one output: hidden_size, the vocabulary, or tokens chosen of it.
inline int64_t output_width(const ForwardOptions& options,
                            const ModelConfig& config) {
  if (options.return_hidden) return config.hidden_size;
  return options.logit_ids.defined() ? options.logit_ids.size(0)
                                     : config.vocab_size;
}

class Decoder {
 public:
  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  // Float32 logits or hidden states, see LanguageModel::forward(). Shapes are
  // checked, and so are ids and positions that lie on the CPU; `options` are
  // those of checked_options().
  virtual Tensor run(const Tokens& tokens, LayerMemory& memory,
                     const ForwardOptions& options) const = 0;
  // See Transformer.
  virtual bool row_exact() const noexcept = 0;
  virtual bool roles_agree() const noexcept = 0;
  virtual size_t weight_bytes() const noexcept = 0;
  // `adapters` are those of check_adapters().
  virtual std::shared_ptr<const DecoderAdapters> prepare(
      const std::vector<Adapter>& adapters) const = 0;
};

// What a decoder is made of; `config` must outlive it.
struct DecoderParts {
  const ModelConfig& config;
  std::shared_ptr<const WeightSource> source;
  at::ScalarType dtype;  // of K and V; of all if weights do not stay packed
  WeightPacking packing;
  at::Device device;
  const LoadOptions& options;

  bool packed() const { return packing != WeightPacking::kNone; }
};

std::unique_ptr<Decoder> make_packed_decoder(const DecoderParts& parts);
std::unique_ptr<Decoder> make_ops_decoder(const DecoderParts& parts);

}  // namespace kvcache::model
