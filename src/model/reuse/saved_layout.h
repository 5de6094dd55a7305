// saved_layout.h - what the sections of a saved text are.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/model/checkpoint_file.h"

namespace kvcache::model {

// One part of the model: which layers, and where its sections begin and end.
struct SavedPart {
  int64_t first_layer = 0;
  std::vector<LayerSpec> layers;
  at::ScalarType dtype = at::kFloat;
  KvFormat format = KvFormat::kPlain;
  std::vector<int64_t> blocks;  // tokens of each
  std::vector<int64_t> points;  // positions, ascending
  int64_t conv_width = 0;       // values of a point's conv inputs; 0: none
  int64_t state_width = 0;

  std::vector<AttentionLayer> attention() const;
  // Elements of K and V of one token, all layers, as they are stored.
  int64_t token_values() const;
};

struct SavedLayout {
  int64_t tokens = 0;
  std::vector<SavedPart> parts;
  std::vector<int64_t> logits;  // positions
  std::vector<std::pair<int64_t, int64_t>> decoded;
  std::map<std::string, std::string> digests;  // by section

  static SavedLayout of(const SavedText& text);
  std::string to_json() const;
  // Throws, naming `path` and the key, unless every number makes sense.
  static SavedLayout from_json(std::string_view json, const std::string& path);
};

// Names of sections.
std::string block_name(size_t part, size_t block);
std::string point_name(size_t part, int64_t position, const char* what);
std::string logits_name(int64_t position);

}  // namespace kvcache::model
