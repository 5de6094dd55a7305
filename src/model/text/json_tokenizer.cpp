// json_tokenizer.cpp - byte-level BPE from Hugging Face's tokenizer.json.
//
// Source: the serialisation of huggingface/tokenizers (src/models/bpe,
// src/pre_tokenizers, src/normalizers, src/processors/template.rs).

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "bpe_tokenizer.h"
#include "json_fields.h"
#include "json_pipeline.h"

namespace kvcache::model {
namespace {

void read_vocabulary(const JsonField& vocab, BpeDefinition& definition) {
  const size_t size = vocab.object().size();
  // Files leave a few ids out; more would be memory for nothing.
  const int64_t limit = static_cast<int64_t>(2 * size + 65536);
  for (const auto& [text, id] : vocab.value().items()) {
    const bool fits = id.is_number_integer() && id.get<int64_t>() >= 0 &&
                      id.get<int64_t>() < limit;
    if (!fits) {
      JsonField(id, definition.source, "model.vocab['" + text + "']")
          .refuse("an id in [0, " + std::to_string(limit) + ")");
    }
    const auto at = static_cast<size_t>(id.get<int64_t>());
    if (at >= definition.tokens.size()) definition.tokens.resize(at + 1);
    TORCH_CHECK(definition.tokens[at].empty(), "[load_tokenizer] ",
                definition.source,
                ": model.vocab must have one token an id "
                "but got '",
                definition.tokens[at], "' and '", text, "' for id ", at,
                "; the file is broken.");
    definition.tokens[at] = text;
  }
}

// Both spellings: "left right" and ["left", "right"].
void read_merges(const JsonField& merges, BpeDefinition& definition) {
  const size_t count = merges.array().size();
  definition.merges.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const JsonField merge = merges[i];
    if (merge.value().is_array()) {
      if (merge.value().size() != 2) merge.refuse("a pair");
      definition.merges.emplace_back(merge[size_t{0}].string(),
                                     merge[1].string());
      continue;
    }
    const std::string& text = merge.string();
    const size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != text.npos) {
      merge.refuse("two tokens with a space between");
    }
    definition.merges.emplace_back(text.substr(0, space),
                                   text.substr(space + 1));
  }
}

void read_model(const JsonField& model, BpeDefinition& definition) {
  // Old files leave the type out.
  const auto type = model["type"].optional_string();
  if (type.value_or("BPE") != "BPE") model["type"].refuse("'BPE'");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model[key].optional_string().value_or("").empty()) {
      model[key].refuse("empty, as in byte-level BPE,");
    }
  }
  if (model["byte_fallback"].boolean(false)) {
    model["byte_fallback"].refuse("false, as in byte-level BPE,");
  }
  if (!model["dropout"].is_null() && model["dropout"].value() != 0.0) {
    model["dropout"].refuse("null");
  }
  read_vocabulary(model["vocab"], definition);
  read_merges(model["merges"], definition);
  definition.unknown = model["unk_token"].optional_string();
  definition.fuse_unknown = model["fuse_unk"].boolean(false);
  definition.ignore_merges = model["ignore_merges"].boolean(false);
}

void read_added_tokens(const JsonField& tokens, BpeDefinition& definition) {
  if (tokens.is_null()) return;
  const size_t count = tokens.array().size();
  const int64_t limit =
      static_cast<int64_t>(definition.tokens.size() + count + 65536);
  for (size_t i = 0; i < count; ++i) {
    const JsonField token = tokens[i];
    const int64_t id = token["id"].integer();
    if (id < 0 || id >= limit) {
      token["id"].refuse("an id in [0, " + std::to_string(limit) + ")");
    }
    const std::string& text = token["content"].string();
    const bool special = token["special"].boolean(false);
    definition.added.push_back(
        {.id = id,
         .text = text,
         .control = special || looks_like_control(text),
         .lstrip = token["lstrip"].boolean(false),
         .rstrip = token["rstrip"].boolean(false),
         .single_word = token["single_word"].boolean(false),
         .normalized = token["normalized"].boolean(!special)});
  }
}

std::optional<int64_t> id_of_added(const BpeDefinition& definition,
                                   const std::string& text) {
  for (const AddedToken& token : definition.added) {
    if (token.text == text) return token.id;
  }
  const auto found =
      std::find(definition.tokens.begin(), definition.tokens.end(), text);
  if (found == definition.tokens.end()) return std::nullopt;
  return found - definition.tokens.begin();
}

// A token of tokenizer_config.json: its text, or an object with it.
std::optional<int64_t> read_token(const JsonField& field,
                                  const BpeDefinition& definition) {
  if (field.is_null()) return std::nullopt;
  const std::string& text =
      field.value().is_object() ? field["content"].string() : field.string();
  return id_of_added(definition, text);
}

void read_config(const JsonField& config, BpeDefinition& definition) {
  SpecialIds& ids = definition.special;
  const auto set = [&](const char* key, std::optional<int64_t>& id) {
    if (const auto found = read_token(config[key], definition)) id = found;
  };
  set("bos_token", ids.bos);
  set("eos_token", ids.eos);
  set("unk_token", ids.unknown);
  set("pad_token", ids.padding);
  ids.add_bos = config["add_bos_token"].boolean(ids.add_bos);
  ids.add_eos = config["add_eos_token"].boolean(ids.add_eos);
}

// What a model begins and ends a text with is control, whatever its flags.
void mark_ends(BpeDefinition& definition) {
  for (AddedToken& token : definition.added) {
    if (token.id == definition.special.bos ||
        token.id == definition.special.eos) {
      token.control = true;
    }
  }
}

}  // namespace

TokenizerPtr make_json_tokenizer(std::string_view tokenizer_json,
                                 std::string_view config_json,
                                 const std::string& source) {
  const nlohmann::json document = parse_json_object(tokenizer_json, source);
  const JsonField root(document, source);
  BpeDefinition definition{.source = source};
  read_model(root["model"], definition);
  read_added_tokens(root["added_tokens"], definition);
  read_normalizer(root["normalizer"], definition.normalizer);
  read_pre_tokenizer(root["pre_tokenizer"], source, definition.pre_tokenizer);
  check_decoder(root["decoder"]);
  read_post_processor(root["post_processor"], definition.special);
  if (!config_json.empty()) {
    const std::string config_source = "tokenizer_config.json";
    const nlohmann::json config = parse_json_object(config_json, config_source);
    read_config(JsonField(config, config_source), definition);
  }
  mark_ends(definition);
  return make_bpe_tokenizer(std::move(definition));
}

}  // namespace kvcache::model
