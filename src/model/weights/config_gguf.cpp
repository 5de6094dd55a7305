// config_gguf.cpp - a configuration from the metadata of a
// GGUF file.
//
// Keys: docs/gguf.md of ggml. What the keys leave open (biases, a head of its
// own) is read off the presence of tensors, as llama.cpp does.

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "kvcache/model/config.h"
#include "kvcache/model/gguf.h"
#include "src/model/weights/config_bounds.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

// Keys below the architecture's own prefix.
class Keys {
 public:
  Keys(const GgufFile& file, std::string prefix)
      : file_(file), prefix_(std::move(prefix) + ".") {}

  std::optional<int64_t> integer(const char* key) const {
    return file_.find_integer(prefix_ + key);
  }
  int64_t required(const char* key) const {
    return file_.integer(prefix_ + key);
  }
  std::optional<double> number(const char* key) const {
    return file_.find_number(prefix_ + key);
  }
  double required_number(const char* key) const {
    return file_.number(prefix_ + key);
  }
  std::optional<std::string_view> text(const char* key) const {
    return file_.find_string(prefix_ + key);
  }
  std::optional<std::vector<bool>> flags(const char* key) const {
    return file_.find_bools(prefix_ + key);
  }
  // A number, or one per layer that all are the same.
  std::optional<int64_t> per_layer(const char* key) const {
    if (!file_.is_array(prefix_ + key)) return integer(key);
    const std::vector<int64_t> values = file_.integers(prefix_ + key);
    const bool uniform =
        !values.empty() &&
        std::all_of(values.begin(), values.end(),
                    [&](int64_t value) { return value == values[0]; });
    if (!uniform) refuse(key, "different values per layer");
    return values[0];
  }

  [[noreturn]] void refuse(const char* key, std::string_view value) const {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[config_from_gguf] ",
                                file_.path().string(), ": key \"", prefix_, key,
                                "\" with ", in_quotes(value),
                                " is not supported; use another model.");
    throw std::logic_error("unreachable");
  }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

void read_sizes(const GgufFile& file, const Keys& keys, ModelConfig& config) {
  config.hidden_size = keys.required("embedding_length");
  // Layers that draft the token after next are no part of the model.
  const int64_t drafting = keys.integer("nextn_predict_layers").value_or(0);
  config.layers = keys.required("block_count");
  TORCH_CHECK(drafting >= 0 && drafting < std::max<int64_t>(config.layers, 1),
              "[config_from_gguf] ", file.path().string(),
              ": nextn_predict_layers must be 0 to ", config.layers - 1,
              " but is ", drafting, "; the file is damaged.");
  config.layers -= drafting;
  const auto heads = keys.per_layer("attention.head_count");
  config.heads = heads ? *heads : keys.required("attention.head_count");
  config.kv_heads =
      keys.per_layer("attention.head_count_kv").value_or(config.heads);
  TORCH_CHECK(config.heads > 0 && config.kv_heads > 0, "[config_from_gguf] ",
              file.path().string(),
              ": attention.head_count and attention.head_count_kv must be "
              "above 0 but are ",
              config.heads, " and ", config.kv_heads, "; the file is damaged.");
  config.head_dim = keys.integer("attention.key_length")
                        .value_or(config.hidden_size / config.heads);
  const int64_t value_length =
      keys.integer("attention.value_length").value_or(config.head_dim);
  TORCH_CHECK(value_length == config.head_dim, "[config_from_gguf] ",
              file.path().string(), ": attention.value_length ", value_length,
              " must equal attention.key_length ", config.head_dim,
              "; use another model.");
  config.context_length = keys.required("context_length");
  const auto inner = keys.per_layer("feed_forward_length");
  config.intermediate_size =
      inner ? *inner : keys.required("feed_forward_length");
}

// The embedding table is what counts; a key that disagrees is a contradiction.
void read_vocabulary(const GgufFile& file, const Keys& keys,
                     ModelConfig& config) {
  const GgufTensor* table = file.find("token_embd.weight");
  TORCH_CHECK(table != nullptr, "[config_from_gguf] ", file.path().string(),
              ": tensor token_embd.weight is missing; the file holds no whole "
              "model.");
  config.vocab_size = table->shape.size() == 2 ? table->shape[0] : 1;
  const auto declared = keys.integer("vocab_size");
  TORCH_CHECK(!declared || *declared == config.vocab_size,
              "[config_from_gguf] ", file.path().string(), ": vocab_size ",
              declared.value_or(0), " must equal the ", config.vocab_size,
              " rows of token_embd.weight; the file is damaged.");
}

void read_rope(const GgufFile& file, const Keys& keys, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.theta = keys.number("rope.freq_base").value_or(rope.theta);
  rope.rotary_dim =
      keys.integer("rope.dimension_count").value_or(config.head_dim);
  const std::string_view type = keys.text("rope.scaling.type").value_or("none");
  // Files older than rope.scaling.type have scale_linear.
  const auto old_factor = keys.number("rope.scale_linear");
  if (type == "linear" || (type == "none" && old_factor.value_or(1.0) != 1.0)) {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = type == "linear" ? keys.required_number("rope.scaling.factor")
                                   : *old_factor;
  } else if (type != "none") {
    keys.refuse("rope.scaling.type", type);
  }
  if (const GgufTensor* divisors = file.find("rope_freqs.weight")) {
    TORCH_CHECK(divisors->shape.size() == 1 &&
                    divisors->shape[0] * 2 == rope.rotary_dim,
                "[config_from_gguf] ", file.path().string(),
                ": rope_freqs.weight must have ", rope.rotary_dim / 2,
                " values but has the shape ", c10::IntArrayRef(divisors->shape),
                "; the file is damaged.");
    rope.divisors.resize(static_cast<size_t>(divisors->shape[0]));
    file.read_rows(*divisors, 0, 1, rope.divisors.data());
  }
}

void read_gpt2(const Keys& keys, ModelConfig& config) {
  config.norm = Norm::kLayer;
  config.norm_eps = keys.required_number("attention.layer_norm_epsilon");
  config.positions = Positions::kLearned;
  config.fused_qkv = config.qkv_bias = true;
  config.output_bias = config.mlp_bias = true;
  config.activation = Activation::kGeluTanh;
  config.gated_mlp = false;
}

void read_llama_like(const GgufFile& file, const Keys& keys,
                     ModelConfig& config) {
  config.norm_eps = keys.required_number("attention.layer_norm_rms_epsilon");
  read_rope(file, keys, config);
  const auto has = [&](const char* name) { return file.find(name) != nullptr; };
  config.qkv_bias = config.architecture == "qwen2" || has("blk.0.attn_q.bias");
  config.output_bias = has("blk.0.attn_output.bias");
  config.mlp_bias = has("blk.0.ffn_up.bias");
  config.qk_norm = config.architecture == "qwen3";
  config.attention_scale = keys.number("attention.scale");
  if (keys.integer("expert_count").value_or(0) != 0)
    keys.refuse("expert_count", std::to_string(*keys.integer("expert_count")));
  const auto window = keys.integer("attention.sliding_window");
  if (window.value_or(0) != 0) config.sliding_window = window;
}

// Layers of linear attention are flagged, or all but each interval-th.
void read_hybrid_layers(const GgufFile& file, const Keys& keys,
                        ModelConfig& config) {
  if (const auto recurrent = keys.flags("attention.recurrent_layers")) {
    TORCH_CHECK(static_cast<int64_t>(recurrent->size()) >= config.layers,
                "[config_from_gguf] ", file.path().string(),
                ": attention.recurrent_layers must have an entry for each of ",
                config.layers, " layers but has ", recurrent->size(),
                "; the file is damaged.");
    for (int64_t i = 0; i < config.layers; ++i)
      config.layer_types.push_back((*recurrent)[static_cast<size_t>(i)]
                                       ? LayerType::kLinear
                                       : LayerType::kFull);
    return;
  }
  const int64_t interval = keys.integer("full_attention_interval").value_or(4);
  TORCH_CHECK(interval >= 1, "[config_from_gguf] ", file.path().string(),
              ": full_attention_interval must be above 0 but is ", interval,
              "; the file is damaged.");
  for (int64_t i = 1; i <= config.layers; ++i)
    config.layer_types.push_back(i % interval == 0 ? LayerType::kFull
                                                   : LayerType::kLinear);
}

// The converter has added 1 to the weights of the norms.
// rope.dimension_sections deals pairs out to the axes of images and changes
// nothing for text.
void read_qwen35(const GgufFile& file, const Keys& keys, ModelConfig& config) {
  config.qk_norm = config.output_gate = true;
  const int64_t heads = keys.required("ssm.time_step_rank");
  const int64_t inner = keys.required("ssm.inner_size");
  TORCH_CHECK(heads > 0 && inner % heads == 0, "[config_from_gguf] ",
              file.path().string(), ": ssm.inner_size ", inner,
              " must be a multiple of ssm.time_step_rank ", heads,
              ", which must be above 0; the file is damaged.");
  config.linear_attention =
      LinearAttentionConfig{.key_heads = keys.required("ssm.group_count"),
                            .value_heads = heads,
                            .key_head_dim = keys.required("ssm.state_size"),
                            .value_head_dim = inner / heads,
                            .conv_kernel = keys.required("ssm.conv_kernel")};
  read_hybrid_layers(file, keys, config);
  const auto full = std::find(config.layer_types.begin(),
                              config.layer_types.end(), LayerType::kFull);
  const std::string prefix =
      "blk." + std::to_string(full - config.layer_types.begin()) + ".";
  const auto has = [&](const char* name) {
    return file.find(prefix + name) != nullptr;
  };
  config.qkv_bias = has("attn_q.bias");
  config.output_bias = has("attn_output.bias");
}

void read_special_tokens(const GgufFile& file, ModelConfig& config) {
  const auto read = [&](const char* key) {
    const auto id = file.find_integer(key);
    TORCH_CHECK(!id || (*id >= 0 && *id < config.vocab_size),
                "[config_from_gguf] ", file.path().string(), ": key \"", key,
                "\" must be 0 to ", config.vocab_size - 1, " but is ",
                id.value_or(0), "; the file is damaged.");
    return id;
  };
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id"}) {
    const auto id = read(key);
    if (id && std::find(config.eos_ids.begin(), config.eos_ids.end(), *id) ==
                  config.eos_ids.end())
      config.eos_ids.push_back(*id);
  }
  config.bos_id = read("tokenizer.ggml.bos_token_id");
}

}  // namespace

ModelConfig config_from_gguf(const GgufFile& file) {
  ModelConfig config;
  config.source = file.path().string();
  config.architecture = file.string("general.architecture");
  const std::string& name = config.architecture;
  TORCH_CHECK_NOT_IMPLEMENTED(
      name == "gpt2" || name == "llama" || name == "qwen2" || name == "qwen3" ||
          name == "qwen35",
      "[config_from_gguf] ", config.source, ": general.architecture ",
      in_quotes(name),
      " is not supported; supported are gpt2, llama (mistral too), qwen2, "
      "qwen3 and qwen35.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      file.find_integer("split.count").value_or(1) <= 1, "[config_from_gguf] ",
      config.source,
      " is one part of a split model, which is not supported; merge the parts "
      "with llama-gguf-split --merge.");
  const Keys keys(file, name);
  read_sizes(file, keys, config);
  read_vocabulary(file, keys, config);
  if (name == "gpt2") {
    read_gpt2(keys, config);
  } else {
    read_llama_like(file, keys, config);
  }
  TORCH_CHECK(config.layers >= 1 && config.layers <= kMaxLayers,
              "[config_from_gguf] ", config.source,
              ": block_count must be 1 to ", kMaxLayers, " but is ",
              config.layers, "; the file is damaged.");
  if (name == "qwen35") {
    read_qwen35(file, keys, config);
  } else {
    config.layer_types.assign(
        static_cast<size_t>(config.layers),
        config.sliding_window ? LayerType::kSliding : LayerType::kFull);
  }
  // No flag in the format: a file without a head means a tied one.
  config.tie_word_embeddings = file.find("output.weight") == nullptr;
  read_special_tokens(file, config);
  config.validate();
  return config;
}

}  // namespace kvcache::model
