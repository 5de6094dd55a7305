// generate_command.cpp - `kvcache generate`: one prompt, one answer.

#include <memory>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/graphs.h"
#include "examples/cli/prefix.h"

namespace kvcache::cli {
namespace {

struct Options {
  ModelOptions model;
  TextOptions text;
  std::optional<std::string> prompt, prompt_file, tokens;
  bool chat = false;
  std::optional<int64_t> log_probs;
  bool json = false;
  PrefixFlags prefix;

  void check() const;
};

void Options::check() const {
  model.check();
  text.check();
  prefix.check(model);
  const int sources =
      prompt.has_value() + prompt_file.has_value() + tokens.has_value();
  if (sources != 1) {
    throw UsageError(
        "give exactly one of --prompt, --prompt-file and --tokens");
  }
  if (chat && tokens) {
    throw UsageError("--tokens are used exactly as they are; leave --chat out");
  }
  if (log_probs && *log_probs < 0) {
    throw UsageError("--logprobs must be at least 0 but got " +
                     std::to_string(*log_probs));
  }
  if (log_probs && !json) {
    throw UsageError("--logprobs are part of the JSON; give --json too");
  }
}

Json best_json(const model::GenerateResult& result) {
  Json all = Json::array();
  for (const auto& best : result.best) {
    Json row = Json::array();
    for (const auto& [id, log_prob] : best) {
      row.push_back({{"token", id}, {"logprob", log_prob}});
    }
    all.push_back(std::move(row));
  }
  return all;
}

// Text as it comes, and one line on each token if asked for.
model::GenerateHooks hooks(const Options& options, Progress& progress,
                           const std::stop_token& stop) {
  model::GenerateHooks hooks{.stop = stop};
  hooks.on_prefill = progress.of_prompt();
  if (!options.json) hooks.on_text = write_out;
  return hooks;
}

void write_result(const Options& options, std::span<const int64_t> prompt,
                  const model::GenerateResult& result, const Cache* cache,
                  const Engine& engine) {
  if (!options.json) {
    if (engine.tokenizer)
      write_out("\n");
    else
      write_out(Json(result.tokens).dump() + "\n");
    write_error_line(summary(result, engine, options.model, cache) +
                     (options.text.sampling.temperature > 0
                          ? ", seed " + std::to_string(result.seed)
                          : std::string()));
    return;
  }
  Json json = result_json(prompt, result, engine, options.model, cache);
  if (result.reuse) json["reuse"] = reuse_json(result);
  if (options.log_probs.value_or(0) > 0) {
    json["top_logprobs"] = best_json(result);
  }
  if (options.text.sampling.temperature > 0) json["seed"] = result.seed;
  write_json(json);
}

void run(const Options& options) {
  options.check();
  std::string text = options.prompt.value_or("");
  std::vector<int64_t> tokens;
  if (options.prompt_file) text = read_text(*options.prompt_file);
  if (options.tokens) {
    tokens = parse_tokens(*options.tokens);
  } else if (text.empty()) {
    throw UsageError("the prompt must not be empty");
  }
  Interrupt interrupt;
  Progress progress;
  const Engine engine = load_engine(options.model, progress, true);
  if (!options.tokens) {
    tokens = Prompts(options.model.model, engine).tokens(text, options.chat);
  }

  auto generate = generate_options(engine, options.model, options.text);
  if (options.json || options.log_probs) {
    generate.log_probs = options.log_probs.value_or(0);
  }
  const auto cache = cache_for(engine, options.model, tokens, generate);
  const auto runner = runner_for(engine, options.model, generate, cache.get());
  generate.graphs = runner.get();
  generate.prefix = prefix_for(engine, options.model, options.prefix);
  generate.space = space_of(engine, "");
  const auto result =
      model::generate(*engine.model, cache.get(), tokens, generate,
                      hooks(options, progress, interrupt.token()));
  progress.clear();
  write_result(options, tokens, result, cache.get(), engine);
  // Last: a full disk costs what was to be kept, not the answer.
  if (generate.prefix) generate.prefix->save();
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("generate", "continue a prompt, or answer it");
  add_model_options(*command, options->model);
  add_adapter_options(*command, options->model);
  command->add_option("--prompt", options->prompt, "the prompt")
      ->type_name("TEXT");
  command
      ->add_option("--prompt-file", options->prompt_file,
                   "a file with the prompt; - reads standard input")
      ->type_name("FILE");
  command
      ->add_option("--tokens", options->tokens,
                   "token ids as in 1,2,3, used exactly")
      ->type_name("IDS");
  command->add_flag("--chat", options->chat,
                    "put the prompt into the model's chat template");
  add_text_options(*command, options->text);
  add_prefix_options(*command, options->prefix);
  command
      ->add_option("--logprobs", options->log_probs,
                   "with --json: also the N most likely tokens at each place")
      ->check(not_whole<int64_t>)
      ->type_name("N");
  command->add_flag("--json", options->json, "one JSON object on one line");
  command->footer(
      "Example: kvcache generate --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--chat --prompt \"What is the capital of France?\"");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
