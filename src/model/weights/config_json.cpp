// config_json.cpp - a configuration from the files of transformers.

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "kvcache/model/config.h"
#include "src/model/weights/config_bounds.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

using nlohmann::json;

// Typed reading of one object of a file. A null stands for a missing key, as
// in transformers.
class Section {
 public:
  Section(const json& object, std::string path)
      : object_(object), path_(std::move(path)) {}

  const std::string& path() const noexcept { return path_; }
  bool has(const std::string& key) const {
    return object_.contains(key) && !object_[key].is_null();
  }
  // The key stands there, be it with null.
  bool mentions(const std::string& key) const { return object_.contains(key); }

  std::optional<int64_t> integer(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    return integer_of(key, object_[key]);
  }
  int64_t required(const std::string& key) const {
    return must(integer(key), key);
  }
  std::optional<double> number(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    check(object_[key].is_number(), key, "a number");
    return object_[key].get<double>();
  }
  double required_number(const std::string& key) const {
    return must(number(key), key);
  }
  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    check(object_[key].is_boolean(), key, "true or false");
    return object_[key].get<bool>();
  }
  std::optional<std::string> text(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    check(object_[key].is_string(), key, "text");
    return object_[key].get<std::string>();
  }
  std::vector<std::string> texts(const std::string& key) const {
    check(object_[key].is_array(), key, "a list of texts");
    std::vector<std::string> out;
    for (const json& item : object_[key]) {
      check(item.is_string(), key, "a list of texts");
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  // A number or a list of numbers.
  std::vector<int64_t> integers(const std::string& key) const {
    std::vector<int64_t> out;
    if (!has(key)) return out;
    if (!object_[key].is_array()) return {integer_of(key, object_[key])};
    for (const json& item : object_[key]) out.push_back(integer_of(key, item));
    return out;
  }
  Section section(const std::string& key) const {
    check(object_[key].is_object(), key, "an object");
    return {object_[key], path_};
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& value,
                           const std::string& remedy) const {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[config_from_json] ", path_, ": ", key,
                                " ", in_quotes(value), " is not supported; ",
                                remedy);
    throw std::logic_error("unreachable");
  }

 private:
  template <typename T>
  T must(std::optional<T> value, const std::string& key) const {
    TORCH_CHECK(value.has_value(), "[config_from_json] ", path_, ": key ", key,
                " is missing; fetch the file again.");
    return *value;
  }
  void check(bool holds, const std::string& key, const char* want) const {
    TORCH_CHECK(holds, "[config_from_json] ", path_, ": key ", key, " must be ",
                want, " but is ", in_quotes(object_[key].dump()),
                "; correct the file.");
  }
  int64_t integer_of(const std::string& key, const json& value) const {
    check(value.is_number_integer() &&
              !(value.is_number_unsigned() &&
                value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)),
          key, "a whole number");
    return value.get<int64_t>();
  }

  const json& object_;
  std::string path_;
};

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

// transformers 4 has rope_theta beside rope_scaling, transformers 5 one block
// rope_parameters; the type's key is rope_type or, in older files, type.
RopeConfig rope_of(const Section& file, int64_t head_dim) {
  RopeConfig rope;
  rope.rotary_dim = head_dim;
  const char* key =
      file.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  rope.theta = file.number("rope_theta").value_or(rope.theta);
  if (file.number("partial_rotary_factor").value_or(1.0) != 1.0)
    file.refuse("partial_rotary_factor", "below 1", "use another model.");
  if (!file.has(key)) return rope;
  const Section block = file.section(key);
  rope.theta = block.number("rope_theta").value_or(rope.theta);
  for (const char* nested : {"full_attention", "sliding_attention"})
    if (block.has(nested))
      file.refuse(key, nested, "use a model with one block for all layers.");
  if (block.number("partial_rotary_factor").value_or(1.0) != 1.0)
    file.refuse("partial_rotary_factor", "below 1", "use another model.");
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

// What llama, mistral, qwen2 and qwen3 have in common.
void read_llama_like(const Section& file, ModelConfig& config) {
  config.hidden_size = file.required("hidden_size");
  config.layers = file.required("num_hidden_layers");
  config.heads = file.required("num_attention_heads");
  config.kv_heads = file.integer("num_key_value_heads").value_or(config.heads);
  TORCH_CHECK(config.heads > 0, "[config_from_json] ", file.path(),
              ": num_attention_heads must be above 0 but is ", config.heads,
              "; correct the file.");
  config.head_dim =
      file.integer("head_dim").value_or(config.hidden_size / config.heads);
  config.intermediate_size = file.required("intermediate_size");
  config.context_length = file.required("max_position_embeddings");
  config.norm_eps = file.number("rms_norm_eps").value_or(1e-6);
  config.activation = activation_of(file, "hidden_act", "silu");
  config.rope = rope_of(file, config.head_dim);
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

LayerType layer_type_of(const Section& file, const std::string& name) {
  if (name == "full_attention") return LayerType::kFull;
  if (name == "sliding_attention") return LayerType::kSliding;
  file.refuse("layer_types", name,
              "supported are full_attention and sliding_attention.");
}

void read_qwen(const Section& file, ModelConfig& config) {
  if (file.flag("use_sliding_window", false))
    config.sliding_window = file.mentions("sliding_window")
                                ? file.integer("sliding_window")
                                : std::optional<int64_t>(4096);
  if (file.has("layer_types")) {
    for (const std::string& name : file.texts("layer_types"))
      config.layer_types.push_back(layer_type_of(file, name));
    return;
  }
  const int64_t first = file.integer("max_window_layers").value_or(28);
  if (config.sliding_window)
    for (int64_t i = std::max<int64_t>(first, 0); i < config.layers; ++i)
      config.layer_types[static_cast<size_t>(i)] = LayerType::kSliding;
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
  if (config.architecture.starts_with("qwen")) {
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
    if (!file.has("head_dim")) {
      config.head_dim = 128;  // the default of the class
      config.rope.rotary_dim = config.head_dim;
    }
  }
  if (config.layer_types.empty())
    config.layer_types.assign(layers, LayerType::kFull);
}

// Both files declare end tokens, and a text may end with any of them.
void read_special_tokens(const std::filesystem::path& folder,
                         const Section& file, const OpenOptions& options,
                         ModelConfig& config) {
  std::vector<std::pair<std::string, int64_t>> declared;
  for (const int64_t id : file.integers("eos_token_id"))
    declared.emplace_back(file.path(), id);
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
  const auto bos = file.integer("bos_token_id");
  if (bos && usable(file.path(), "bos_token_id", *bos)) config.bos_id = bos;
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
  static const char* const kKnown[] = {"gpt2", "llama", "mistral", "qwen2",
                                       "qwen3"};
  if (std::find(std::begin(kKnown), std::end(kKnown), config.architecture) ==
      std::end(kKnown))
    file.refuse("model_type", config.architecture,
                "supported are gpt2, llama, mistral, qwen2 and qwen3.");
  if (file.has("quantization_config"))
    file.refuse("quantization_config", "present",
                "use the plain weights or a GGUF file.");
  config.vocab_size = file.required("vocab_size");
  read_family(file, config);
  read_special_tokens(folder, file, options, config);
  config.validate();
  return config;
}

}  // namespace kvcache::model
