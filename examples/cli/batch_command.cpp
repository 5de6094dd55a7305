// batch_command.cpp - `kvcache batch`: a file of requests, a file of answers.

#include "kvcache/model/batcher.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "examples/cli/batch_requests.h"
#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/graphs.h"
#include "examples/cli/output_file.h"
#include "examples/cli/prefix.h"

namespace kvcache::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  ModelOptions model;
  TextOptions text;
  bool chat = false;
  std::string requests, output;
  int64_t slots = 4;
  PrefixFlags prefix;

  void check() const;
};

void Options::check() const {
  model.check();
  text.check();
  if (slots < 1) {
    throw UsageError("--slots must be at least 1 but got " +
                     std::to_string(slots));
  }
  if (model.cache == "none" && slots != 1) {
    throw UsageError(
        "--cache none recomputes everything, one request at a time, but got "
        "--slots " +
        std::to_string(slots) + "; give --slots 1, or another --cache");
  }
  if (model.steps_per_replay != 1) {
    throw UsageError("--steps-per-replay " +
                     std::to_string(model.steps_per_replay) +
                     ": a batch samples each request on the host, one token a "
                     "replay; leave it out");
  }
  prefix.check(model);
  std::error_code error;  // equivalent() of files that do not exist
  if (fs::equivalent(requests, output, error)) {
    throw UsageError("--output must not be the file of the requests, " +
                     requests);
  }
}

// The requests of a file on their way to answers.
struct Work {
  std::vector<BatchLine> lines;
  std::vector<model::BatchRequest> requests;  // of lines without an error
  std::vector<size_t> line_of;                // [requests]
  std::vector<Json> answers;                  // [lines]
  int64_t done = 0, failed = 0;               // lines
  int64_t tokens_in = 0, tokens_out = 0, tokens_reused = 0;
  int64_t longest = 1;  // tokens of a request, new ones included

  void fail(size_t line, const std::string& error);
  void answer(size_t line, const model::GenerateResult& result,
              double queued_ms);
  std::string text() const;  // of the whole output
};

void Work::fail(size_t line, const std::string& error) {
  ++done;
  ++failed;
  answers[line] = {{"id", lines[line].id}, {"error", error}};
}

void Work::answer(size_t line, const model::GenerateResult& result,
                  double queued_ms) {
  ++done;
  Json json;
  json["id"] = lines[line].id;
  json["tokens"] = result.tokens;
  json["text"] = result.text;
  json["logprobs"] = result.log_probs;
  json["finish_reason"] = model::to_string(result.finish_reason);
  json["reuse"] = reuse_json(result);
  const model::GenerateTimings& timings = result.timings;
  json["timings"] = {
      {"queued_ms", queued_ms},
      {"prefill_ms", timings.prefill_ms},
      {"decode_ms", timings.decode_ms},
      {"prefill_tokens_per_second", timings.prefill_tokens_per_second()},
      {"decode_tokens_per_second", timings.decode_tokens_per_second()}};
  if (lines[line].text.sampling.temperature > 0) json["seed"] = result.seed;
  answers[line] = std::move(json);
  tokens_in += timings.prefill_tokens;
  tokens_reused += result.reused;
  tokens_out += static_cast<int64_t>(result.tokens.size());
}

std::string Work::text() const {
  std::string text;
  for (const Json& answer : answers) {
    text += answer.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return text;
}

// What `line` asks for. Throws if the model cannot be asked that.
model::BatchRequest request_of(
    const Options& options, const Engine& engine, Prompts& prompts,
    const std::shared_ptr<model::PrefixCache>& prefix, const BatchLine& line,
    const std::stop_token& stop) {
  model::BatchRequest request{
      .options = generate_options(engine, options.model, line.text),
      .hooks = {.stop = stop}};
  request.options.log_probs = 0;
  // One that is loaded is not yet one that everybody wants.
  request.options.adapter =
      line.route ? *line.route : options.model.route.value_or("");
  if (line.adapter_from) request.options.adapter_from = *line.adapter_from;
  request.options.prefix = prefix;
  request.options.space = space_of(engine, line.name_space);
  request.tokens =
      line.tokens
          ? *line.tokens
          : prompts.tokens(*line.prompt, line.chat.value_or(options.chat));
  return request;
}

Work prepare(const Options& options, const Engine& engine,
             const std::shared_ptr<model::PrefixCache>& prefix,
             std::vector<BatchLine> lines, const std::stop_token& stop) {
  Work work;
  work.lines = std::move(lines);
  work.answers.resize(work.lines.size());
  Prompts prompts(options.model.model, engine);
  for (size_t i = 0; i < work.lines.size(); ++i) {
    const BatchLine& line = work.lines[i];
    if (!line.error.empty()) {
      work.fail(i, line.error);
      continue;
    }
    try {
      auto request = request_of(options, engine, prompts, prefix, line, stop);
      // What is wrong with it does not depend on who comes along.
      const int64_t fresh = model::plan_new_tokens(
          *engine.model, request.tokens, request.options);
      work.longest = std::max(
          work.longest, static_cast<int64_t>(request.tokens.size()) + fresh);
      work.requests.push_back(std::move(request));
      work.line_of.push_back(i);
    } catch (const std::exception& error) {
      work.fail(i, message_of(error));
    }
  }
  return work;
}

void show(Progress& progress, const Work& work) {
  progress.show("answering", static_cast<double>(work.done) /
                                 static_cast<double>(work.lines.size()));
}

// Of --cache none: no rows to share.
void serve_alone(const Engine& engine, Work& work, Progress& progress) {
  for (size_t i = 0; i < work.requests.size(); ++i) {
    const auto& [tokens, generate, hooks] = work.requests[i];
    try {
      work.answer(
          work.line_of[i],
          model::generate(*engine.model, nullptr, tokens, generate, hooks), 0);
    } catch (const std::exception& error) {
      work.fail(work.line_of[i], message_of(error));
    }
    show(progress, work);
  }
}

void serve_together(const Engine& engine, std::unique_ptr<Cache> cache,
                    std::shared_ptr<GraphBackend> graphs, Work& work,
                    Progress& progress) {
  // Ids count from 1 in the order of submission.
  const auto finished = [&](const model::BatchResult& result) {
    const size_t line = work.line_of[result.id - 1];
    if (result.status == model::BatchStatus::kFinished) {
      work.answer(line, result.result, result.queued_ms);
    } else {
      work.fail(line, message_of(std::runtime_error(result.error)));
    }
    show(progress, work);
  };
  model::Batcher batcher(
      engine.model, std::move(cache),
      {.graphs = std::move(graphs), .on_finished = finished});
  for (model::BatchRequest& request : work.requests) {
    batcher.submit(std::move(request));
  }
  batcher.run();
}

// Every combination of --cache and --slots is decided here and in check().
void serve(const Options& options, const Engine& engine, Work& work,
           Progress& progress) {
  const model::CacheKind kind = options.model.cache_kind(*engine.model);
  if (kind == model::CacheKind::kNone) {
    serve_alone(engine, work, progress);
    return;
  }
  const auto most = static_cast<int64_t>(work.requests.size());
  const int64_t rows = std::clamp<int64_t>(most, 1, options.slots);
  serve_together(engine,
                 model::make_cache(
                     kind, *engine.model,
                     {.rows = rows,
                      .capacity = options.model.context.value_or(work.longest),
                      .slots = true,
                      .kv_format = options.model.kv_storage()}),
                 graphs_for(options.model), work, progress);
}

void check_context(const Options& options, const Engine& engine) {
  const int64_t most = engine.model->context_length();
  const auto& context = options.model.context;
  if (context && *context > most) {
    throw std::runtime_error(
        "the context must be between 1 and " + std::to_string(most) +
        " tokens, the model's, but got " + std::to_string(*context));
  }
}

std::string summary(const Options& options, const Engine& engine,
                    const Work& work, double seconds) {
  char speed[40];
  std::snprintf(speed, sizeof(speed), " (%.1f tok/s)",
                static_cast<double>(work.tokens_out) / seconds);
  const size_t total = work.lines.size();
  return std::to_string(total) + (total == 1 ? " request" : " requests") +
         (work.failed > 0 ? ", " + std::to_string(work.failed) + " in error"
                          : std::string()) +
         "; " + std::to_string(work.tokens_in) + " tokens in, " +
         (options.prefix.mb > 0
              ? std::to_string(work.tokens_reused) + " reused, "
              : std::string()) +
         std::to_string(work.tokens_out) + " out" + speed + "; cache " +
         std::string(
             model::to_string(options.model.cache_kind(*engine.model))) +
         ", slots " + std::to_string(options.slots);
}

void run(const Options& options) {
  options.check();
  const OutputFile output(options.output);
  auto lines = parse_batch(read_file(options.requests), options.text);
  Interrupt interrupt;
  Progress progress;
  const Engine engine = load_engine(options.model, progress, true);
  check_context(options, engine);
  const auto prefix = prefix_for(engine, options.model, options.prefix);
  Work work =
      prepare(options, engine, prefix, std::move(lines), interrupt.token());
  const auto start = std::chrono::steady_clock::now();
  serve(options, engine, work, progress);
  const std::chrono::duration<double> time =
      std::chrono::steady_clock::now() - start;
  progress.clear();
  output.write(work.text());
  if (prefix) prefix->save();
  const auto total = static_cast<int64_t>(work.lines.size());
  if (total > 0 && work.failed == total) {
    throw std::runtime_error("none of " + std::to_string(total) +
                             " requests succeeded; " + options.output +
                             " says why");
  }
  write_error_line(summary(options, engine, work, time.count()));
}

}  // namespace

void add_batch(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "batch", "answer a file of requests, some of them at the same time");
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
      ->add_option("--slots", options->slots,
                   "requests that run at the same time")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
  add_prefix_options(*command, options->prefix);
  command->add_flag("--chat", options->chat,
                    "put prompts into the model's chat template");
  add_text_options(*command, options->text);
  command->footer(
      "A request is an object with `prompt` (text) or `tokens` (ids), and what "
      "it wants\nother than the options above: id, max_new_tokens, "
      "temperature, top_k, top_p,\nmin_p, repetition_penalty, seed, stop, "
      "ignore_eos, chat, namespace, route (the name of an\n--adapter), "
      "adapter_from. One that is wrong gets an `error` for an answer, and\nthe "
      "others go on. The output is there when all are answered, not before.\n"
      "Ctrl-C ends them with what they have (`cancelled`).\n"
      "Exit status 0 if any request succeeded, or there was none.\n"
      "Example: kvcache batch --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--requests in.jsonl --output out.jsonl");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
