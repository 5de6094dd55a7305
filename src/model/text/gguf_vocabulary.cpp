// gguf_vocabulary.cpp - a tokenizer from the vocabulary of a GGUF file.
//
// Source of the patterns: the tokenizer.json of each family (SmolLM2,
// Llama-3, Qwen2), tokenization_qwen3_5.py of transformers; GPT-2's encoder.py.

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "bpe_tokenizer.h"
#include "sentencepiece_tokenizer.h"

namespace kvcache::model {
namespace {

constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// As Qwen2's, but marks belong to words.
constexpr std::string_view kQwen35Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N})"
    R"(| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

SplitStep isolate(std::string_view pattern, const std::string& source) {
  return {.pattern = Pattern(pattern, source)};
}

// How a family cuts and prepares text.
void set_family(const GgufVocabulary& from, BpeDefinition& definition) {
  PreTokenizer& pre = definition.pre_tokenizer;
  if (from.pre == "gpt-2") {
    pre.words = Pattern(kGpt2Pattern, from.source);
  } else if (from.pre == "smollm") {
    pre.steps = {isolate(R"(\p{N})", from.source)};
    pre.words = Pattern(kGpt2Pattern, from.source);
  } else if (from.pre == "llama-bpe") {
    pre.words = Pattern(kLlama3Pattern, from.source);
    definition.ignore_merges = true;
  } else if (from.pre == "qwen2" || from.pre == "qwen35") {
    pre.words = Pattern(from.pre == "qwen2" ? kQwen2Pattern : kQwen35Pattern,
                        from.source);
    definition.normalizer.steps = {{.form = NormalForm::kNfc}};
  } else {
    TORCH_CHECK(false, "[load_tokenizer] ", from.source,
                ": tokenizer.ggml.pre must be one of gpt-2, smollm, "
                "llama-bpe, qwen2 and qwen35 but got '",
                from.pre, "'; use a model with one of these.");
  }
}

void add_control_tokens(const GgufVocabulary& from, SpecialIds& ids,
                        std::vector<AddedToken>& added) {
  const auto has_role = [&](int64_t id) {
    return id == ids.bos || id == ids.eos || id == ids.eot || id == from.eom_id;
  };
  for (size_t i = 0; i < from.tokens.size(); ++i) {
    const auto id = static_cast<int64_t>(i);
    const auto type = from.types.empty()
                          ? TokenType::kNormal
                          : static_cast<TokenType>(from.types[i]);
    const std::string& text = from.tokens[i];
    const bool user_defined = type == TokenType::kUserDefined;
    const bool control = type == TokenType::kControl || has_role(id) ||
                         (user_defined && looks_like_control(text));
    if (control || user_defined) {
      added.push_back({.id = id, .text = text, .control = control});
    }
  }
}

void read_merges(const GgufVocabulary& from, BpeDefinition& definition) {
  definition.merges.reserve(from.merges.size());
  for (size_t i = 0; i < from.merges.size(); ++i) {
    const std::string& merge = from.merges[i];
    const size_t space = merge.find(' ', 1);
    TORCH_CHECK(space != std::string::npos && space + 1 < merge.size(),
                "[load_tokenizer] ", from.source, ": tokenizer.ggml.merges[", i,
                "] must be two tokens with a space between but got '", merge,
                "'; the file is broken.");
    definition.merges.emplace_back(merge.substr(0, space),
                                   merge.substr(space + 1));
  }
}

void check_sizes(const GgufVocabulary& from) {
  const auto check = [&](const char* key, size_t size) {
    TORCH_CHECK(size == 0 || size == from.tokens.size(), "[load_tokenizer] ",
                from.source, ": tokenizer.ggml.", key,
                " must have one entry a token, ", from.tokens.size(),
                ", but got ", size, "; the file is broken.");
  };
  check("scores", from.scores.size());
  check("token_type", from.types.size());
  const auto size = static_cast<int64_t>(from.tokens.size());
  const auto check_id = [&](const char* key, std::optional<int64_t> id) {
    TORCH_CHECK(!id || (*id >= 0 && *id < size), "[load_tokenizer] ",
                from.source, ": tokenizer.ggml.", key, " must be an id in [0, ",
                size, ") but got ", *id, "; the file is broken.");
  };
  check_id("bos_token_id", from.bos_id);
  check_id("eos_token_id", from.eos_id);
  check_id("eot_token_id", from.eot_id);
  check_id("eom_token_id", from.eom_id);
  check_id("unknown_token_id", from.unknown_id);
  check_id("padding_token_id", from.padding_id);
}

SpecialIds roles_of(const GgufVocabulary& from) {
  SpecialIds ids{.bos = from.bos_id,
                 .eos = from.eos_id,
                 .eot = from.eot_id,
                 .unknown = from.unknown_id,
                 .padding = from.padding_id};
  if (from.eom_id) ids.ends.push_back(*from.eom_id);
  return ids;
}

TokenizerPtr make_bpe(const GgufVocabulary& from) {
  BpeDefinition definition{.source = from.source, .tokens = from.tokens};
  SpecialIds& ids = definition.special = roles_of(from);
  // llama.cpp's default for this pre-tokenizer; off for the others.
  ids.add_bos = from.add_bos.value_or(from.pre == "llama-bpe");
  ids.add_eos = from.add_eos.value_or(false);
  set_family(from, definition);
  add_control_tokens(from, ids, definition.added);
  read_merges(from, definition);
  return make_bpe_tokenizer(std::move(definition));
}

}  // namespace

TokenizerPtr make_tokenizer(const GgufVocabulary& vocabulary) {
  check_sizes(vocabulary);
  if (vocabulary.model == "gpt2") return make_bpe(vocabulary);
  TORCH_CHECK(vocabulary.model == "llama", "[load_tokenizer] ",
              vocabulary.source,
              ": tokenizer.ggml.model must be 'gpt2' or 'llama' but got '",
              vocabulary.model, "'; use a model with one of these.");
  SpecialIds ids = roles_of(vocabulary);
  ids.add_bos = vocabulary.add_bos.value_or(true);
  ids.add_eos = vocabulary.add_eos.value_or(false);
  return make_sentencepiece_tokenizer(vocabulary, std::move(ids));
}

}  // namespace kvcache::model
