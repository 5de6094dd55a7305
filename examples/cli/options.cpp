// options.cpp - what every command that runs a model is asked.

#include "examples/cli/options.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <string_view>

#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

// More than the cores of any machine; beyond, threads cannot be started and
// LibTorch ends the process.
constexpr int kMostThreads = 1024;

// Tokens of one replay; each has a graph, and logits, of its own.
constexpr int64_t kMostSteps = 256;

// Longer than any model's context in bytes, short of filling the memory.
constexpr size_t kMaxTextBytes = 256 << 20;

void check_at_least_one(const char* option, std::optional<int64_t> value) {
  if (value && *value < 1) {
    throw UsageError(std::string(option) + " must be at least 1 but got " +
                     std::to_string(*value));
  }
}

std::string read_all(std::istream& in, const std::string& name) {
  std::string text;
  std::vector<char> block(1 << 16);
  while (in.read(block.data(), static_cast<std::streamsize>(block.size())),
         in.gcount() > 0) {
    text.append(block.data(), static_cast<size_t>(in.gcount()));
    if (text.size() > kMaxTextBytes) {
      throw std::runtime_error(name + ": must have at most " +
                               std::to_string(kMaxTextBytes) +
                               " bytes but has more");
    }
  }
  if (in.bad()) throw std::runtime_error(name + ": cannot be read");
  return text;
}

}  // namespace

std::optional<at::ScalarType> ModelOptions::scalar_type() const {
  if (dtype == "auto" || dtype == "packed") return std::nullopt;
  if (dtype == "float32") return at::kFloat;
  if (dtype == "bfloat16") return at::kBFloat16;
  throw UsageError(
      "--dtype must be auto, packed, float32 or bfloat16 but got " + dtype);
}

std::optional<model::WeightPacking> ModelOptions::packing() const {
  if (dtype == "auto") return std::nullopt;
  if (dtype != "packed") return model::WeightPacking::kNone;
  if (!torch_device().is_cpu()) {
    throw UsageError("--dtype packed must run on the CPU but --device is " +
                     device + "; use bfloat16 there");
  }
  return model::WeightPacking::kAuto;
}

at::Device ModelOptions::torch_device() const {
  if (device == "cpu") return at::kCPU;
  constexpr std::string_view kPrefix = "cuda:";
  at::DeviceIndex index = 0;
  const bool numbered = device.starts_with(kPrefix);
  if (numbered) {
    const char* const end = device.data() + device.size();
    const auto [stop, error] =
        std::from_chars(device.data() + kPrefix.size(), end, index);
    if (error != std::errc() || stop != end || index < 0) {
      throw UsageError(
          "--device cuda:N must have a number up to " +
          std::to_string(std::numeric_limits<at::DeviceIndex>::max()) +
          " but got " + device);
    }
  } else if (device != "cuda") {
    throw UsageError("--device must be cpu, cuda or cuda:N but got " + device);
  }
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    throw UsageError("--device " + device +
                     ": this program was built without its CUDA part; use "
                     "--device cpu, or build with -DKVCACHE_CUDA=ON");
  }
  return {at::kCUDA, index};
}

KvFormat ModelOptions::kv_storage() const {
  if (kv_format == "auto") return KvFormat::kPlain;
  if (kv_format == "int8") return KvFormat::kInt8;
  throw UsageError("--kv-format must be auto or int8 but got " + kv_format);
}

std::optional<model::CacheKind> ModelOptions::given_kind() const {
  if (cache.empty()) return std::nullopt;
  if (const auto kind = model::cache_kind(cache)) return kind;
  throw UsageError(
      "--cache must be preallocated, state, window, concat or none but got " +
      cache);
}

model::CacheKind ModelOptions::cache_kind(
    const model::LanguageModel& model) const {
  const auto kind = given_kind();
  return kind ? *kind : model::default_cache_kind(model);
}

bool ModelOptions::is_window() const {
  return given_kind() == model::CacheKind::kWindow;
}

void ModelOptions::check_graphs() const {
  constexpr std::array kModes = {"auto", "cuda", "eager", "off"};
  if (std::find(kModes.begin(), kModes.end(), graph) == kModes.end()) {
    throw UsageError("--graph must be auto, cuda, eager or off but got " +
                     graph);
  }
  check_at_least_one("--steps-per-replay", steps_per_replay);
  if (steps_per_replay > kMostSteps) {
    throw UsageError("--steps-per-replay must be at most " +
                     std::to_string(kMostSteps) + " but got " +
                     std::to_string(steps_per_replay));
  }
  const bool window = is_window();
  if (!window && (graph == "cuda" || graph == "eager")) {
    throw UsageError("--graph " + graph +
                     ": only a window has recorded steps; add --cache window");
  }
  if (!window && steps_per_replay > 1) {
    throw UsageError("--steps-per-replay " + std::to_string(steps_per_replay) +
                     ": only a window has recorded steps; add --cache window");
  }
  if (graph == "cuda" && torch_device().is_cpu()) {
    throw UsageError(
        "--graph cuda: the model is on the CPU; add --device cuda,"
        " or use --graph eager");
  }
}

std::vector<std::pair<std::string, std::string>> ModelOptions::adapter_folders()
    const {
  std::vector<std::pair<std::string, std::string>> folders;
  for (const std::string& text : adapters) {
    const size_t equals = text.find('=');
    if (equals == 0 || equals == text.npos || equals + 1 == text.size()) {
      throw UsageError("--adapter must be NAME=FOLDER but got " + text);
    }
    const std::string name = text.substr(0, equals);
    for (const auto& [other, folder] : folders) {
      if (other == name) {
        throw UsageError("--adapter " + name +
                         " is given twice; each needs a name of its own");
      }
    }
    folders.emplace_back(name, text.substr(equals + 1));
  }
  return folders;
}

std::string ModelOptions::adapter() const {
  if (route) return *route;
  return adapters.size() == 1 ? adapter_folders()[0].first : std::string();
}

void ModelOptions::check_adapters() const {
  const auto folders = adapter_folders();
  const bool known =
      !route || route->empty() ||
      std::any_of(folders.begin(), folders.end(),
                  [&](const auto& folder) { return folder.first == *route; });
  if (!known) {
    throw UsageError("--route " + *route +
                     ": no --adapter has that name; add one");
  }
  if (adapter_from < 0) {
    throw UsageError("--adapter-from must be at least 0 but got " +
                     std::to_string(adapter_from));
  }
}

void ModelOptions::check_kv_format() const {
  if (kv_storage() == KvFormat::kPlain) return;
  const auto kind = given_kind();
  if (kind == model::CacheKind::kConcat || kind == model::CacheKind::kNone) {
    throw UsageError("--kv-format " + kv_format + ": --cache " + cache +
                     " cannot; use --cache preallocated, state or window");
  }
  if (!torch_device().is_cpu()) {
    throw UsageError("--kv-format " + kv_format +
                     ": K and V are quantised on the CPU only; add --device "
                     "cpu, or leave --kv-format out");
  }
}

void ModelOptions::check() const {
  check_adapters();
  scalar_type();
  given_kind();
  torch_device();
  check_kv_format();
  check_graphs();
  check_at_least_one("--threads", threads);
  if (threads && *threads > kMostThreads) {
    throw UsageError("--threads must be at most " +
                     std::to_string(kMostThreads) + " but got " +
                     std::to_string(*threads));
  }
  check_at_least_one("--context", context);
  check_at_least_one("--chunk", chunk);
}

void add_model_path(CLI::App& command, std::string& path) {
  command
      .add_option("--model", path,
                  "a folder with config.json and safetensors, or a .gguf file")
      ->required()
      ->type_name("PATH");
}

void add_model_options(CLI::App& command, ModelOptions& options) {
  add_model_path(command, options.model);
  command
      .add_option("--dtype", options.dtype,
                  "auto, packed (weights stay quantised), float32 (the exact "
                  "path) or bfloat16")
      ->capture_default_str()
      ->type_name("TYPE");
  command.add_option("--threads", options.threads, "default: one a core")
      ->check(not_whole<int>)
      ->type_name("N");
  command.add_option("--device", options.device, "cpu, cuda or cuda:N")
      ->capture_default_str()
      ->type_name("DEVICE");
  command
      .add_option("--cache", options.cache,
                  "preallocated, state (with restore points), window (static "
                  "shapes), concat, or none (recompute everything); default: "
                  "state for a model with recurrent layers, else preallocated")
      ->type_name("KIND");
  command
      .add_option("--kv-format", options.kv_format,
                  "how K and V are kept: auto (in the model's dtype) or int8 "
                  "(about half of that memory; other bits than auto)")
      ->capture_default_str()
      ->type_name("FORMAT");
  command
      .add_option("--context", options.context,
                  "most tokens of prompt and answer; default: what the request "
                  "needs, up to the model's context")
      ->check(not_whole<int64_t>)
      ->type_name("N");
  command
      .add_option("--graph", options.graph,
                  "how a window decodes: cuda graphs, eager (the same steps "
                  "run again), off (plain steps), or auto: cuda on a GPU, "
                  "eager elsewhere")
      ->capture_default_str()
      ->type_name("MODE");
  command
      .add_option("--steps-per-replay", options.steps_per_replay,
                  "of a window: tokens made in one replay")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--chunk", options.chunk, "tokens of a prefill step")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
}

void add_adapter_options(CLI::App& command, ModelOptions& options,
                         const char* route) {
  command
      .add_option("--adapter", options.adapters,
                  "a LoRA adapter as PEFT writes it, and a name for it; may be "
                  "given more than once")
      ->allow_extra_args(false)
      ->type_name("NAME=FOLDER");
  // A function: an optional that is given "" would be none.
  command
      .add_option_function<std::string>(
          "--route", [&](const std::string& name) { options.route = name; },
          route)
      ->type_name("NAME");
  command
      .add_option("--adapter-from", options.adapter_from,
                  "the first N tokens run without it, and are shared with "
                  "texts that have none")
      ->check(not_whole<int64_t>)
      ->capture_default_str()
      ->type_name("N");
}

void TextOptions::check() const {
  check_at_least_one("--max-new-tokens", max_new_tokens);
  for (const std::string& text : stop) {
    if (text.empty()) throw UsageError("--stop must not be empty");
  }
  try {
    model::check_sampling(sampling);
  } catch (const c10::Error& error) {
    throw UsageError(message_of(error));
  }
}

void add_text_options(CLI::App& command, TextOptions& options) {
  auto& sampling = options.sampling;
  command
      .add_option("--max-new-tokens", options.max_new_tokens,
                  "default: 256, or as many as fit")
      ->check(not_whole<int64_t>)
      ->type_name("N");
  command
      .add_option("--temperature", sampling.temperature,
                  "0: always the most likely token")
      ->capture_default_str()
      ->type_name("T");
  command
      .add_option("--top-k", sampling.top_k,
                  "draw from the K most likely tokens; 0: from all")
      ->check(not_whole<int64_t>)
      ->type_name("K");
  command
      .add_option("--top-p", sampling.top_p,
                  "draw from the most likely tokens that add up to P")
      ->type_name("P");
  command
      .add_option("--min-p", sampling.min_p,
                  "draw from tokens at least P times as likely as the best")
      ->type_name("P");
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "above 1: avoid tokens seen before")
      ->type_name("R");
  command
      .add_option("--seed", sampling.seed, "same seed, same text")
      // Numbers below 0 would wrap around.
      ->check([](const std::string& text) {
        return text.starts_with('-') ? "must be at least 0 but got " + text
                                     : std::string();
      })
      ->check(not_whole<uint64_t>)
      ->type_name("S");
  command
      .add_option("--stop", options.stop,
                  "end before this text; may be given more than once")
      ->allow_extra_args(false)
      ->type_name("TEXT");
  command.add_flag("--ignore-eos", options.ignore_eos,
                   "go on after every end token");
}

std::vector<int64_t> parse_tokens(const std::string& text) {
  std::vector<int64_t> tokens;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    int64_t id = 0;
    const auto [stop, error] = std::from_chars(at, end, id);
    if (error != std::errc() || (stop != end && *stop != ',')) {
      throw UsageError("--tokens must be numbers as in 1,2,3 but got '" +
                       std::string(at, std::min(end, at + 40)) + "'");
    }
    tokens.push_back(id);
    if (stop == end) return tokens;
    at = stop + 1;
  }
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  return read_all(file, path);
}

std::string read_text(const std::string& path) {
  return path == "-" ? read_all(std::cin, path) : read_file(path);
}

}  // namespace kvcache::cli
