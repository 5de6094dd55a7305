// adapter.cpp - low-rank adapters from the files of PEFT.
//
// Source: LoraConfig and the layers of peft/tuners/lora; names and defaults are
// those of PEFT 0.21.
#include "kvcache/model/adapter.h"

#include <ATen/ops/isfinite.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "kvcache/model/mapped_file.h"
#include "kvcache/model/safetensors.h"
#include "kvcache/model/weights.h"
#include "src/model/weights/config_section.h"
#include "src/model/weights/digest.h"
#include "src/model/weights/strict_json.h"
#include "src/model/weights/tensor_names.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFunction = "load_adapter";
constexpr std::string_view kRoot = "base_model.model.";
constexpr std::string_view kWeight = ".weight";
constexpr size_t kNamed = 4;  // of many things wrong in a message

// What is in a file under one name twice: A and B.
constexpr std::array<std::string_view, 2> kHalves = {".lora_A.weight",
                                                     ".lora_B.weight"};

// Fields that do not change what a trained adapter computes.
constexpr std::array<std::string_view, 22> kNeutral = {
    "auto_mapping",      "base_model_name_or_path",
    "corda_config",      "ensure_weight_tying",
    "eva_config",        "fan_in_fan_out",
    "inference_mode",    "init_lora_weights",
    "loftq_config",      "lora_dropout",
    "megatron_core",     "peft_version",
    "qalora_group_size", "revision",
    "runtime_config",    "task_type",
    "lora_alpha",        "layers_to_transform",
    "peft_type",         "r",
    "target_modules",    "use_rslora"};

// A linear of a layer that an adapter may be beside.
struct Linear {
  std::string module;  // "model.layers.0.self_attn.q_proj"
  std::string weight;  // "blk.0.attn_q.weight"
  std::vector<int64_t> shape;
  int64_t layer = 0;
};

std::optional<int64_t> layer_number(std::string_view weight) {
  constexpr std::string_view kPrefix = "blk.";
  if (!weight.starts_with(kPrefix)) return {};
  int64_t layer = -1;
  std::from_chars(weight.data() + kPrefix.size(), weight.data() + weight.size(),
                  layer);
  return layer < 0 ? std::nullopt : std::optional(layer);
}

// Hugging Face's word for the names of the family, whatever file the model is
// of.
std::string_view family_of(const ModelConfig& config) {
  if (config.linear_attention) return "qwen3_5_text";
  return config.fused_qkv ? "gpt2" : "llama";
}

std::vector<Linear> linears_of(const ModelConfig& config) {
  std::vector<Linear> linears;
  for (ExpectedTensor& want : expected_tensors(config)) {
    const auto layer = layer_number(want.name);
    if (!layer || want.shape.size() != 2 ||
        want.name.ends_with("ssm_conv1d.weight")) {
      continue;
    }
    std::string module = hugging_face_name(family_of(config), want.name);
    module.resize(module.size() - kWeight.size());
    linears.push_back(
        {std::move(module), want.name, std::move(want.shape), *layer});
  }
  return linears;
}

std::string shape_text(at::IntArrayRef shape) { return c10::str(shape); }

// The parts of adapter_config.json that matter here.
struct Fields {
  int64_t rank = 0;
  double scale = 0;
  std::vector<std::string> targets;
  std::vector<int64_t> layers;  // empty: all
};

bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || value == 0 || value == "" ||
         ((value.is_array() || value.is_object()) && value.empty());
}

// Ways to begin that change the base weights, which are not in the file.
void check_start(const Section& file, const nlohmann::json& config) {
  constexpr const char* kKey = "init_lora_weights";
  if (!file.has(kKey) || config[kKey].is_boolean()) return;
  const std::string start = file.text(kKey).value_or("");
  if (start == "gaussian" || start == "eva" || start == "orthogonal") return;
  file.refuse(kKey, start,
              "convert the adapter to one of the plain base weights.");
}

void check_supported(const Section& file, const nlohmann::json& config) {
  if (const auto type = file.text("peft_type"); type != "LORA") {
    file.refuse("peft_type", type.value_or(""), "only LORA is.");
  }
  if (const auto bias = file.text("bias").value_or("none"); bias != "none") {
    file.refuse("bias", bias, "train the adapter with bias none.");
  }
  TORCH_CHECK(file.has("target_modules"), "[load_adapter] ", file.path(),
              ": key target_modules is missing; fetch the file again.");
  if (config["target_modules"].is_string()) {
    file.refuse("target_modules", config["target_modules"].get<std::string>(),
                "name the modules in a list.");
  }
  check_start(file, config);
  for (const auto& [key, value] : config.items()) {
    const bool neutral =
        std::find(kNeutral.begin(), kNeutral.end(), key) != kNeutral.end();
    if (neutral || key == "bias" || is_off(value)) continue;
    if (key == "layers_pattern" && (value == "layers" || value == "h"))
      continue;
    file.refuse(key, value.dump(), "train the adapter without it.");
  }
}

Fields read_fields(const fs::path& path, int64_t layers) {
  const nlohmann::json config = read_strict_json(path);
  TORCH_CHECK(config.is_object(), "[load_adapter] ", path.string(),
              " must be an object; fetch the file again.");
  const Section file(config, path.string(), kFunction);
  check_supported(file, config);
  Fields fields{.rank = file.required("r"),
                .scale = file.required_number("lora_alpha"),
                .targets = file.texts("target_modules"),
                .layers = file.integers("layers_to_transform")};
  TORCH_CHECK(fields.rank >= 1, "[load_adapter] ", path.string(),
              ": r must be at least 1 but is ", fields.rank,
              "; correct the file.");
  TORCH_CHECK(std::isfinite(fields.scale), "[load_adapter] ", path.string(),
              ": lora_alpha must be a number but is ", fields.scale,
              "; correct the file.");
  const auto rank = static_cast<double>(fields.rank);
  fields.scale /= file.flag("use_rslora", false) ? std::sqrt(rank) : rank;
  for (const int64_t layer : fields.layers) {
    TORCH_CHECK(layer >= 0 && layer < layers, "[load_adapter] ", path.string(),
                ": layers_to_transform must be in [0, ", layers,
                ") but one is ", layer,
                "; use the model that the adapter was made for.");
  }
  return fields;
}

// As PEFT finds them: the whole name, or its end.
bool is_meant(const Linear& linear, const std::string& target) {
  return linear.module == target || linear.module.ends_with("." + target);
}

std::string last_names(const std::vector<Linear>& linears) {
  std::set<std::string> names;
  for (const Linear& linear : linears)
    names.insert(linear.module.substr(linear.module.rfind('.') + 1));
  return c10::Join(", ", std::vector(names.begin(), names.end()));
}

// The linears that the fields name, by weight.
std::map<std::string, Linear> wanted(const Fields& fields,
                                     const ModelConfig& config,
                                     const fs::path& path) {
  std::map<std::string, Linear> found;
  const std::vector<Linear> linears = linears_of(config);
  for (const std::string& target : fields.targets) {
    bool any = false;
    for (const Linear& linear : linears) {
      const bool in_layers =
          fields.layers.empty() ||
          std::find(fields.layers.begin(), fields.layers.end(), linear.layer) !=
              fields.layers.end();
      if (!is_meant(linear, target)) continue;
      any = true;
      if (in_layers) found.emplace(linear.weight, linear);
    }
    TORCH_CHECK(any, "[load_adapter] ", path.string(),
                ": target_modules must name linears of the model's layers (",
                last_names(linears), ") but has ", in_quotes(target),
                "; use the model that the adapter was made for.");
  }
  TORCH_CHECK(!found.empty(), "[load_adapter] ", path.string(),
              ": target_modules and layers_to_transform must name at least one "
              "linear but name none; correct the file.");
  return found;
}

// The weight and the half that a tensor of the file is; empty if none of them.
std::optional<std::pair<std::string, size_t>> place_of(
    std::string_view name, const ModelConfig& config) {
  if (!name.starts_with(kRoot)) return {};
  name.remove_prefix(kRoot.size());
  for (size_t half = 0; half < kHalves.size(); ++half) {
    if (!name.ends_with(kHalves[half])) continue;
    std::string module(name.substr(0, name.size() - kHalves[half].size()));
    auto canonical = canonical_name(family_of(config), module.append(kWeight));
    if (!canonical) return {};
    return std::pair(std::move(canonical->name), half);
  }
  return {};
}

using Pair = std::array<const SafetensorsEntry*, 2>;

// What is wrong with the tensors of a file, up to a few.
class Faults {
 public:
  void add(const std::string& text) {
    if (++count_ <= kNamed) text_ += (text_.empty() ? "" : "; ") + text;
  }
  void report(const fs::path& path) const {
    const std::string more =
        count_ > kNamed ? c10::str("; ", count_ - kNamed, " more") : "";
    TORCH_CHECK(count_ == 0, "[load_adapter] ", path.string(), ": ", text_,
                more,
                "; the files do not belong together or to this model, or one "
                "is incomplete.");
  }

 private:
  size_t count_ = 0;
  std::string text_;
};

void check_half(const SafetensorsEntry* entry, const Linear& linear,
                size_t half, int64_t rank, Faults& faults) {
  if (entry == nullptr) {
    faults.add(c10::str("tensor ",
                        in_quotes(std::string(kRoot) + linear.module +
                                  std::string(kHalves[half])),
                        " is missing"));
    return;
  }
  const std::vector<int64_t> shape = half == 0
                                         ? std::vector{rank, linear.shape[1]}
                                         : std::vector{linear.shape[0], rank};
  if (entry->shape != shape) {
    faults.add(c10::str("tensor ", in_quotes(entry->name), " must be ",
                        shape_text(shape), " but is ",
                        shape_text(entry->shape)));
  } else if (!c10::isFloatingType(entry->dtype)) {
    faults.add(c10::str("tensor ", in_quotes(entry->name),
                        " must be floating-point but is ", entry->dtype));
  }
}

// Both halves of each linear; everything in the file is one of them.
std::map<std::string, Pair> checked_pairs(
    const SafetensorsFile& file, const std::map<std::string, Linear>& linears,
    const ModelConfig& config, int64_t rank) {
  std::map<std::string, Pair> pairs;
  Faults faults;
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto place = place_of(entry.name, config);
    const bool known = place && linears.contains(place->first);
    const SafetensorsEntry** at =
        known ? &pairs[place->first][place->second] : nullptr;
    if (at == nullptr || *at != nullptr) {  // or under two names
      faults.add(c10::str("tensor ", in_quotes(entry.name), " is unexpected"));
    } else {
      *at = &entry;
    }
  }
  for (const auto& [weight, linear] : linears) {
    for (size_t half = 0; half < kHalves.size(); ++half) {
      check_half(pairs[weight][half], linear, half, rank, faults);
    }
  }
  faults.report(file.path());
  return pairs;
}

// `values` as they are used: those of B times the scale.
void check_finite(const fs::path& path, const SafetensorsEntry& entry,
                  const at::Tensor& values) {
  TORCH_CHECK(at::isfinite(values).all().item<bool>(), "[load_adapter] ",
              path.string(), ": tensor ", in_quotes(entry.name),
              " must be finite in float32, times lora_alpha / r, but is not; "
              "train the adapter again, or correct lora_alpha.");
}

}  // namespace

Adapter load_adapter(const fs::path& folder, std::string name,
                     const ModelConfig& config) {
  const fs::path fields_path = folder / "adapter_config.json";
  const fs::path path = folder / "adapter_model.safetensors";
  for (const fs::path& needed : {fields_path, path}) {
    TORCH_CHECK(fs::is_regular_file(needed), "[load_adapter] ", folder.string(),
                " must have ", needed.filename().string(),
                " but has no such file; give the folder that PEFT wrote.");
  }
  const Fields fields = read_fields(fields_path, config.layers);
  const auto linears = wanted(fields, config, fields_path);
  const SafetensorsFile file(path);
  const auto pairs = checked_pairs(file, linears, config, fields.rank);
  Adapter adapter{.name = std::move(name), .digest = {}, .modules = {}};
  for (const auto& [weight, pair] : pairs) {
    const auto read = [&](const SafetensorsEntry* entry) {
      return file.view(entry->name)
          .to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
          .contiguous();
    };
    adapter.modules.push_back(
        {weight, read(pair[0]), read(pair[1]).mul_(fields.scale)});
    check_finite(path, *pair[0], adapter.modules.back().a);
    check_finite(path, *pair[1], adapter.modules.back().b);
  }
  const MappedFile bytes(path);
  // The scale by its bits: printed, near ones look alike.
  adapter.digest =
      digest_of(digest_of(bytes.bytes().data(), bytes.bytes().size()) +
                digest_of(&fields.scale, sizeof fields.scale));
  return adapter;
}

void check_adapters(const char* function, const std::vector<Adapter>& adapters,
                    const ModelConfig& config) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const Linear& linear : linears_of(config))
    shapes.emplace(linear.weight, linear.shape);
  std::set<std::string> names;
  for (const Adapter& adapter : adapters) {
    TORCH_CHECK_VALUE(
        !adapter.name.empty() && names.insert(adapter.name).second, "[",
        function, "] each adapter must have a name of its own but one is ",
        in_quotes(adapter.name), "; give it another.");
    std::set<std::string> seen;
    for (const AdapterModule& module : adapter.modules) {
      const auto at = shapes.find(module.weight);
      TORCH_CHECK_VALUE(
          at != shapes.end() && seen.insert(module.weight).second, "[",
          function, "] adapter ", in_quotes(adapter.name),
          " must name linears of the model's layers, each once, but has ",
          in_quotes(module.weight), "; load it for this model.");
      const auto usable = [](const at::Tensor& tensor) {
        return tensor.defined() && tensor.dim() == 2 && tensor.is_cpu() &&
               tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
      };
      TORCH_CHECK_VALUE(
          usable(module.a) && usable(module.b) &&
              module.a.size(0) == module.b.size(1) && module.a.size(0) > 0 &&
              module.a.size(1) == at->second[1] &&
              module.b.size(0) == at->second[0],
          "[", function, "] adapter ", in_quotes(adapter.name), ": ",
          module.weight, " must have dense float32 a [r, ", at->second[1],
          "] and b [", at->second[0],
          ", r] on the CPU but has others; load it for this model.");
    }
  }
}

int64_t layer_of(const AdapterModule& module) {
  return layer_number(module.weight).value_or(0);
}

}  // namespace kvcache::model
