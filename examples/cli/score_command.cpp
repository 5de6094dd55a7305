// score_command.cpp - `kvcache score`: how likely a model finds a text.

#include "kvcache/model/score.h"

#include <memory>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"

namespace kvcache::cli {
namespace {

struct Options {
  ModelOptions model;
  std::string tokens;
  bool json = false;
};

void run(const Options& options) {
  options.model.check();
  const auto tokens = parse_tokens(options.tokens);
  Progress progress;
  const Engine engine = load_engine(options.model, progress, false);
  const model::ScoreOptions score{
      .context = options.model.context,
      .chunk = options.model.chunk,
      .progress =
          [&](int64_t done, int64_t total) {
            progress.show("scoring", static_cast<double>(done) /
                                         static_cast<double>(total));
          },
      .adapter = options.model.adapter(),
      .adapter_from = options.model.adapter_from};
  model::check_score(*engine.model, tokens, score);
  const auto cache = model::make_cache(
      options.model.cache_kind(*engine.model), *engine.model,
      {.capacity =
           options.model.context.value_or(static_cast<int64_t>(tokens.size())),
       .kv_format = options.model.kv_storage()});
  const auto log_probs =
      model::score(*engine.model, cache.get(), tokens, score);
  progress.clear();
  if (options.json) {
    Json json;
    json["logprobs"] = log_probs;
    write_json(json);
    return;
  }
  for (size_t i = 0; i < log_probs.size(); ++i) {
    write_out(std::to_string(tokens[i + 1]) + "\t" + Json(log_probs[i]).dump() +
              "\n");
  }
}

}  // namespace

void add_score(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "score", "the log-probability of each token after the first");
  add_model_options(*command, options->model);
  add_adapter_options(*command, options->model);
  command
      ->add_option("--tokens", options->tokens,
                   "token ids as in 1,2,3, used exactly")
      ->required()
      ->type_name("IDS");
  command->add_flag("--json", options->json, "one JSON object on one line");
  command->footer(
      "Example: kvcache score --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--tokens 504,3575,282,4649,314,7042 --json");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
