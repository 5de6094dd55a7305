// kvcache/model/config.h - what a decoder is made of, whatever file said it.
//
// One configuration for every family (gpt2, llama, mistral, qwen2, qwen3, and
// the text model of qwen3_5): the forward builds its blocks from these fields
// and never asks for a name.
// Source: the configuration classes of Hugging Face transformers (defaults
// included) and the metadata keys of the GGUF specification.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/model/log.h"

namespace kvcache::model {

class GgufFile;

enum class Norm {
  kRms,         // x / rms(x) * w
  kRmsPlusOne,  // x / rms(x) * (1 + w)
  kLayer,       // mean removed, weight and bias
};

enum class Positions {
  kRotary,   // q and k are turned; half rotation order, also for GGUF files
  kLearned,  // a table added to the embeddings
};

enum class Activation {
  kSilu,
  kGelu,      // exact, by erf
  kGeluTanh,  // "gelu_new", "gelu_pytorch_tanh"
};

enum class LayerType {
  kFull,     // attention over all earlier tokens
  kSliding,  // attention over the last sliding_window tokens
  kLinear,   // gated delta rule with a short convolution
};

enum class RopeScaling { kNone, kLinear, kLlama3 };

struct RopeConfig {
  double theta = 10000.0;
  int64_t rotary_dim = 0;  // leading values of a head that are turned
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;            // linear, llama3
  double low_freq_factor = 1.0;   // llama3
  double high_freq_factor = 4.0;  // llama3
  int64_t original_context = 0;   // llama3, tokens
  // What GGUF stores in place of a llama3 block: [rotary_dim / 2], each
  // frequency is divided by its value. Empty: none.
  std::vector<float> divisors{};
};

// Radians per position of each pair, [rotary_dim / 2], scaling applied.
std::vector<float> inverse_frequencies(const RopeConfig& rope);

// The sizes of the linear-attention layers of a hybrid model.
struct LinearAttentionConfig {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_head_dim = 0;
  int64_t value_head_dim = 0;
  int64_t conv_kernel = 0;  // taps of the short convolution

  int64_t key_size() const { return key_heads * key_head_dim; }
  int64_t value_size() const { return value_heads * value_head_dim; }
  // Channels of the convolution: q, k and v.
  int64_t conv_channels() const { return 2 * key_size() + value_size(); }
};

struct ModelConfig {
  std::string architecture;  // "llama": the file's own word, for people
  std::string source;        // the file it was read from, for messages

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t layers = 0;
  int64_t heads = 0;     // query heads
  int64_t kv_heads = 0;  // key/value heads, divides heads
  int64_t head_dim = 0;
  int64_t intermediate_size = 0;
  int64_t context_length = 0;  // tokens

  Norm norm = Norm::kRms;
  double norm_eps = 1e-6;
  Positions positions = Positions::kRotary;
  RopeConfig rope;  // of Positions::kRotary

  bool fused_qkv = false;  // one tensor, rows q then k then v
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  bool qk_norm = false;      // RMS per head on q and k, before the rotation
  bool output_gate = false;  // q's projection carries a gate of equal size
  std::optional<double> attention_scale;  // 1 / sqrt(head_dim) if empty

  Activation activation = Activation::kSilu;
  bool gated_mlp = true;  // down(act(gate(x)) * up(x)), else down(act(up(x)))

  std::vector<LayerType> layer_types;     // [layers]
  std::optional<int64_t> sliding_window;  // tokens, of LayerType::kSliding
  std::optional<LinearAttentionConfig> linear_attention;

  bool tie_word_embeddings = false;  // the head is the embedding table
  std::vector<int64_t> eos_ids;      // every declared end token, no duplicates
  std::optional<int64_t> bos_id;

  int64_t query_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }

  // Throws if a number is out of bounds or two of them contradict each other.
  void validate() const;
};

// Reads `folder`/config.json and, for end tokens, generation_config.json. Of a
// model that sees (qwen3_5), the text part.
// End tokens outside the vocabulary are dropped with a warning: no such token
// can be sampled, and transformers writes its defaults into every small model.
ModelConfig config_from_json(const std::filesystem::path& folder,
                             const OpenOptions& options = {});

// The norms of a hybrid are Norm::kRms here: the file holds 1 + w.
ModelConfig config_from_gguf(const GgufFile& file);

}  // namespace kvcache::model
