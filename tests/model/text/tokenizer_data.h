// tokenizer_data.h - the committed tokenizer files and ids, for the tests.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/model/tokenizer.h"

namespace kvcache::model::test {

using Ids = std::vector<int64_t>;

inline std::string data_path(const std::string& name) {
  return "tests/model/text/data/" + name;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

inline nlohmann::json read_json(const std::string& name) {
  return nlohmann::json::parse(read_file(data_path(name)));
}

inline std::vector<std::string> texts() {
  return read_json("texts.json").get<std::vector<std::string>>();
}

inline TokenizerPtr family_tokenizer(const std::string& family) {
  const std::string name = family + "_tokenizer.json";
  return make_json_tokenizer(read_file(data_path(name)), {}, name);
}

// The same tokenizer as a GGUF file would hold it.
inline GgufVocabulary family_vocabulary(const std::string& family,
                                        const std::string& pre) {
  const nlohmann::json document = read_json(family + "_tokenizer.json");
  const nlohmann::json& vocab = document["model"]["vocab"];
  GgufVocabulary result{.source = family + ".gguf"};
  result.model = "gpt2";
  result.pre = pre;
  result.tokens.resize(vocab.size());
  for (const auto& [text, id] : vocab.items()) {
    result.tokens.at(id.get<size_t>()) = text;
  }
  result.types.assign(vocab.size(), 1);
  for (const auto& token : document["added_tokens"]) {
    result.types.at(token["id"].get<size_t>()) = token["special"] ? 3 : 4;
  }
  for (const auto& merge : document["model"]["merges"]) {
    result.merges.push_back(merge.is_string()
                                ? merge.get<std::string>()
                                : merge[0].get<std::string>() + " " +
                                      merge[1].get<std::string>());
  }
  return result;
}

// The weights that `scripts` fetch; the tests that need them skip without.
inline std::optional<std::filesystem::path> smollm2_path() {
  const char* cache = std::getenv("KVCACHE_CACHE");
  const char* home = std::getenv("HOME");
  std::filesystem::path root = cache != nullptr ? cache : "";
  if (root.empty() && home != nullptr) {
    root = std::filesystem::path(home) / ".cache/kvcache";
  }
  root /= "models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(root)) return std::nullopt;
  return root;
}

// A text of `bytes` random bytes, most of it not UTF-8.
template <typename Random>
std::string random_bytes(Random& random, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    text += static_cast<char>(random() & 0xFF);
  }
  return text;
}

}  // namespace kvcache::model::test
