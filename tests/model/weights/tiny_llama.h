// tests/model/weights/tiny_llama.h - T-LL: a Llama of 2 layers, both formats.
//
// Hidden 32, 4 query and 2 key/value heads of 8, vocabulary 64, feed-forward
// 48. Values are small integers, so float32 and bfloat16 hold them exactly.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/model/safetensors.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temp_folder.h"

namespace kvcache::testing {

inline constexpr int64_t kLayers = 2;
inline constexpr int64_t kHeads = 4;
inline constexpr int64_t kKvHeads = 2;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Every value says which tensor and which place it comes from.
inline at::Tensor numbered(std::vector<int64_t> shape, int seed) {
  at::Tensor tensor = at::empty(shape, at::kFloat);
  for (int64_t i = 0; i < tensor.numel(); ++i)
    tensor.data_ptr<float>()[i] =
        static_cast<float>((i * 31 + seed * 17) % 251 - 125);
  return tensor;
}

// The tensors under their Hugging Face names. With `bias`, q and k have one.
inline NamedTensors tiny_llama_tensors(bool head = true, bool bias = false) {
  NamedTensors out;
  int seed = 0;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    out.emplace_back(name, numbered(std::move(shape), ++seed));
  };
  add("model.embed_tokens.weight", {64, 32});
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    add(at + "input_layernorm.weight", {32});
    for (const auto& [name, rows] :
         {std::pair<const char*, int64_t>{"q_proj", 32},
          {"k_proj", 16},
          {"v_proj", 16},
          {"o_proj", 32}}) {
      add(at + "self_attn." + name + ".weight", {rows, 32});
      if (bias) add(at + "self_attn." + name + ".bias", {rows});
    }
    add(at + "post_attention_layernorm.weight", {32});
    add(at + "mlp.gate_proj.weight", {48, 32});
    add(at + "mlp.up_proj.weight", {48, 32});
    add(at + "mlp.down_proj.weight", {32, 48});
  }
  add("model.norm.weight", {32});
  if (head) add("lm_head.weight", {64, 32});
  return out;
}

// config.json of it; `more` goes in front of the closing brace and may
// overrule nothing: keys must not stand twice.
inline std::string tiny_llama_config(const std::string& tie = "false",
                                     const std::string& more = "") {
  return R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 32,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 48, "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
  "eos_token_id": 5, "bos_token_id": 1, "tie_word_embeddings": )" +
         tie + more + "}";
}

inline void write_tiny_llama(const TempFolder& folder,
                             const NamedTensors& tensors,
                             const std::string& config) {
  folder.write("config.json", config);
  model::write_safetensors(folder.path() / "model.safetensors", tensors);
}

// Rows of each head from halves (i, i + 4) to neighbours (2i, 2i + 1), as the
// converter of llama.cpp does for this architecture.
inline std::vector<float> neighbours(const at::Tensor& tensor, int64_t heads) {
  const int64_t rows = tensor.size(0);
  const int64_t width = tensor.numel() / rows;
  const int64_t half = rows / heads / 2;
  std::vector<float> out;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t i = 0; i < half; ++i)
      for (int64_t side = 0; side < 2; ++side) {
        const float* row =
            tensor.data_ptr<float>() + ((head * 2 + side) * half + i) * width;
        out.insert(out.end(), row, row + width);
      }
  return out;
}

// Metadata of the GGUF twin.
inline GgufWriter tiny_llama_keys() {
  GgufWriter file;
  file.text("general.architecture", "llama");
  file.u32("llama.block_count", 2).u32("llama.context_length", 128);
  file.u32("llama.embedding_length", 32).u32("llama.feed_forward_length", 48);
  file.u32("llama.attention.head_count", 4);
  file.u32("llama.attention.head_count_kv", 2);
  file.f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  file.f32("llama.rope.freq_base", 10000.0F);
  file.u32("llama.rope.dimension_count", 8).u32("llama.vocab_size", 64);
  file.u32("tokenizer.ggml.eos_token_id", 5);
  file.u32("tokenizer.ggml.bos_token_id", 1);
  return file;
}

// The name that llama.cpp's converter gives a tensor.
inline std::string gguf_name(const std::string& name) {
  static const std::vector<std::pair<std::string, std::string>> kParts{
      {"model.embed_tokens", "token_embd"},
      {"model.norm", "output_norm"},
      {"lm_head", "output"},
      {"model.layers.", "blk."},
      {"self_attn.q_proj", "attn_q"},
      {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},
      {"self_attn.o_proj", "attn_output"},
      {"input_layernorm", "attn_norm"},
      {"post_attention_layernorm", "ffn_norm"},
      {"mlp.gate_proj", "ffn_gate"},
      {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  std::string out = name;
  for (const auto& [from, to] : kParts)
    if (const size_t at = out.find(from); at != std::string::npos)
      out.replace(at, from.size(), to);
  return out;
}

inline GgufWriter tiny_llama_gguf(const NamedTensors& tensors) {
  GgufWriter file = tiny_llama_keys();
  for (const auto& [name, tensor] : tensors) {
    const std::string to = gguf_name(name);
    int64_t heads = 0;
    if (to.find("attn_q.") != std::string::npos) heads = kHeads;
    if (to.find("attn_k.") != std::string::npos) heads = kKvHeads;
    const float* data = tensor.data_ptr<float>();
    file.floats(to, {tensor.sizes().rbegin(), tensor.sizes().rend()},
                heads > 0 ? neighbours(tensor, heads)
                          : std::vector<float>(data, data + tensor.numel()));
  }
  return file;
}

}  // namespace kvcache::testing
