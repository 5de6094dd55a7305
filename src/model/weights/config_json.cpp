// config_json.cpp - a configuration from the files of transformers.

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "kvcache/model/config.h"
#include "src/model/weights/config_bounds.h"
#include "src/model/weights/config_section.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

using nlohmann::json;

Activation activation_of(const Section& file, const std::string& key,
                         const std::string& otherwise) {
  static const std::map<std::string, Activation> known{
      {"silu", Activation::kSilu},
      {"swish", Activation::kSilu},
      {"gelu", Activation::kGelu},
      {"gelu_new", Activation::kGeluTanh},
      {"gelu_fast", Activation::kGeluTanh},
      {"gelu_pytorch_tanh", Activation::kGeluTanh}};
  const std::string name = file.text(key).value_or(otherwise);
  const auto found = known.find(name);
  if (found == known.end())
    file.refuse(key, name, "use a model with silu or gelu.");
  return found->second;
}

bool is_hybrid(const ModelConfig& config) {
  return config.architecture.starts_with("qwen3_5");
}

// Values of a head that are turned. Only a hybrid may leave some as they are,
// and does for 3 of 4 if the file is silent.
int64_t rotary_dim_of(const Section& file, const Section& block,
                      const ModelConfig& config) {
  constexpr const char* kKey = "partial_rotary_factor";
  const double otherwise = is_hybrid(config) ? 0.25 : 1.0;
  const double factor =
      block.number(kKey).value_or(file.number(kKey).value_or(otherwise));
  if (factor != 1.0 && !is_hybrid(config))
    file.refuse(kKey, "below 1", "use another model.");
  TORCH_CHECK(factor > 0.0 && factor <= 1.0, "[config_from_json] ", file.path(),
              ": ", kKey, " must be above 0 and at most 1 but is ", factor,
              "; correct the file.");
  return static_cast<int64_t>(static_cast<double>(config.head_dim) * factor);
}

// transformers 4 has rope_theta beside rope_scaling, transformers 5 one block
// rope_parameters; the type's key is rope_type or, in older files, type.
// mrope_section deals rotary pairs out to the axes of images; the positions of
// text are the same on every axis, so it changes nothing here.
RopeConfig rope_of(const Section& file, const ModelConfig& config) {
  RopeConfig rope;
  const char* key =
      file.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  rope.theta = file.number("rope_theta").value_or(rope.theta);
  const Section block = file.has(key) ? file.section(key) : file;
  rope.rotary_dim = rotary_dim_of(file, block, config);
  if (!file.has(key)) return rope;
  rope.theta = block.number("rope_theta").value_or(rope.theta);
  for (const char* nested : {"full_attention", "sliding_attention"})
    if (block.has(nested))
      file.refuse(key, nested, "use a model with one block for all layers.");
  const std::string type =
      block.text("rope_type").value_or(block.text("type").value_or("default"));
  if (type == "default") return rope;
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = block.required_number("factor");
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = block.required_number("factor");
    rope.low_freq_factor = block.required_number("low_freq_factor");
    rope.high_freq_factor = block.required_number("high_freq_factor");
    rope.original_context = block.required("original_max_position_embeddings");
  } else {
    file.refuse(std::string(key) + " type", type,
                "supported are default, linear and llama3.");
  }
  return rope;
}

void read_gpt2(const Section& file, ModelConfig& config) {
  config.hidden_size = file.required("n_embd");
  config.layers = file.required("n_layer");
  config.heads = file.required("n_head");
  config.kv_heads = config.heads;
  TORCH_CHECK(config.heads > 0 && config.hidden_size <= kMaxSize &&
                  config.hidden_size % config.heads == 0,
              "[config_from_json] ", file.path(), ": n_embd ",
              config.hidden_size, " must be at most ", kMaxSize,
              " and a multiple of n_head ", config.heads,
              ", which must be above 0; correct the file.");
  config.head_dim = config.hidden_size / config.heads;
  config.context_length = file.has("n_positions")
                              ? file.required("n_positions")
                              : file.integer("n_ctx").value_or(1024);
  config.intermediate_size =
      file.integer("n_inner").value_or(4 * config.hidden_size);
  config.norm = Norm::kLayer;
  config.norm_eps = file.number("layer_norm_epsilon").value_or(1e-5);
  config.positions = Positions::kLearned;
  config.fused_qkv = config.qkv_bias = true;
  config.output_bias = config.mlp_bias = true;
  config.activation = activation_of(file, "activation_function", "gelu_new");
  config.gated_mlp = false;
  config.tie_word_embeddings = file.flag("tie_word_embeddings", true);
  if (!file.flag("scale_attn_weights", true)) config.attention_scale = 1.0;
  for (const char* key :
       {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
    if (file.flag(key, false)) file.refuse(key, "true", "use another model.");
}

// The defaults of the classes.
int64_t default_head_dim(const ModelConfig& config) {
  if (is_hybrid(config)) return 256;
  if (config.architecture == "qwen3") return 128;
  return config.hidden_size / config.heads;
}

// What llama and all after it have in common.
void read_llama_like(const Section& file, ModelConfig& config) {
  config.hidden_size = file.required("hidden_size");
  config.layers = file.required("num_hidden_layers");
  config.heads = file.required("num_attention_heads");
  config.kv_heads = file.integer("num_key_value_heads")
                        .value_or(is_hybrid(config) ? 4 : config.heads);
  TORCH_CHECK(config.heads > 0, "[config_from_json] ", file.path(),
              ": num_attention_heads must be above 0 but is ", config.heads,
              "; correct the file.");
  config.head_dim = file.integer("head_dim").value_or(default_head_dim(config));
  config.intermediate_size = file.required("intermediate_size");
  config.context_length = file.required("max_position_embeddings");
  config.norm_eps = file.number("rms_norm_eps").value_or(1e-6);
  config.activation = activation_of(file, "hidden_act", "silu");
  config.rope = rope_of(file, config);
  config.tie_word_embeddings = file.flag("tie_word_embeddings", false);
}

// mistral slides on all layers; a file that does not mention the window means
// the 4096 of the class.
void read_mistral(const Section& file, ModelConfig& config) {
  config.sliding_window = file.mentions("sliding_window")
                              ? file.integer("sliding_window")
                              : std::optional<int64_t>(4096);
  if (config.sliding_window)
    config.layer_types.assign(static_cast<size_t>(config.layers),
                              LayerType::kSliding);
}

LayerType layer_type_of(const Section& file, const std::string& name,
                        bool hybrid) {
  if (name == "full_attention") return LayerType::kFull;
  if (hybrid && name == "linear_attention") return LayerType::kLinear;
  if (!hybrid && name == "sliding_attention") return LayerType::kSliding;
  file.refuse("layer_types", name,
              std::string("supported are full_attention and ") +
                  (hybrid ? "linear_attention." : "sliding_attention."));
}

void read_qwen(const Section& file, ModelConfig& config) {
  if (file.flag("use_sliding_window", false))
    config.sliding_window = file.mentions("sliding_window")
                                ? file.integer("sliding_window")
                                : std::optional<int64_t>(4096);
  if (file.has("layer_types")) {
    for (const std::string& name : file.texts("layer_types"))
      config.layer_types.push_back(layer_type_of(file, name, false));
    return;
  }
  const int64_t first = file.integer("max_window_layers").value_or(28);
  if (config.sliding_window)
    for (int64_t i = std::max<int64_t>(first, 0); i < config.layers; ++i)
      config.layer_types[static_cast<size_t>(i)] = LayerType::kSliding;
}

void read_hybrid_layers(const Section& file, ModelConfig& config) {
  if (file.has("layer_types")) {
    for (const std::string& name : file.texts("layer_types"))
      config.layer_types.push_back(layer_type_of(file, name, true));
    return;
  }
  const int64_t interval = file.integer("full_attention_interval").value_or(4);
  TORCH_CHECK(interval >= 1, "[config_from_json] ", file.path(),
              ": full_attention_interval must be above 0 but is ", interval,
              "; correct the file.");
  for (int64_t i = 1; i <= config.layers; ++i)
    config.layer_types.push_back(i % interval == 0 ? LayerType::kFull
                                                   : LayerType::kLinear);
}

// qwen3_5: the text model. Defaults are those of Qwen3_5TextConfig.
void read_hybrid(const Section& file, ModelConfig& config) {
  config.norm = Norm::kRmsPlusOne;
  config.qk_norm = config.output_gate = true;
  config.qkv_bias = config.output_bias = file.flag("attention_bias", false);
  if (config.activation != Activation::kSilu)
    file.refuse("hidden_act", *file.text("hidden_act"),
                "the convolutions of this family have silu.");
  if (!file.flag("attn_output_gate", true))
    file.refuse("attn_output_gate", "false", "use another model.");
  if (const int64_t experts = file.integer("num_experts").value_or(0))
    file.refuse("num_experts", std::to_string(experts), "use a dense model.");
  read_hybrid_layers(file, config);
  const auto size = [&](const char* key, int64_t otherwise) {
    return file.integer(key).value_or(otherwise);
  };
  config.linear_attention = LinearAttentionConfig{
      .key_heads = size("linear_num_key_heads", 16),
      .value_heads = size("linear_num_value_heads", 32),
      .key_head_dim = size("linear_key_head_dim", 128),
      .value_head_dim = size("linear_value_head_dim", 128),
      .conv_kernel = size("linear_conv_kernel_dim", 4)};
}

void read_family(const Section& file, ModelConfig& config) {
  if (config.architecture == "gpt2") {
    read_gpt2(file, config);
  } else {
    read_llama_like(file, config);
  }
  // Checked here, before anything is sized by it.
  TORCH_CHECK(config.layers >= 1 && config.layers <= kMaxLayers,
              "[config_from_json] ", file.path(),
              ": the number of layers must be 1 to ", kMaxLayers, " but is ",
              config.layers, "; correct the file.");
  const auto layers = static_cast<size_t>(config.layers);
  if (is_hybrid(config)) {
    read_hybrid(file, config);
  } else if (config.architecture.starts_with("qwen")) {
    if (!file.has("layer_types"))
      config.layer_types.assign(layers, LayerType::kFull);
    read_qwen(file, config);
  }
  if (config.architecture == "mistral") read_mistral(file, config);
  if (config.architecture == "llama") {
    config.qkv_bias = config.output_bias = file.flag("attention_bias", false);
    config.mlp_bias = file.flag("mlp_bias", false);
  } else if (config.architecture == "qwen2") {
    config.qkv_bias = true;
  } else if (config.architecture == "qwen3") {
    config.qkv_bias = config.output_bias = file.flag("attention_bias", false);
    config.qk_norm = true;
  }
  const bool listed = config.architecture.starts_with("qwen");
  if (config.layer_types.empty() && !listed)
    config.layer_types.assign(layers, LayerType::kFull);
}

// Both files declare end tokens, and a text may end with any of them. `parts`
// are the objects of config.json that may, the innermost first.
void read_special_tokens(const std::filesystem::path& folder,
                         std::span<const Section> parts,
                         const OpenOptions& options, ModelConfig& config) {
  std::vector<std::pair<std::string, int64_t>> declared;
  std::optional<int64_t> bos;
  for (const Section& part : parts) {
    for (const int64_t id : part.integers("eos_token_id"))
      declared.emplace_back(part.path(), id);
    if (!bos) bos = part.integer("bos_token_id");
  }
  const std::filesystem::path second = folder / "generation_config.json";
  if (std::error_code none; std::filesystem::exists(second, none)) {
    const json document = read_strict_json(second);
    TORCH_CHECK(document.is_object(), "[config_from_json] ", second.string(),
                " must be a JSON object; fetch the file again.");
    for (const int64_t id :
         Section(document, second.string()).integers("eos_token_id"))
      declared.emplace_back(second.string(), id);
  }
  constexpr size_t kMostEnds = 1024;
  TORCH_CHECK(declared.size() <= kMostEnds, "[config_from_json] ",
              declared.back().first, ": eos_token_id must name at most ",
              kMostEnds, " tokens but there are ", declared.size(),
              "; correct the file.");
  const auto usable = [&](const std::string& path, const char* key,
                          int64_t id) {
    TORCH_CHECK(id >= 0, "[config_from_json] ", path, ": ", key,
                " must not be negative but is ", id, "; correct the file.");
    if (id < config.vocab_size) return true;
    if (options.log)
      options.log(LogLevel::kWarning,
                  path + ": " + key + " " + std::to_string(id) +
                      " is outside the vocabulary of " +
                      std::to_string(config.vocab_size) + "; it is ignored.");
    return false;
  };
  for (const auto& [path, id] : declared) {
    if (std::find(config.eos_ids.begin(), config.eos_ids.end(), id) ==
            config.eos_ids.end() &&
        usable(path, "eos_token_id", id))
      config.eos_ids.push_back(id);
  }
  if (bos && usable(config.source, "bos_token_id", *bos)) config.bos_id = bos;
}

void check_family(const Section& file, const std::string& name) {
  static const char* const kKnown[] = {
      "gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5"};
  if (std::find(std::begin(kKnown), std::end(kKnown), name) == std::end(kKnown))
    file.refuse("model_type", name,
                "supported are gpt2, llama, mistral, qwen2, qwen3 and the text "
                "model of qwen3_5.");
}

// The objects that describe the text model, the innermost first: a model that
// sees has it one level down.
std::vector<Section> text_parts(const Section& file,
                                const ModelConfig& config) {
  if (config.architecture != "qwen3_5") return {file};
  TORCH_CHECK(file.has("text_config"), "[config_from_json] ", file.path(),
              ": key text_config is missing; fetch the file again.");
  const Section text = file.section("text_config");
  const std::string type = text.text("model_type").value_or("qwen3_5_text");
  if (type != "qwen3_5_text")
    file.refuse("model_type of text_config", type, "it must be qwen3_5_text.");
  return {text, file};
}

}  // namespace

ModelConfig config_from_json(const std::filesystem::path& folder,
                             const OpenOptions& options) {
  const std::filesystem::path path = folder / "config.json";
  const json document = read_strict_json(path);
  TORCH_CHECK(document.is_object(), "[config_from_json] ", path.string(),
              " must be a JSON object; fetch the file again.");
  const Section file(document, path.string());
  ModelConfig config;
  config.source = path.string();
  config.architecture = file.text("model_type").value_or("");
  check_family(file, config.architecture);
  const std::vector<Section> parts = text_parts(file, config);
  for (const Section& part : parts)
    if (part.has("quantization_config"))
      file.refuse("quantization_config", "present",
                  "use the plain weights or a GGUF file.");
  config.vocab_size = parts[0].required("vocab_size");
  read_family(parts[0], config);
  // Either level may say it.
  if (parts.back().flag("tie_word_embeddings", false))
    config.tie_word_embeddings = true;
  read_special_tokens(folder, parts, options, config);
  config.validate();
  return config;
}

}  // namespace kvcache::model
