// bench_command.cpp - `kvcache bench`: tokens per second at given lengths.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include "examples/cli/bench_worker.h"
#include "examples/cli/commands.h"
#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/graphs.h"

namespace kvcache::cli {
namespace {

struct Options {
  ModelOptions model;
  std::optional<std::string> lengths;  // empty: those of 32,512,2000 that fit
  int64_t decode = 64;
  int64_t repeat = 3;
  bool json = false;
  bool worker = false;
  int64_t prefix_cache_mb = 0;  // of a worker
};

struct Speed {
  double prefill = 0;
  double decode = 0;
};

// Ordinary token ids, the same in every run.
std::vector<int64_t> some_tokens(const Engine& engine, int64_t count) {
  std::vector<int64_t> tokens;
  uint64_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    tokens.push_back(static_cast<int64_t>(
        (state >> 33) % static_cast<uint64_t>(engine.model->vocab_size())));
  }
  return tokens;
}

// The best of a few runs: what disturbs one only makes it slower.
Speed measure(const Options& options, const Engine& engine, int64_t length) {
  const auto tokens = some_tokens(engine, length);
  Speed best;
  for (int64_t i = 0; i < options.repeat; ++i) {
    auto generate = generate_options(engine, options.model, {});
    generate.max_new_tokens = options.decode + 1;
    generate.ignore_eos = true;
    const auto cache = cache_for(engine, options.model, tokens, generate);
    const auto runner =
        runner_for(engine, options.model, generate, cache.get());
    generate.graphs = runner.get();
    const auto result =
        model::generate(*engine.model, cache.get(), tokens, generate);
    const model::GenerateTimings& timings = result.timings;
    best.prefill = std::max(best.prefill, timings.prefill_tokens_per_second());
    best.decode = std::max(best.decode, timings.decode_tokens_per_second());
  }
  return best;
}

void write_speed(const Options& options, const Engine& engine, int64_t length,
                 const Speed& speed) {
  const std::string dtype = dtype_name(*engine.model);
  const std::string kind(
      model::to_string(options.model.cache_kind(*engine.model)));
  const bool int8 = options.model.kv_storage() == KvFormat::kInt8;
  if (options.json) {
    Json json;
    json["decode_tokens_per_second"] = speed.decode;
    json["prefill_tokens_per_second"] = speed.prefill;
    json["context"] = length;
    json["decoded"] = options.decode;
    json["dtype"] = dtype;
    json["cache"] = kind;
    json["kv_format"] = int8 ? "int8" : dtype;
    json["threads"] = thread_count();
    json["weight_bytes"] = engine.model->weight_bytes();
    json["load_ms"] = engine.load_ms;
    json["peak_rss_bytes"] = peak_rss_bytes();
    write_json(json);
    return;
  }
  char line[160];
  std::snprintf(line, sizeof(line),
                "%6lld tokens: prefill %8.1f tok/s, decode %7.1f tok/s (%s, "
                "%s)\n",
                static_cast<long long>(length), speed.prefill, speed.decode,
                dtype.c_str(), (kind + (int8 ? ", K/V in int8" : "")).c_str());
  write_out(line);
}

void run(const Options& options) {
  options.model.check();
  if (options.worker) {
    serve_bench(options.model, options.prefix_cache_mb);
    return;
  }
  if (options.prefix_cache_mb != 0) {
    throw UsageError("--prefix-cache-mb is for --worker; leave it out");
  }
  if (options.decode < 1 || options.repeat < 1) {
    throw UsageError("--decode and --repeat must be at least 1 but got " +
                     std::to_string(options.decode) + " and " +
                     std::to_string(options.repeat));
  }
  auto lengths = parse_tokens(options.lengths.value_or("32,512,2000"));
  for (const int64_t length : lengths) {
    if (length < 1) {
      throw UsageError("--lengths must be at least 1 but got " +
                       std::to_string(length));
    }
  }
  Progress progress;
  const Engine engine = load_engine(options.model, progress, false);
  const int64_t most = engine.model->context_length();
  const int64_t context = std::min(options.model.context.value_or(most), most);
  if (!options.lengths) {
    std::erase_if(lengths, [&](int64_t length) {
      return length != lengths.front() && length >= context - options.decode;
    });
  }
  for (const int64_t length : lengths) {  // before a prompt is made up
    if (length >= context || options.decode >= context - length) {
      throw std::runtime_error(
          "a prompt of " + std::to_string(length) + " tokens and " +
          std::to_string(options.decode) + " decoded ones exceed the context" +
          " of " + std::to_string(context) + " tokens; give smaller --lengths");
    }
  }
  for (const int64_t length : lengths) {
    write_speed(options, engine, length, measure(options, engine, length));
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "bench", "tokens per second of prefill, and of decode after it");
  add_model_options(*command, options->model);
  command
      ->add_option("--lengths", options->lengths,
                   "prompt lengths in tokens, one line each; default: those "
                   "of 32,512,2000 that fit")
      ->type_name("N,...");
  command
      ->add_option("--decode", options->decode,
                   "tokens to decode after each prompt")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--repeat", options->repeat, "runs; the best one counts")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--json", options->json, "one JSON object on each line");
  command->add_flag("--worker", options->worker,
                    "answer requests for speeds on standard input, one JSON "
                    "object a line (bench/README.md)");
  command
      ->add_option("--prefix-cache-mb", options->prefix_cache_mb,
                   "with --worker: memory for what its requests share")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("MB");
  command->footer(
      "Example: kvcache bench --model SmolLM2-135M-Instruct.Q4_1.gguf "
      "--lengths 512 --json");
  command->callback([options] { run(*options); });
}

}  // namespace kvcache::cli
