// inspect_command.cpp - `kvcache inspect`: what is in a model, or in saved
// texts, without running anything.

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/inspect_saved.h"
#include "kvcache/model/weights.h"

namespace kvcache::cli {
namespace {

struct Options {
  std::string path;
  bool json = false;
};

int64_t stored_bytes(const model::OpenedModel& opened,
                     const model::WeightInfo& info) {
  if (opened.gguf) {
    const auto* tensor = opened.gguf->find(info.name_in_file);
    return tensor ? static_cast<int64_t>(tensor->data.size()) : 0;
  }
  int64_t values = 1;
  for (const int64_t size : info.shape) values *= size;
  return values * static_cast<int64_t>(c10::elementSize(info.dtype));
}

Json tensors_json(const model::OpenedModel& opened) {
  std::map<std::string, std::pair<int64_t, int64_t>> types;  // count, bytes
  int64_t parameters = 0;
  int64_t bytes = 0;
  for (const model::WeightInfo& info : opened.weights->tensors()) {
    int64_t values = 1;
    for (const int64_t size : info.shape) values *= size;
    const int64_t stored = stored_bytes(opened, info);
    auto& [count, sum] = types[info.type_name];
    ++count;
    sum += stored;
    parameters += values;
    bytes += stored;
  }
  Json json;
  json["count"] = opened.weights->tensors().size();
  json["parameters"] = parameters;
  json["bytes"] = bytes;
  json["types"] = Json::object();
  for (const auto& [name, numbers] : types) {
    json["types"][name] = {{"count", numbers.first}, {"bytes", numbers.second}};
  }
  return json;
}

// Layers of linear attention: a state of fixed size instead of K and V.
int64_t linear_layers(const model::ModelConfig& config) {
  return std::count(config.layer_types.begin(), config.layer_types.end(),
                    model::LayerType::kLinear);
}

Json config_json(const model::ModelConfig& config) {
  Json json;
  json["architecture"] = config.architecture;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  json["layers"] = config.layers;
  json["linear_layers"] = linear_layers(config);
  json["heads"] = config.heads;
  json["kv_heads"] = config.kv_heads;
  json["head_dim"] = config.head_dim;
  json["intermediate_size"] = config.intermediate_size;
  json["context_length"] = config.context_length;
  json["sliding_window"] =
      config.sliding_window ? Json(*config.sliding_window) : Json(nullptr);
  json["tied_embeddings"] = config.tie_word_embeddings;
  return json;
}

Json id_json(std::optional<int64_t> id) {
  return id ? Json(*id) : Json(nullptr);
}

// Every end token that stops a generation, whoever declares it.
Json tokenizer_json(const Options& options, const model::OpenedModel& opened) {
  model::TokenizerPtr tokenizer;
  std::string problem;
  try {
    tokenizer = model::load_tokenizer(options.path);
  } catch (const std::exception& error) {
    problem = message_of(error);
  }
  if (!tokenizer) return {{"error", problem}};
  const model::SpecialIds& special = tokenizer->special_ids();
  std::vector<int64_t> ends = opened.config.eos_ids;
  ends.insert(ends.end(), special.ends.begin(), special.ends.end());
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return {
      {"vocab_size", tokenizer->vocab_size()},
      {"bos", id_json(special.bos)},
      {"eos", id_json(special.eos)},
      {"ends", ends},
      {"adds_bos", special.add_bos},
      {"chat_template", model::load_chat_template(options.path).has_value()}};
}

Json cache_json(const model::ModelConfig& config) {
  const int64_t linear = linear_layers(config);
  // K and V of one token of one row.
  const int64_t values = 2 * (config.layers - linear) * config.kv_size();
  // Of one row whatever its length: states are float32 in both.
  int64_t states = 0;
  int64_t inputs = 0;
  if (linear > 0) {
    const model::LinearAttentionConfig& sizes = *config.linear_attention;
    states = linear * sizes.value_size() * sizes.key_head_dim;
    inputs = linear * sizes.conv_channels() * (sizes.conv_kernel - 1);
  }
  return {
      {"bytes_per_token", {{"bfloat16", 2 * values}, {"float32", 4 * values}}},
      {"state_bytes",
       {{"bfloat16", 4 * states + 2 * inputs},
        {"float32", 4 * states + 4 * inputs}}}};
}

std::string shown(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// "section.key: value", a line for each leaf.
void write_lines(const Json& json, const std::string& prefix) {
  for (const auto& [key, value] : json.items()) {
    const std::string name = prefix.empty() ? key : prefix + "." + key;
    if (value.is_object()) {
      write_lines(value, name);
    } else {
      write_out(name + ": " + shown(value) + "\n");
    }
  }
}

void run_saved(const Options& options) {
  const Json texts = saved_json(options.path);
  if (options.json) {
    write_json({{"path", options.path}, {"saved", texts}});
  } else {
    write_out(saved_lines(texts));
  }
}

void run(const Options& options) {
  if (std::filesystem::exists(options.path) && is_saved(options.path)) {
    run_saved(options);
    return;
  }
  if (std::filesystem::is_directory(options.path) &&
      !std::filesystem::exists(options.path + "/config.json")) {
    throw std::runtime_error(options.path +
                             " has neither config.json, as a model has, nor "
                             "saved texts; check the path");
  }
  const auto opened = model::open_model(options.path);
  Json json;
  json["path"] = options.path;
  json["format"] =
      opened.kind == model::FileKind::kGguf ? "gguf" : "safetensors";
  json["config"] = config_json(opened.config);
  json["tensors"] = tensors_json(opened);
  json["tokenizer"] = tokenizer_json(options, opened);
  json["cache"] = cache_json(opened.config);
  if (options.json) {
    write_json(json);
  } else {
    write_lines(json, "");
  }
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "inspect",
      "what is in a model or in saved texts, without running anything");
  command
      ->add_option("path,--model", options->path,
                   "a model (folder or .gguf file), or what --prefix-dir kept")
      ->required()
      ->type_name("PATH");
  command->add_flag("--json", options->json, "one JSON object on one line");
  command->footer("Example: kvcache inspect SmolLM2-135M-Instruct.Q4_1.gguf");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
