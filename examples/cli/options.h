// options.h - what every command that runs a model is asked.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/sampler.h"

namespace kvcache::cli {

struct ModelOptions {
  std::string model;
  std::string dtype = "auto";
  std::optional<int> threads;
  std::string device = "cpu";
  std::string cache = "preallocated";
  std::optional<int64_t> context;
  int64_t chunk = 256;

  // What the words stand for; throw UsageError for one that does not exist.
  std::optional<at::ScalarType> scalar_type() const;  // empty: auto
  model::CacheKind cache_kind() const;
  // All of the above, and that the numbers are in range.
  void check() const;
};

void add_model_options(CLI::App& command, ModelOptions& options);
// Of `tokenize` and `inspect`, which run nothing.
void add_model_path(CLI::App& command, std::string& path);

struct TextOptions {
  std::optional<int64_t> max_new_tokens;
  model::SamplingOptions sampling;
  std::vector<std::string> stop;
  bool ignore_eos = false;

  void check() const;  // throws UsageError
};

void add_text_options(CLI::App& command, TextOptions& options);

// "1,2,3"; throws UsageError for anything else.
std::vector<int64_t> parse_tokens(const std::string& text);

// All of a file, or of standard input for "-".
std::string read_text(const std::string& path);

}  // namespace kvcache::cli
