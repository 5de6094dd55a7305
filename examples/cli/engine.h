// engine.h - a model ready to run, its prompts and its answers.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/cli/options.h"
#include "examples/cli/terminal.h"
#include "kvcache/model/chat_template.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/tokenizer.h"
#include "kvcache/model/transformer.h"

namespace kvcache::cli {

using Json = nlohmann::ordered_json;  // keys in a fixed order

// Resident memory at its highest, bytes.
int64_t peak_rss_bytes();
// What `model` runs in, as --dtype spells it.
std::string dtype_name(const model::Transformer& model);

int thread_count();

struct Engine {
  std::shared_ptr<const model::Transformer> model;
  model::TokenizerPtr tokenizer;  // null if the model's files have none
  double load_ms = 0;
};

// `text`: whether the command needs the tokenizer.
Engine load_engine(const ModelOptions& options, Progress& progress, bool text);

// Throws if the model has no tokenizer; `why` says what needs it.
const model::Tokenizer& tokenizer_of(const Engine& engine, const char* why);

// A conversation as the model's own template writes it.
class Chat {
 public:
  Chat(const std::string& model_path, const Engine& engine);

  void add(std::string role, std::string content);
  void clear() { messages_.clear(); }
  // The ids of all messages and of the start of an answer.
  std::vector<int64_t> tokens() const;

 private:
  model::TokenizerPtr tokenizer_;
  model::ChatTemplate template_;
  std::vector<model::ChatMessage> messages_;
};

// Texts as the model takes them: plain, or as the first turn of a chat.
class Prompts {
 public:
  Prompts(std::string model_path, const Engine& engine)
      : model_path_(std::move(model_path)), engine_(engine) {}

  std::vector<int64_t> tokens(const std::string& text, bool chat);

 private:
  std::string model_path_;
  const Engine& engine_;
  std::optional<Chat> chat_;  // read when it is first asked for
};

// A cache of the kind and capacity that `options` ask for and `tokens` need.
// Throws as generate() would, before anything is allocated.
std::unique_ptr<Cache> cache_for(const Engine& engine,
                                 const ModelOptions& options,
                                 std::span<const int64_t> tokens,
                                 const model::GenerateOptions& generate);

model::GenerateOptions generate_options(const Engine& engine,
                                        const ModelOptions& model,
                                        const TextOptions& text);

// {"kind", "length", "capacity", "bytes"}, or null without a cache.
Json cache_json(const Engine& engine, const ModelOptions& options,
                const Cache* cache);
// The keys of `generate --json`.
Json result_json(std::span<const int64_t> prompt,
                 const model::GenerateResult& result, const Engine& engine,
                 const ModelOptions& options, const Cache* cache);
// The same for people, in one line.
std::string summary(const model::GenerateResult& result, const Engine& engine,
                    const ModelOptions& options, const Cache* cache);

// One object on one line of standard output.
void write_json(const Json& json);

}  // namespace kvcache::cli
