// engine.cpp - a model ready to run, its prompts and its answers.

#include "examples/cli/engine.h"

#include <ATen/Parallel.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <stdexcept>

#include "examples/cli/errors.h"
#include "kvcache/model/gguf.h"

namespace kvcache::cli {
namespace {

namespace fs = std::filesystem;

// Weights alone still run on token ids; llama.cpp's word for that is "none".
bool has_tokenizer(const std::string& path) {
  if (!fs::is_directory(path)) {
    const model::GgufFile file(path);
    return file.find_string("tokenizer.ggml.model").value_or("none") != "none";
  }
  return fs::exists(fs::path(path) / "tokenizer.json") ||
         fs::exists(fs::path(path) / "tokenizer.model");
}

std::string spelling(const model::Tokenizer& tokenizer,
                     std::optional<int64_t> id) {
  return id ? std::string(tokenizer.token_bytes(*id)) : std::string();
}

model::ChatTemplate load_template(const std::string& path,
                                  const model::Tokenizer& tokenizer) {
  auto source = model::load_chat_template(path);
  if (!source) {
    throw std::runtime_error(path +
                             ": has no chat template; leave --chat out, or use "
                             "a model that was made for chat");
  }
  return model::ChatTemplate(std::move(*source),
                             spelling(tokenizer, tokenizer.bos_id()),
                             spelling(tokenizer, tokenizer.eos_id()));
}

// Beside the weights of the model.
void load_adapters(const ModelOptions& options, Engine& engine) {
  std::vector<model::Adapter> adapters;
  for (const auto& [name, folder] : options.adapter_folders()) {
    adapters.push_back(
        model::load_adapter(folder, name, engine.model->config()));
  }
  if (!adapters.empty()) {
    engine.model = engine.model->with_adapters(adapters);
  }
}

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

}  // namespace

int64_t peak_rss_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * int64_t{1024};  // Linux counts in KiB
}

int thread_count() { return at::get_num_threads(); }

Engine load_engine(const ModelOptions& options, Progress& progress, bool text) {
  const auto start = std::chrono::steady_clock::now();
  if (!fs::exists(options.model)) {
    throw std::runtime_error(options.model + ": no such file or folder");
  }
  if (options.threads) at::set_num_threads(*options.threads);
  std::future<model::TokenizerPtr> tokenizer;
  if (text && has_tokenizer(options.model)) {
    tokenizer = std::async(std::launch::async, [path = options.model] {
      return model::load_tokenizer(path);
    });
  }
  Engine engine;
  engine.model = model::load_model(
      options.model,
      {.dtype = options.scalar_type(),
       .packing = options.packing(),
       .device = options.torch_device(),
       .log =
           [&](model::LogLevel level, std::string_view line) {
             if (level < model::LogLevel::kWarning) return;
             progress.clear();
             write_error_line("kvcache: warning: " + std::string(line));
           },
       .progress =
           [&](double fraction) { progress.show("loading", fraction); }});
  if (tokenizer.valid()) engine.tokenizer = tokenizer.get();
  load_adapters(options, engine);
  progress.clear();
  engine.load_ms = std::chrono::duration<double, std::milli>(
                       std::chrono::steady_clock::now() - start)
                       .count();
  return engine;
}

const model::Tokenizer& tokenizer_of(const Engine& engine, const char* why) {
  if (!engine.tokenizer) {
    throw std::runtime_error(
        std::string("the model has no tokenizer, which ") + why +
        " needs; put its tokenizer.json into the folder, or give token ids");
  }
  return *engine.tokenizer;
}

Chat::Chat(const std::string& model_path, const Engine& engine)
    : tokenizer_(engine.tokenizer),
      template_(load_template(model_path, tokenizer_of(engine, "a chat"))) {}

void Chat::add(std::string role, std::string content) {
  messages_.push_back({.role = std::move(role), .content = std::move(content)});
}

std::vector<int64_t> Chat::tokens() const {
  return model::encode_chat(*tokenizer_, template_.render(messages_));
}

std::vector<int64_t> Prompts::tokens(const std::string& text, bool chat) {
  if (!chat) {
    return tokenizer_of(engine_, "a prompt").encode(text, {.add_bos = true});
  }
  if (!chat_) chat_.emplace(model_path_, engine_);
  chat_->clear();
  chat_->add("user", text);
  return chat_->tokens();
}

std::unique_ptr<Cache> cache_for(const Engine& engine,
                                 const ModelOptions& options,
                                 std::span<const int64_t> tokens,
                                 const model::GenerateOptions& generate) {
  const int64_t fresh = model::plan_new_tokens(*engine.model, tokens, generate);
  const auto needed = static_cast<int64_t>(tokens.size()) + fresh;
  return model::make_cache(options.cache_kind(*engine.model), *engine.model,
                           {.capacity = options.context.value_or(needed),
                            .kv_format = options.kv_storage()});
}

std::string dtype_name(const model::Transformer& model) {
  if (model.packing() != model::WeightPacking::kNone) return "packed";
  return model.dtype() == at::kFloat ? "float32" : "bfloat16";
}

model::GenerateOptions generate_options(const Engine& engine,
                                        const ModelOptions& model,
                                        const TextOptions& text) {
  return {.max_new_tokens = text.max_new_tokens,
          .sampling = text.sampling,
          .tokenizer = engine.tokenizer,
          .stop = text.stop,
          .ignore_eos = text.ignore_eos,
          .context = model.context,
          .chunk = model.chunk,
          .adapter = model.adapter(),
          .adapter_from = model.adapter_from};
}

Json cache_json(const Engine& engine, const ModelOptions& options,
                const Cache* cache) {
  if (!cache) return nullptr;
  Json json;
  json["kind"] = model::to_string(options.cache_kind(*engine.model));
  json["length"] = cache->lengths()[0];
  const auto& capacity = cache->spec().capacity;
  json["capacity"] = capacity ? Json(*capacity) : Json(nullptr);
  json["bytes"] = cache->memory().total().reserved;
  return json;
}

Json result_json(std::span<const int64_t> prompt,
                 const model::GenerateResult& result, const Engine& engine,
                 const ModelOptions& options, const Cache* cache) {
  Json json;
  json["prompt_tokens"] = std::vector<int64_t>(prompt.begin(), prompt.end());
  json["tokens"] = result.tokens;
  json["text"] = result.text;
  json["logprobs"] = result.log_probs;
  json["finish_reason"] = model::to_string(result.finish_reason);
  json["cache"] = cache_json(engine, options, cache);
  const model::GenerateTimings& timings = result.timings;
  json["timings"] = {
      {"load_ms", engine.load_ms},
      {"prefill_ms", timings.prefill_ms},
      {"decode_ms", timings.decode_ms},
      {"prefill_tokens_per_second", timings.prefill_tokens_per_second()},
      {"decode_tokens_per_second", timings.decode_tokens_per_second()},
      {"peak_rss_bytes", peak_rss_bytes()}};
  return json;
}

std::string summary(const model::GenerateResult& result, const Engine& engine,
                    const ModelOptions& options, const Cache* cache) {
  const model::GenerateTimings& timings = result.timings;
  std::string text =
      std::to_string(timings.prefill_tokens) +
      (timings.prefill_tokens == 1 ? " token in" : " tokens in") +
      formatted(" (%.0f tok/s), ", timings.prefill_tokens_per_second()) +
      std::to_string(result.tokens.size()) + " out" +
      (timings.decode_steps > 0
           ? formatted(" (%.1f tok/s)", timings.decode_tokens_per_second())
           : std::string()) +
      ", " + std::string(model::to_string(result.finish_reason)) + "; cache " +
      std::string(model::to_string(options.cache_kind(*engine.model)));
  if (!cache) return text;
  const auto bytes = static_cast<double>(cache->memory().total().reserved);
  return text + ", " + std::to_string(cache->lengths()[0]) + " tokens" +
         formatted(", %.1f MiB", bytes / (1024.0 * 1024.0));
}

void write_json(const Json& json) {
  write_out(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace kvcache::cli
