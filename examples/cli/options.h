// options.h - what every command that runs a model is asked.
#pragma once

#include <c10/core/Device.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/sampler.h"
#include "kvcache/model/transformer.h"

namespace kvcache::cli {

struct ModelOptions {
  std::string model;
  std::string dtype = "auto";
  std::optional<int> threads;
  std::string device = "cpu";
  std::string cache;  // empty: what suits the model
  std::string kv_format = "auto";
  std::optional<int64_t> context;
  int64_t chunk = 256;
  std::string graph = "auto";  // of a window cache
  int64_t steps_per_replay = 1;
  std::vector<std::string> adapters;  // "NAME=FOLDER"
  std::optional<std::string> route;   // the adapter of a text
  int64_t adapter_from = 0;

  // What the words stand for; throw UsageError for one that does not exist.
  std::optional<at::ScalarType> scalar_type() const;    // empty: auto, packed
  std::optional<model::WeightPacking> packing() const;  // empty: auto
  at::Device torch_device() const;  // this program has its part for it
  KvFormat kv_storage() const;
  model::CacheKind cache_kind(const model::LanguageModel& model) const;
  bool is_window() const;
  // Names and folders, in their order.
  std::vector<std::pair<std::string, std::string>> adapter_folders() const;
  // What a text runs with that does not say it: --route, else the only adapter.
  // Empty: none.
  std::string adapter() const;
  // All of the above, and that the numbers are in range.
  void check() const;

 private:
  std::optional<model::CacheKind> given_kind() const;
  void check_graphs() const;
  void check_adapters() const;
  void check_kv_format() const;
};

void add_model_options(CLI::App& command, ModelOptions& options);
// Of commands that can run with adapters.
// Of one text, or of a file of requests that name their own.
inline constexpr const char* kRouteOfText =
    "the adapter that runs; default: the only one, or none of several; \"\": "
    "none";
inline constexpr const char* kRouteOfRequests =
    "the adapter of requests that name none; default: none";
void add_adapter_options(CLI::App& command, ModelOptions& options,
                         const char* route = kRouteOfText);
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

// For check(): what is wrong with `text` as a T, empty if nothing. By itself
// CLI11 takes the nearest number for one out of range, and 010 for 8.
template <typename T>
std::string not_whole(const std::string& text) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end) return {};
  return "must be a whole number up to " +
         std::to_string(std::numeric_limits<T>::max()) + " but got " + text;
}

// "1,2,3"; throws UsageError for anything else.
std::vector<int64_t> parse_tokens(const std::string& text);

// All of a file.
std::string read_file(const std::string& path);
// The same, or standard input for "-".
std::string read_text(const std::string& path);

}  // namespace kvcache::cli
