// tokenize_command.cpp - `kvcache tokenize`: the ids of a text.

#include <memory>

#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

struct Options {
  std::string model;
  std::optional<std::string> text, text_file;
  bool special = false;
  bool json = false;
};

void run(const Options& options) {
  if (options.text.has_value() == options.text_file.has_value()) {
    throw UsageError("give exactly one of --text and --text-file");
  }
  const std::string text =
      options.text ? *options.text : read_text(*options.text_file);
  const auto tokenizer = model::load_tokenizer(options.model);
  const auto tokens = tokenizer->encode(text, {.special = options.special});
  if (options.json) {
    Json json;
    json["tokens"] = tokens;
    write_json(json);
    return;
  }
  // In the form that --tokens takes.
  std::string line;
  for (const int64_t id : tokens) {
    line += (line.empty() ? "" : ",") + std::to_string(id);
  }
  write_out(line + "\n");
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "tokenize", "the ids of a text, without begin and end tokens");
  add_model_path(*command, options->model);
  command->add_option("--text", options->text, "the text")->type_name("TEXT");
  command
      ->add_option("--text-file", options->text_file,
                   "a file with the text; - reads standard input")
      ->type_name("FILE");
  command->add_flag("--special", options->special,
                    "recognise control tokens spelled out in the text");
  command->add_flag("--json", options->json, "one JSON object on one line");
  command->footer(
      "Example: kvcache tokenize --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--text \"The capital of France\"");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
