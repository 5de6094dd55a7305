// choose_command.cpp - `kvcache choose`: multiple-choice requests, their
// probabilities.

#include <algorithm>
#include <filesystem>
#include <map>
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
  if (model.adapter_from != 0) {
    throw UsageError(
        "choose runs all of a text with its adapter; leave --adapter-from out");
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

std::vector<int64_t> given_letters(const std::string& letters) {
  try {
    return parse_tokens(letters);
  } catch (const UsageError&) {
    throw UsageError("--letters must be token ids as in 1,2,3 but got '" +
                     letters + "'");
  }
}

// As given, or " A", " B", ... as far as each is one token.
std::vector<int64_t> letters_of(const Options& options, const Engine& engine) {
  if (!options.letters.empty()) return given_letters(options.letters);
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

// The place of an adapter, from 1 on; 0: none.
int64_t route_of(const std::string& name, const Engine& engine) {
  if (name.empty()) return 0;
  std::string known;
  int64_t route = 0;
  for (const model::AdapterInfo& adapter : engine.model->adapters()) {
    ++route;
    if (adapter.name == name) return route;
    known += (known.empty() ? "" : ", ") + adapter.name;
  }
  throw std::runtime_error("route must be an adapter of the model (" +
                           (known.empty() ? "none" : known) + ") but got " +
                           name);
}

model::ChoiceRequest request_of(const Options& options, const ChooseLine& line,
                                const Engine& engine) {
  model::ChoiceRequest request{.slots = line.slots,
                               .option_counts = line.options,
                               .space = space_of(engine, line.name_space)};
  if (!line.route) {
    const std::string route = options.model.route.value_or("");
    if (!route.empty()) request.route = route_of(route, engine);
  } else if (const auto* name = std::get_if<std::string>(&*line.route)) {
    request.route = route_of(*name, engine);
  } else {
    request.route = std::get<int64_t>(*line.route);
  }
  if (line.tokens) {
    request.ids = *line.tokens;
    request.state_len = line.state_len.value_or(0);
  } else {
    request.ids = tokens_of(*line.state, engine, true);
    request.state_len = static_cast<int64_t>(request.ids.size());
    const auto suffix = tokens_of(*line.suffix, engine, false);
    request.ids.insert(request.ids.end(), suffix.begin(), suffix.end());
  }
  if (request.ids.empty()) return request;  // which the runner refuses
  const auto count = static_cast<int64_t>(request.ids.size());
  for (int64_t& slot : request.slots) {
    if (slot < -count || slot >= count) {
      throw std::runtime_error(
          "slots must be positions of the " + std::to_string(count) +
          " tokens, or from -" + std::to_string(count) +
          " on from their end, but one is " + std::to_string(slot));
    }
    if (slot < 0) slot += count;
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

Work prepare(const Options& options, std::vector<ChooseLine> lines,
             const Engine& engine) {
  Work work;
  work.lines = std::move(lines);
  work.answers.resize(work.lines.size());
  for (size_t i = 0; i < work.lines.size(); ++i) {
    try {
      if (!work.lines[i].error.empty()) {
        work.fail(i, work.lines[i].error);
        continue;
      }
      work.requests.emplace_back(i, request_of(options, work.lines[i], engine));
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

model::ChoiceOptions choice_options(const Options& options,
                                    const Engine& engine, const Work& work) {
  const model::Transformer& model = *engine.model;
  const bool any_token = model.row_exact(Role::kPrefill) && model.roles_agree();
  model::ChoiceOptions choices{.letters = letters_of(options, engine)};
  choices.spans = spans_for(work, choices);
  choices.min_prefix = kMinPrefix;
  if (any_token) choices.align = 1;
  choices.graphs = graphs_for(options.model);
  return choices;
}

// Who answers. Adapters that leave the lowest layer as it is are routes of one
// runner, over lower layers that all share; else each has a runner, and texts,
// of its own.
class Runners {
 public:
  Runners(const Options& options, const Engine& engine, const Work& work)
      : engine_(engine),
        choices_(choice_options(options, engine, work)),
        store_(std::make_shared<CheckpointStore>(
            StoreOptions{.max_bytes = static_cast<size_t>(options.mb) << 20,
                         .min_prefix = kMinPrefix})) {
    for (const model::AdapterInfo& adapter : engine.model->adapters()) {
      apart_ = apart_ || adapter.first_layer == 0;
    }
    if (!apart_) runner_of(0);
  }

  model::ChoiceResult answer(model::ChoiceRequest request) {
    const auto adapters = engine_.model->adapters();
    const int64_t route = request.route.value_or(0);
    if (!apart_ || route <= 0 || route > std::ssize(adapters)) {
      return runner_of(0).answer(request);
    }
    request.route.reset();
    request.space.adapter = adapters[static_cast<size_t>(route - 1)].digest;
    model::ChoiceResult result = runner_of(route).answer(request);
    result.route = route;
    return result;
  }

  // The store's, and the sums of all runners.
  model::ChoiceInfo info() const {
    model::ChoiceInfo sum;
    for (const auto& [route, runner] : runners_) {
      const model::ChoiceInfo one = runner->info();
      sum.store = one.store;
      sum.memo_hits += one.memo_hits;
      sum.plain += one.plain;
      sum.graphs += one.graphs;
    }
    return sum;
  }

 private:
  std::shared_ptr<const model::RoutedModel> routed_for(int64_t route) const {
    if (!apart_) return model::make_routed(engine_.model);
    if (route == 0) return model::make_routed(engine_.model->with_adapters({}));
    const auto at = static_cast<size_t>(route - 1);
    return model::make_routed(engine_.model,
                              engine_.model->adapters()[at].name);
  }

  model::ChoiceRunner& runner_of(int64_t route) {
    auto& runner = runners_[route];
    if (!runner) {
      runner = std::make_unique<model::ChoiceRunner>(routed_for(route), store_,
                                                     choices_);
    }
    return *runner;
  }

  const Engine& engine_;
  model::ChoiceOptions choices_;
  std::shared_ptr<CheckpointStore> store_;
  bool apart_ = false;
  std::map<int64_t, std::unique_ptr<model::ChoiceRunner>> runners_;
};

// By its name, where there are adapters; null: none.
Json route_json(int64_t route, const Engine& engine) {
  const auto adapters = engine.model->adapters();
  if (adapters.empty()) return route;
  if (route == 0) return nullptr;
  return adapters[static_cast<size_t>(route - 1)].name;
}

Json answer_json(const Options& options, const Engine& engine, const Json& id,
                 const model::ChoiceResult& result) {
  Json json;
  json["id"] = id;
  json["probabilities"] = result.probabilities;
  json["route"] = route_json(result.route, engine);
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
  Work work = prepare(options, std::move(lines), engine);
  Runners runners(options, engine, work);
  for (const auto& [line, request] : work.requests) {
    try {
      work.answers[line] = answer_json(options, engine, work.lines[line].id,
                                       runners.answer(request));
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
  write_error_line(summary(work, runners.info()));
}

}  // namespace

void add_choose(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "choose", "how likely each choice is, for a file of questions");
  add_model_options(*command, options->model);
  add_adapter_options(*command, options->model, kRouteOfRequests);
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
      "asked for (the last one; below 0: from the end); id,\nnamespace, route "
      "(the name of an --adapter). The state is remembered, so that the\nnext "
      "question about it computes its suffix only.\n"
      "Exit status 0 if any request succeeded, or there was none.\n"
      "Example: kvcache choose --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--requests in.jsonl --output out.jsonl");
  command->callback([options] {
    if (options->model.cache.empty()) options->model.cache = "window";
    run(*options);
  });
}

}  // namespace kvcache::cli
