// verify_command.cpp - `kvcache verify`: the same tokens cold and warm.

#include "kvcache/model/verify.h"

#include <memory>
#include <stdexcept>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

struct Options {
  ModelOptions model;
  std::optional<std::string> prompt, tokens;
  std::optional<int64_t> split;
  int64_t new_tokens = 16;
  bool json = false;

  void check() const;
};

void Options::check() const {
  model.check();
  if (prompt.has_value() == tokens.has_value()) {
    throw UsageError("give exactly one of --prompt and --tokens");
  }
  if (model.cache == "none") {
    throw UsageError(
        "--cache none has nothing to save; choose another --cache");
  }
  if (new_tokens < 0) {
    throw UsageError("--max-new-tokens must be at least 0 but got " +
                     std::to_string(new_tokens));
  }
}

void run(const Options& options) {
  options.check();
  std::vector<int64_t> tokens;
  if (options.tokens) tokens = parse_tokens(*options.tokens);
  Progress progress;
  const Engine engine = load_engine(options.model, progress, true);
  if (options.prompt) {
    tokens =
        Prompts(options.model.model, engine).tokens(*options.prompt, false);
  }
  const model::VerifyReport report =
      model::verify_reuse(*engine.model, tokens,
                          {.kind = options.model.cache_kind(*engine.model),
                           .split = options.split,
                           .chunk = options.model.chunk,
                           .new_tokens = options.new_tokens,
                           .adapter = options.model.adapter(),
                           .adapter_from = options.model.adapter_from,
                           .kv_format = options.model.kv_storage()});
  progress.clear();
  const bool same = report.first_difference.empty();
  if (options.json) {
    Json json;
    json["identical"] = same;
    json["tokens"] = tokens.size();
    json["split"] = report.split;
    json["layers"] = report.layers;
    json["steps"] = report.steps;
    json["saved_bytes"] = report.bytes;
    json["first_difference"] =
        same ? Json(nullptr) : Json(report.first_difference);
    write_json(json);
  } else if (same) {
    write_out("bit-identical: " + std::to_string(report.layers) +
              " layers and the logits of " + std::to_string(report.steps) +
              " steps, taken up after " + std::to_string(report.split) +
              " of " + std::to_string(tokens.size()) + " tokens\n");
  }
  if (!same) {
    throw std::runtime_error("taken up after " + std::to_string(report.split) +
                             " tokens, the first difference is in " +
                             report.first_difference);
  }
}

}  // namespace

void add_verify(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "verify", "compare a run that was taken up with one that never left");
  add_model_options(*command, options->model);
  add_adapter_options(*command, options->model);
  command->add_option("--prompt", options->prompt, "the text")
      ->type_name("TEXT");
  command
      ->add_option("--tokens", options->tokens,
                   "token ids as in 1,2,3, used exactly")
      ->type_name("IDS");
  command
      ->add_option("--split", options->split,
                   "save and take up after so many tokens; default: half")
      ->check(not_whole<int64_t>)
      ->type_name("N");
  command
      ->add_option("--max-new-tokens", options->new_tokens,
                   "decode so many on both sides")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--json", options->json, "one JSON object on one line");
  command->footer(
      "Exit status 0 if every bit of every layer's memory and of the logits is "
      "the same;\n1 if not, and the first difference is named.");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
