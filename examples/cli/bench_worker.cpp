// bench_worker.cpp - `bench --worker`: speeds on request, with the model loaded
// once, so that a benchmark can take turns with other programs.

#include "examples/cli/bench_worker.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/cli/engine.h"
#include "examples/cli/errors.h"
#include "examples/cli/graphs.h"
#include "examples/cli/prefix.h"
#include "examples/cli/request_json.h"
#include "kvcache/model/batcher.h"

namespace kvcache::cli {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

struct Request {
  std::vector<std::vector<int64_t>> prompts;
  int64_t fresh = 1;
  std::optional<std::string> cache, space;
  int64_t crop = 0;
};

constexpr RequestKey<Request> kKeys[] = {
    {"prompts",
     [](const std::string& key, const Json& value, Request& request) {
       if (!value.is_array()) refuse(key, "a list of lists of ids", value);
       for (const Json& prompt : value) {
         request.prompts.push_back(ids(key, prompt));
       }
     }},
    {"new", [](const std::string& key, const Json& value,
               Request& request) { request.fresh = whole(key, value); }},
    {"cache", [](const std::string& key, const Json& value,
                 Request& request) { request.cache = full_text(key, value); }},
    {"space", [](const std::string& key, const Json& value,
                 Request& request) { request.space = full_text(key, value); }},
    {"crop", [](const std::string& key, const Json& value, Request& request) {
       request.crop = whole(key, value);
     }}};

Request parse(const std::string& line) {
  Request request;
  set_keys(kKeys, parse_object(line), request);
  if (request.prompts.empty()) {
    throw std::runtime_error("prompts must be lists of ids but got none");
  }
  if (request.crop == 0) return request;
  if (request.prompts.size() != 1) {
    throw std::runtime_error("crop must come with one prompt but got " +
                             std::to_string(request.prompts.size()));
  }
  if (request.crop < 0 || request.crop >= request.fresh) {
    throw std::runtime_error("crop must be from 1 on and less than new, " +
                             std::to_string(request.fresh) + ", but got " +
                             std::to_string(request.crop));
  }
  return request;
}

// When each token of each row came, ms after the request.
class Times {
 public:
  explicit Times(size_t rows) : rows_(rows) {}

  model::GenerateHooks hooks(size_t row) {
    return {.on_token = [this, row](const model::GeneratedToken&) {
      rows_[row].push_back(ms_since(start_));
    }};
  }

  // Decode is what follows the last row's first token. `token_ms`: gaps
  // between the tokens of a single row.
  void write(Json& json) const {
    double first = 0, last = 0;
    for (const auto& row : rows_) {
      first = std::max(first, row.front());
      last = std::max(last, row.back());
    }
    int64_t decoded = 0;
    for (const auto& row : rows_) {
      decoded += std::count_if(row.begin(), row.end(),
                               [&](double time) { return time > first; });
    }
    json["first_ms"] = first;
    json["decode_ms"] = last - first;
    json["decode_tokens"] = decoded;
    if (rows_.size() != 1) return;
    std::vector<double> gaps(rows_[0].size());
    std::adjacent_difference(rows_[0].begin(), rows_[0].end(), gaps.begin());
    gaps.erase(gaps.begin());
    json["token_ms"] = gaps;
  }

 private:
  Clock::time_point start_ = Clock::now();
  std::vector<std::vector<double>> rows_;
};

class Worker {
 public:
  Worker(ModelOptions options, const PrefixFlags& prefix)
      : options_(std::move(options)),
        engine_(load_engine(options_, progress_, false)),
        prefix_(prefix_for(engine_, options_, prefix)) {}

  Json ready() const {
    Json json;
    json["ready"] = true;
    json["load_ms"] = engine_.load_ms;
    json["dtype"] = dtype_name(*engine_.model);
    json["threads"] = thread_count();
    json["weight_bytes"] = engine_.model->weight_bytes();
    json["kv_bytes_per_token"] = kv_bytes_per_token();
    json["context"] = engine_.model->context_length();
    json["peak_rss_bytes"] = peak_rss_bytes();
    return json;
  }

  Json answer(const Request& request) {
    ModelOptions options = options_;
    if (request.cache) options.cache = *request.cache;
    options.check();
    return request.prompts.size() == 1 ? alone(options, request)
                                       : together(options, request);
  }

 private:
  int64_t kv_bytes_per_token() const {
    const CacheSpec spec = engine_.model->cache_spec(1, 1);
    int64_t values = 0;
    for (const LayerSpec& layer : spec.layers) {
      const auto* attention = std::get_if<AttentionLayer>(&layer);
      if (attention) values += 2 * attention->heads * attention->head_dim;
    }
    return values * static_cast<int64_t>(c10::elementSize(spec.dtype));
  }

  model::GenerateOptions generate_of(const ModelOptions& options,
                                     const Request& request) const {
    auto generate = generate_options(engine_, options, {});
    generate.max_new_tokens = request.fresh;
    generate.ignore_eos = true;
    generate.log_probs = 0;
    if (request.space) {
      if (!prefix_) throw std::runtime_error("space needs --prefix-cache-mb");
      generate.prefix = prefix_;
      generate.space = space_of(engine_, *request.space);
    }
    return generate;
  }

  static void write_tokens(Json& json,
                           std::span<const model::GenerateResult> results) {
    json["tokens"] = Json::array();
    json["logprobs"] = Json::array();
    for (const model::GenerateResult& result : results) {
      json["tokens"].push_back(result.tokens);
      json["logprobs"].push_back(result.log_probs);
    }
    json["peak_rss_bytes"] = peak_rss_bytes();
  }

  Json alone(const ModelOptions& options, const Request& request) const {
    auto generate = generate_of(options, request);
    const auto& prompt = request.prompts[0];
    Times times(1);  // the cache is part of what a request costs
    const auto cache = cache_for(engine_, options, prompt, generate);
    const auto runner = runner_for(engine_, options, generate, cache.get());
    generate.graphs = runner.get();
    const auto result = model::generate(*engine_.model, cache.get(), prompt,
                                        generate, times.hooks(0));
    Json json;
    times.write(json);
    write_tokens(json, {&result, 1});
    if (result.reuse) json["reuse"] = reuse_json(result);
    if (cache) json["cache_bytes"] = cache->memory().total().reserved;
    if (request.crop > 0) crop(request, result, generate, cache.get(), json);
    return json;
  }

  // Cuts the end of the text, as a rejected draft is, and makes it anew.
  void crop(const Request& request, const model::GenerateResult& result,
            model::GenerateOptions generate, Cache* cache, Json& json) const {
    if (cache == nullptr) throw std::runtime_error("crop needs a cache");
    std::vector<int64_t> tokens = request.prompts[0];
    tokens.insert(tokens.end(), result.tokens.begin(),
                  result.tokens.end() - request.crop);
    const auto length = static_cast<int64_t>(tokens.size()) - 1;
    const auto start = Clock::now();
    const Truncation cut = cache->truncate(length);
    json["crop_us"] = ms_since(start) * 1e3;
    json["crop_replay"] = cut.replay[0];
    generate.max_new_tokens = request.crop;
    const auto again = model::generate(*engine_.model, cache, tokens, generate);
    json["crop_same"] =
        std::equal(again.tokens.begin(), again.tokens.end(),
                   result.tokens.end() - request.crop, result.tokens.end());
  }

  Json together(const ModelOptions& options, const Request& request) const {
    const model::CacheKind kind = options.cache_kind(*engine_.model);
    if (kind == model::CacheKind::kNone) {
      throw std::runtime_error("cache none runs one prompt at a time");
    }
    size_t longest = 0;
    for (const auto& prompt : request.prompts) {
      longest = std::max(longest, prompt.size());
    }
    const auto rows = static_cast<int64_t>(request.prompts.size());
    Times times(request.prompts.size());
    model::Batcher batcher(
        engine_.model,
        model::make_cache(
            kind, *engine_.model,
            {.rows = rows,
             .capacity = static_cast<int64_t>(longest) + request.fresh,
             .slots = true}),
        {.graphs = graphs_for(options)});
    for (size_t row = 0; row < request.prompts.size(); ++row) {
      batcher.submit({.tokens = request.prompts[row],
                      .options = generate_of(options, request),
                      .hooks = times.hooks(row)});
    }
    batcher.run();
    std::vector<model::GenerateResult> results(request.prompts.size());
    for (model::BatchResult& result : batcher.take_finished()) {
      if (result.status != model::BatchStatus::kFinished) {
        throw std::runtime_error(result.error);
      }
      results[result.id - 1] = std::move(result.result);  // ids are from 1 on
    }
    Json json;
    times.write(json);
    write_tokens(json, results);
    json["cache_bytes"] = batcher.cache().memory().total().reserved;
    return json;
  }

  ModelOptions options_;
  Progress progress_;
  Engine engine_;
  std::shared_ptr<model::PrefixCache> prefix_;
};

}  // namespace

void serve_bench(const ModelOptions& options, int64_t prefix_cache_mb) {
  PrefixFlags prefix;
  prefix.mb = prefix_cache_mb;
  prefix.check(options);
  Worker worker(options, prefix);
  write_json(worker.ready());
  for (std::string line; std::getline(std::cin, line);) {
    try {
      write_json(worker.answer(parse(line)));
    } catch (const std::exception& error) {
      write_json({{"error", message_of(error)}});
    }
  }
}

}  // namespace kvcache::cli
