// choose_command.cpp - `kvcache choose`: multiple-choice requests, their
// probabilities.

#include <algorithm>
#include <filesystem>
#include <memory>

#include "examples/cli/choose_requests.h"
#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/graphs.h"
#include "examples/cli/output_file.h"
#include "examples/cli/prefix.h"
#include "kvcache/model/choice_runner.h"

namespace kvcache::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostMb = int64_t{1} << 30;
constexpr int64_t kMinPrefix = 16;  // tokens: a person's states are short

struct Options {
  ModelOptions model;
  std::string requests, output, letters;
  int64_t mb = 256;

  void check() const;
};

void Options::check() const {
  model.check();
  if (model.cache != "window" || model.steps_per_replay != 1) {
    throw UsageError(
        "choose runs recorded chunks over window caches of its own; leave "
        "--cache and --steps-per-replay out");
  }
  if (model.kv_format != "auto") {
    throw UsageError("--kv-format " + model.kv_format +
                     ": choose keeps K and V in the model's dtype; generate, "
                     "score, batch, bench, verify and chat can");
  }
  if (mb < 0 || mb > kMostMb) {
    throw UsageError("--prefix-cache-mb must be between 0 and " +
                     std::to_string(kMostMb) + " but got " +
                     std::to_string(mb));
  }
  std::error_code error;  // equivalent() of files that do not exist
  if (fs::equivalent(requests, output, error)) {
    throw UsageError("--output must not be the file of the requests, " +
                     requests);
  }
}

// As given, or " A", " B", ... as far as each is one token.
std::vector<int64_t> letters_of(const Options& options, const Engine& engine) {
  if (!options.letters.empty()) return parse_tokens(options.letters);
  const char* why = "choices without --letters";
  const model::Tokenizer& tokenizer = tokenizer_of(engine, why);
  std::vector<int64_t> letters;
  for (char letter = 'A'; letter <= 'Z'; ++letter) {
    const auto ids = tokenizer.encode(std::string{' ', letter});
    if (ids.size() != 1) break;
    letters.push_back(ids[0]);
  }
  if (letters.size() < 2) {
    throw std::runtime_error(
        "\" A\" and \" B\" are no single tokens of this model; give the ids of "
        "its choices with --letters");
  }
  return letters;
}

std::vector<int64_t> tokens_of(const TextOrTokens& part, const Engine& engine,
                               bool first) {
  if (const auto* ids = std::get_if<std::vector<int64_t>>(&part)) return *ids;
  return tokenizer_of(engine, "a text")
      .encode(std::get<std::string>(part), {.add_bos = first});
}

model::ChoiceRequest request_of(const ChooseLine& line, const Engine& engine) {
  model::ChoiceRequest request{.slots = line.slots,
                               .option_counts = line.options,
                               .space = space_of(engine, line.name_space),
                               .route = line.route};
  if (line.tokens) {
    request.ids = *line.tokens;
    request.state_len = line.state_len.value_or(0);
  } else {
    request.ids = tokens_of(*line.state, engine, true);
    request.state_len = static_cast<int64_t>(request.ids.size());
    const auto suffix = tokens_of(*line.suffix, engine, false);
    request.ids.insert(request.ids.end(), suffix.begin(), suffix.end());
  }
  for (int64_t& slot : request.slots) {
    if (slot < 0) slot += static_cast<int64_t>(request.ids.size());
  }
  return request;
}

// Requests of lines without an error, and the answers of all.
struct Work {
  std::vector<ChooseLine> lines;
  std::vector<std::pair<size_t, model::ChoiceRequest>> requests;  // by line
  std::vector<Json> answers;
  int64_t failed = 0;

  void fail(size_t line, const std::string& error) {
    ++failed;
    answers[line] = {{"id", lines[line].id}, {"error", error}};
  }
};

Work prepare(std::vector<ChooseLine> lines, const Engine& engine) {
  Work work;
  work.lines = std::move(lines);
  work.answers.resize(work.lines.size());
  for (size_t i = 0; i < work.lines.size(); ++i) {
    try {
      if (!work.lines[i].error.empty()) {
        work.fail(i, work.lines[i].error);
        continue;
      }
      work.requests.emplace_back(i, request_of(work.lines[i], engine));
    } catch (const std::exception& error) {
      work.fail(i, message_of(error));
    }
  }
  return work;
}

// Memory for the longest request, and no more.
std::vector<int64_t> spans_for(const Work& work,
                               const model::ChoiceOptions& defaults) {
  size_t longest = 1;
  for (const auto& [line, request] : work.requests) {
    longest = std::max(longest, request.ids.size());
  }
  // A chunk is padded by less than the largest gap between two lengths.
  int64_t gap = defaults.lengths.front();
  for (size_t i = 1; i < defaults.lengths.size(); ++i) {
    gap = std::max(gap, defaults.lengths[i] - defaults.lengths[i - 1]);
  }
  const int64_t need = static_cast<int64_t>(longest) + gap;
  std::vector<int64_t> spans;
  for (const int64_t span : defaults.spans) {
    if (span < need) spans.push_back(span);
  }
  if (spans.size() < defaults.spans.size()) spans.push_back(need);
  return spans;
}

model::ChoiceRunner make_runner(const Options& options, const Engine& engine,
                                const Work& work) {
  const model::Transformer& model = *engine.model;
  const bool any_token = model.row_exact(Role::kPrefill) && model.roles_agree();
  model::ChoiceOptions choices{.letters = letters_of(options, engine)};
  choices.spans = spans_for(work, choices);
  choices.min_prefix = kMinPrefix;
  if (any_token) choices.align = 1;
  choices.graphs = graphs_for(options.model);
  return {model::make_routed(engine.model),
          std::make_shared<CheckpointStore>(
              StoreOptions{.max_bytes = static_cast<size_t>(options.mb) << 20,
                           .min_prefix = kMinPrefix}),
          std::move(choices)};
}

Json answer_json(const Options& options, const Json& id,
                 const model::ChoiceResult& result) {
  Json json;
  json["id"] = id;
  json["probabilities"] = result.probabilities;
  json["route"] = result.route;
  json["reuse"] = nullptr;
  if (options.mb == 0) return json;
  Json reuse = report_json(result.report);
  reuse["class"] = result.from_memo ? "memo" : to_string(result.reuse);
  reuse["refusal"] = result.refusal == model::ChoiceRefusal::kNone
                         ? Json(nullptr)
                         : Json(to_string(result.refusal));
  json["reuse"] = std::move(reuse);
  return json;
}

std::string summary(const Work& work, const model::ChoiceInfo& info) {
  const auto count = [](int64_t n, const char* what) {
    return std::to_string(n) + " " + what;
  };
  const size_t total = work.lines.size();
  return std::to_string(total) + (total == 1 ? " request" : " requests") +
         (work.failed > 0 ? ", " + count(work.failed, "in error") : "") + "; " +
         count(info.store.hits, "hits, ") +
         count(info.store.partial, "partial, ") +
         count(info.store.cold, "cold, ") +
         count(info.memo_hits, "repeated, ") +
         count(info.plain, "without the store; ") +
         count(info.store.tokens_reused, "tokens reused, ") +
         count(info.store.tokens_computed, "computed; ") +
         count(info.graphs, "graphs");
}

void run(const Options& options) {
  options.check();
  const OutputFile output(options.output);
  auto lines = parse_choices(read_file(options.requests));
  Progress progress;
  const Engine engine = load_engine(options.model, progress, true);
  Work work = prepare(std::move(lines), engine);
  model::ChoiceRunner runner = make_runner(options, engine, work);
  for (const auto& [line, request] : work.requests) {
    try {
      work.answers[line] =
          answer_json(options, work.lines[line].id, runner.answer(request));
    } catch (const std::exception& error) {
      work.fail(line, message_of(error));
    }
    progress.show("answering", static_cast<double>(line + 1) /
                                   static_cast<double>(work.lines.size()));
  }
  progress.clear();
  std::string text;
  for (const Json& answer : work.answers) {
    text += answer.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  output.write(text);
  const auto total = static_cast<int64_t>(work.lines.size());
  if (total > 0 && work.failed == total) {
    throw std::runtime_error("none of " + std::to_string(total) +
                             " requests succeeded; " + options.output +
                             " says why");
  }
  write_error_line(summary(work, runner.info()));
}

}  // namespace

void add_choose(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "choose", "how likely each choice is, for a file of questions");
  add_model_options(*command, options->model);
  command
      ->add_option("--requests", options->requests,
                   "a file with one JSON object on each line")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--output", options->output,
                   "where the answers go, in the order of the requests")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--letters", options->letters,
                   "token ids of the choices, in order; else \" A\", \" B\", "
                   "...")
      ->type_name("IDS");
  command
      ->add_option("--prefix-cache-mb", options->mb,
                   "memory for states that later requests begin with; 0: none")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("MB");
  command->footer(
      "A request is an object with `state` and `suffix` (texts or ids), or "
      "`tokens` (ids) with\n`state_len`; `options`, how many of the letters "
      "each slot chooses from; `slots`, the\npositions whose next token is "
      "asked for (the last one; below 0: from the end); id,\nnamespace, route. "
      "The state is remembered, so that the next question about it\ncomputes "
      "its suffix only.\n"
      "Exit status 0 if any request succeeded, or there was none.\n"
      "Example: kvcache choose --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--requests in.jsonl --output out.jsonl");
  command->callback([options] {
    if (options->model.cache.empty()) options->model.cache = "window";
    run(*options);
  });
}

}  // namespace kvcache::cli
