// chat_command.cpp - `kvcache chat`: a conversation, a line for each turn.
//
// The whole conversation is written anew by the template each time; what it
// shares with the tokens in the cache is not computed again.

#include <unistd.h>

#include <iostream>
#include <memory>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/graphs.h"

namespace kvcache::cli {
namespace {

struct Options {
  ModelOptions model;
  TextOptions text;
  std::optional<std::string> system;
  bool json = false;
};

// The next line that says something; empty at the end of the input.
std::optional<std::string> next_line(bool person) {
  std::string line;
  do {
    if (person) write_out("> ");
    if (!std::getline(std::cin, line)) {
      if (person) write_out("\n");  // the shell's prompt gets its own line
      return std::nullopt;
    }
    if (!line.empty() && line.back() == '\r') line.pop_back();
  } while (line.empty());
  return line;
}

// The cache of the whole conversation; it grows, since nobody knows how long
// that will be.
std::unique_ptr<Cache> chat_cache(const Engine& engine,
                                  const ModelOptions& options) {
  const int64_t limit = engine.model->context_length();
  return model::make_cache(
      options.cache_kind(*engine.model), *engine.model,
      {.capacity = std::min(options.context.value_or(limit), limit),
       .grow = true,
       .kv_format = options.kv_storage()});
}

void run(const Options& options) {
  options.model.check();
  options.text.check();
  Interrupt interrupt;
  interrupt.end_work();  // until there is a question
  Progress progress;
  const Engine engine = load_engine(options.model, progress, true);
  Chat chat(options.model.model, engine);
  if (options.system) chat.add("system", *options.system);
  auto generate = generate_options(engine, options.model, options.text);
  if (options.json) generate.log_probs = 0;
  auto cache = chat_cache(engine, options.model);
  Cache* const memory = cache.get();
  model::Conversation conversation(engine.model, std::move(cache));
  const auto runner = runner_for(engine, options.model, generate, memory);
  generate.graphs = runner.get();
  const bool person = isatty(STDIN_FILENO) == 1 && !options.json;
  while (const auto line = next_line(person)) {
    chat.add("user", *line);
    const auto tokens = chat.tokens();
    model::GenerateHooks hooks{.stop = interrupt.begin_work()};
    hooks.on_prefill = progress.of_prompt();
    if (!options.json) hooks.on_text = write_out;
    const auto result = conversation.generate(tokens, generate, hooks);
    if (options.json) {
      Json json = result_json(tokens, result, engine, options.model,
                              conversation.cache());
      json["reused_tokens"] = result.reused;
      write_json(json);
    } else {
      write_out("\n");
    }
    interrupt.end_work();
    chat.add("assistant", result.text);
  }
}

}  // namespace

void add_chat(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "chat", "talk with a model; each line of standard input is a turn");
  add_model_options(*command, options->model);
  add_adapter_options(*command, options->model);
  add_text_options(*command, options->text);
  command
      ->add_option("--system", options->system,
                   "what the model is told about itself")
      ->type_name("TEXT");
  command->add_flag("--json", options->json,
                    "one JSON object on one line for each answer");
  command->footer(
      "Ctrl-C ends an answer, and the program while it waits for a line.\n"
      "Example: kvcache chat --model SmolLM2-135M-Instruct.Q4_1.gguf");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
