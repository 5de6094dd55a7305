// saved_layout.cpp - the layout of a saved text, to JSON and from a stranger's.
#include "src/model/reuse/saved_layout.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "src/kv_format.h"
#include "src/model/weights/safetensors_types.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

using nlohmann::json;

constexpr int64_t kFormat = 1;
constexpr const char* kKvFormat = "kv_format";
constexpr int64_t kMaxTokens = int64_t{1} << 31;
constexpr int64_t kMaxSize = int64_t{1} << 20;  // heads, widths, layers

std::string type_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kSafetensorsTypes) {
    if (type == dtype) return std::string(name);
  }
  TORCH_CHECK_VALUE(false, "[save_checkpoint] K and V are ", dtype,
                    ", which the format has no name for.");
}

int64_t product(const std::vector<int64_t>& sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(!__builtin_mul_overflow(result, size, &result),
                      "[CheckpointFile] a state must have less than 2^63 "
                      "values but its shape is ",
                      at::IntArrayRef(sizes), ".");
  }
  return result;
}

// A document of a stranger: each value has its type and bounds, or the file is
// refused by the key.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  const json& at(const json& object, const char* key) const {
    require(object.is_object() && object.contains(key), key, "is missing");
    return object[key];
  }
  int64_t number(const json& value, const char* key, int64_t least,
                 int64_t most) const {
    require(value.is_number_integer(), key, "must be an integer");
    const bool fits =
        value.is_number_unsigned()
            ? value.get<uint64_t>() <= static_cast<uint64_t>(most) &&
                  static_cast<int64_t>(value.get<uint64_t>()) >= least
            : value.get<int64_t>() >= least && value.get<int64_t>() <= most;
    require(fits, key, "is out of bounds");
    return value.get<int64_t>();
  }
  const json& list(const json& value, const char* key) const {
    require(value.is_array(), key, "must be a list");
    return value;
  }
  // Within (0, most], ascending.
  std::vector<int64_t> positions(const json& value, const char* key,
                                 int64_t most) const {
    std::vector<int64_t> result;
    for (const json& one : list(value, key)) {
      const int64_t previous = result.empty() ? 0 : result.back();
      result.push_back(number(one, key, previous + 1, most));
    }
    return result;
  }
  void require(bool holds, const char* key, const char* what) const {
    TORCH_CHECK_VALUE(holds, "[CheckpointFile] ", path_, ": ", key,
                      " of the layout ", what, "; save the text again.");
  }

 private:
  const std::string& path_;
};

json layer_json(const LayerSpec& layer) {
  if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
    return {{"attention", {a->heads, a->head_dim, a->sliding, a->sinks}}};
  }
  const auto& r = std::get<RecurrentLayer>(layer);
  return {{"conv", {r.conv_channels, r.conv_taps}}, {"state", r.state_shape}};
}

LayerSpec layer_from(const Reader& read, const json& layer) {
  const auto size = [&](const json& value, const char* key) {
    return read.number(value, key, 0, kMaxSize);
  };
  if (layer.is_object() && layer.contains("attention")) {
    const json& a = read.list(layer["attention"], "attention");
    read.require(a.size() == 4, "attention", "must be 4 numbers");
    return AttentionLayer{read.number(a[0], "heads", 1, kMaxSize),
                          read.number(a[1], "head_dim", 1, kMaxSize),
                          read.number(a[2], "sliding", 0, kMaxTokens),
                          read.number(a[3], "sinks", 0, kMaxTokens)};
  }
  const json& conv = read.list(read.at(layer, "conv"), "conv");
  read.require(conv.size() == 2, "conv", "must be 2 numbers");
  RecurrentLayer result{size(conv[0], "conv"), size(conv[1], "conv"), {}};
  for (const json& one : read.list(read.at(layer, "state"), "state")) {
    result.state_shape.push_back(size(one, "state"));
  }
  read.require(result.state_shape.size() <= 8, "state", "has too many sizes");
  return result;
}

void set_widths(SavedPart& part) {
  for (const LayerSpec& layer : part.layers) {
    const auto* recurrent = std::get_if<RecurrentLayer>(&layer);
    if (recurrent == nullptr) continue;
    part.conv_width += recurrent->conv_channels * recurrent->conv_taps;
    if (!recurrent->state_shape.empty()) {
      part.state_width += product(recurrent->state_shape);
    }
  }
}

SavedPart part_from(const Reader& read, const json& from, int64_t tokens) {
  SavedPart part;
  part.first_layer =
      read.number(read.at(from, "first_layer"), "first_layer", 0, kMaxSize);
  const json& dtype = read.at(from, "dtype");
  bool known = false;
  for (const auto& [name, type] : kSafetensorsTypes) {
    if (!dtype.is_string() || dtype.get<std::string>() != name) continue;
    part.dtype = type;
    known = c10::isFloatingType(type);
  }
  read.require(known, "dtype", "is no floating type");
  if (from.contains(kKvFormat)) {  // plain K and V are not named
    read.require(from[kKvFormat] == format_text(KvFormat::kInt8), kKvFormat,
                 "is none that this version knows");
    part.format = KvFormat::kInt8;
  }
  for (const json& layer : read.list(read.at(from, "layers"), "layers")) {
    part.layers.push_back(layer_from(read, layer));
  }
  read.require(!part.layers.empty() &&
                   part.layers.size() <= static_cast<size_t>(kMaxSize),
               "layers", "must be some");
  int64_t left = tokens;
  for (const json& block : read.list(read.at(from, "blocks"), "blocks")) {
    part.blocks.push_back(read.number(block, "blocks", 1, left));
    left -= part.blocks.back();
  }
  read.require(left == 0, "blocks", "must hold all tokens");
  part.points = read.positions(read.at(from, "points"), "points", tokens);
  set_widths(part);
  const bool stateful = part.conv_width > 0 || part.state_width > 0;
  read.require(stateful || part.points.empty(), "points",
               "must be none without states");
  return part;
}

}  // namespace

std::vector<AttentionLayer> SavedPart::attention() const {
  std::vector<AttentionLayer> result;
  for (const LayerSpec& layer : layers) {
    if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
      result.push_back(*a);
    }
  }
  return result;
}

int64_t SavedPart::token_values() const {
  int64_t values = 0;
  for (const AttentionLayer& layer : attention()) {
    values += 2 * layer.heads * record_size(format, layer.head_dim);
  }
  return values;
}

std::string block_name(size_t part, size_t block) {
  return "part" + std::to_string(part) + ".block" + std::to_string(block);
}

std::string point_name(size_t part, int64_t position, const char* what) {
  return "part" + std::to_string(part) + ".point" + std::to_string(position) +
         "." + what;
}

std::string logits_name(int64_t position) {
  return "logits" + std::to_string(position);
}

SavedLayout SavedLayout::of(const SavedText& text) {
  SavedLayout layout;
  layout.tokens = static_cast<int64_t>(text.tokens.size());
  for (const Checkpoint& from : text.parts) {
    SavedPart part{.first_layer = from.first_layer,
                   .layers = from.layers,
                   .dtype = from.dtype,
                   .format = from.format,
                   .blocks = {},
                   .points = {}};
    int64_t held = 0;
    for (const auto& block : from.blocks) {
      part.blocks.push_back(block->tokens);
      held += block->tokens;
    }
    TORCH_CHECK_VALUE(
        from.length == layout.tokens && held == layout.tokens,
        "[save_checkpoint] each part must hold the ", layout.tokens,
        " tokens of the text in blocks but one holds ", held, " of ",
        from.length, "; take it by checkpoint() with BlockOptions.");
    for (const auto& point : from.points) {
      part.points.push_back(point->position);
    }
    set_widths(part);
    layout.parts.push_back(std::move(part));
  }
  for (const auto& [position, logits] : text.logits) {
    layout.logits.push_back(position);
  }
  layout.decoded = text.decoded;
  return layout;
}

std::string SavedLayout::to_json() const {
  json all = {{"format", kFormat},  {"tokens", tokens},
              {"logits", logits},   {"decoded", decoded},
              {"digests", digests}, {"parts", json::array()}};
  for (const SavedPart& part : parts) {
    json one = {{"first_layer", part.first_layer},
                {"dtype", type_name(part.dtype)},
                {"blocks", part.blocks},
                {"points", part.points},
                {"layers", json::array()}};
    if (part.format != KvFormat::kPlain) {
      one[kKvFormat] = format_text(part.format);
    }
    for (const LayerSpec& layer : part.layers) {
      one["layers"].push_back(layer_json(layer));
    }
    all["parts"].push_back(std::move(one));
  }
  return all.dump();
}

SavedLayout SavedLayout::from_json(std::string_view text,
                                   const std::string& path) {
  const Reader read(path);
  const json all = parse_strict_json(text, path);
  read.number(read.at(all, "format"), "format", kFormat, kFormat);
  SavedLayout layout;
  layout.tokens = read.number(read.at(all, "tokens"), "tokens", 1, kMaxTokens);
  for (const json& part : read.list(read.at(all, "parts"), "parts")) {
    layout.parts.push_back(part_from(read, part, layout.tokens));
  }
  read.require(!layout.parts.empty(), "parts", "must be some");
  layout.logits =
      read.positions(read.at(all, "logits"), "logits", layout.tokens);
  int64_t end = 0;
  for (const json& range : read.list(read.at(all, "decoded"), "decoded")) {
    read.require(range.is_array() && range.size() == 2, "decoded",
                 "must be pairs");
    const int64_t first = read.number(range[0], "decoded", end, layout.tokens);
    end = read.number(range[1], "decoded", first, layout.tokens);
    layout.decoded.emplace_back(first, end);
  }
  const json& digests = read.at(all, "digests");
  read.require(digests.is_object(), "digests", "must be an object");
  for (const auto& [name, digest] : digests.items()) {
    read.require(digest.is_string(), "digests", "must be texts");
    layout.digests[name] = digest.get<std::string>();
  }
  return layout;
}

}  // namespace kvcache::model
