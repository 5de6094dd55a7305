// load_tokenizer.cpp - finds and reads the tokenizer of a model on disk.

#include <c10/util/Exception.h>

#include <fstream>
#include <system_error>

#include "kvcache/model/gguf.h"
#include "kvcache/model/tokenizer.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

// The largest known, of 262,144 tokens, has 33 MB.
constexpr std::uintmax_t kMaxFileBytes = 256 << 20;

std::string read_file(const fs::path& path) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  TORCH_CHECK(!error, "[load_tokenizer] ", path.string(),
              ": must be a readable file but ", error.message(),
              "; check the path.");
  TORCH_CHECK(size <= kMaxFileBytes, "[load_tokenizer] ", path.string(),
              ": must have at most ", kMaxFileBytes, " bytes but has ", size,
              "; this is no tokenizer.");
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  TORCH_CHECK(file.gcount() == static_cast<std::streamsize>(size),
              "[load_tokenizer] ", path.string(), ": must give ", size,
              " bytes but gave ", file.gcount(), "; check the disk.");
  return text;
}

std::string read_if_there(const fs::path& path) {
  return fs::exists(path) ? read_file(path) : std::string();
}

template <typename T>
std::vector<std::string> to_strings(const std::vector<T>& views) {
  return {views.begin(), views.end()};
}

GgufVocabulary read_vocabulary(const GgufFile& file) {
  const auto key = [](const char* name) {
    return std::string("tokenizer.ggml.") + name;
  };
  const auto id = [&](const char* name) {
    return file.find_integer(key(name));
  };
  GgufVocabulary from{.source = file.path().string()};
  from.model = file.string(key("model"));
  from.pre = file.find_string(key("pre")).value_or("");
  from.tokens = to_strings(file.strings(key("tokens")));
  if (const auto scores = file.find_numbers(key("scores"))) {
    from.scores = *scores;
  }
  if (const auto types = file.find_integers(key("token_type"))) {
    from.types.assign(types->begin(), types->end());
  }
  if (const auto merges = file.find_strings(key("merges"))) {
    from.merges = to_strings(*merges);
  }
  from.bos_id = id("bos_token_id");
  from.eos_id = id("eos_token_id");
  from.eot_id = id("eot_token_id");
  from.eom_id = id("eom_token_id");
  from.unknown_id = id("unknown_token_id");
  from.padding_id = id("padding_token_id");
  from.add_bos = file.find_bool(key("add_bos_token"));
  from.add_eos = file.find_bool(key("add_eos_token"));
  from.add_space_prefix = file.find_bool(key("add_space_prefix"));
  return from;
}

TokenizerPtr load_folder(const fs::path& folder) {
  const fs::path json = folder / "tokenizer.json";
  const fs::path model = folder / "tokenizer.model";
  const std::string config = read_if_there(folder / "tokenizer_config.json");
  const bool has_model = fs::exists(model);
  if (fs::exists(json)) {
    try {
      return make_json_tokenizer(read_file(json), config, json.string());
    } catch (const c10::Error&) {
      // Most SentencePiece models also come as a tokenizer.json that is no
      // byte-level BPE.
      if (!has_model) throw;
    }
  }
  TORCH_CHECK(has_model, "[load_tokenizer] ", folder.string(),
              ": must hold tokenizer.json or tokenizer.model but has neither; "
              "pass the folder of a model.");
  return make_sentencepiece_tokenizer(read_file(model), config, model.string());
}

}  // namespace

TokenizerPtr load_tokenizer(const fs::path& path) {
  if (fs::is_directory(path)) return load_folder(path);
  TORCH_CHECK(fs::exists(path), "[load_tokenizer] ", path.string(),
              ": must be a file or folder but there is none; check the path.");
  const std::string config =
      read_if_there(path.parent_path() / "tokenizer_config.json");
  if (path.extension() == ".json") {
    return make_json_tokenizer(read_file(path), config, path.string());
  }
  if (path.extension() == ".model") {
    return make_sentencepiece_tokenizer(read_file(path), config, path.string());
  }
  return make_tokenizer(read_vocabulary(GgufFile(path)));
}

}  // namespace kvcache::model
