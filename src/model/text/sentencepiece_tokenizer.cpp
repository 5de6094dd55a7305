// sentencepiece_tokenizer.cpp - a SentencePiece model as a Tokenizer.

#include "sentencepiece_tokenizer.h"

#include <c10/util/Exception.h>
#include <sentencepiece_processor.h>

#include <limits>
#include <unordered_map>
#include <utility>

#include "added_tokens.h"
#include "byte_pairs.h"
#include "json_fields.h"
#include "sentencepiece_model.h"
#include "utf8.h"

namespace kvcache::model {
namespace {

using Processor = sentencepiece::SentencePieceProcessor;

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

struct SentencePieceDefinition {
  std::string model;  // a ModelProto
  std::string source;
  SpecialIds special = {};
  std::vector<AddedToken> added = {};  // beyond the model's own
  // A text after a control token begins anew, with a space of its own.
  bool prefix_everywhere = true;
};

void load(Processor& processor, const std::string& model,
          const std::string& source) {
  const auto status = processor.LoadFromSerializedProto(model);
  TORCH_CHECK(status.ok(), "[load_tokenizer] ", source,
              ": must be a SentencePiece model but ", status.ToString(),
              "; fetch the file again.");
}

// What a piece stands for within a text.
std::string piece_bytes(const Processor& processor, int id) {
  const std::string& piece = processor.IdToPiece(id);
  if (processor.IsControl(id)) return piece;
  if (processor.IsUnknown(id)) return " \xE2\x81\x87 ";  // as sentencepiece
  if (processor.IsByte(id) && piece.size() == 6) {       // <0xAB>
    return {static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16))};
  }
  std::string bytes;
  for (size_t at = 0; at < piece.size();) {
    if (piece.compare(at, kSpaceMark.size(), kSpaceMark) == 0) {
      bytes += ' ';
      at += kSpaceMark.size();
    } else {
      bytes += piece[at++];
    }
  }
  return bytes;
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(SentencePieceDefinition definition,
                         std::vector<AddedToken> tokens);

  int64_t vocab_size() const noexcept override {
    return static_cast<int64_t>(bytes_.size());
  }
  bool strips_leading_space() const noexcept override { return prefix_; }

 private:
  void do_encode(std::string_view text, const std::string& special,
                 std::vector<int64_t>& ids) const override;
  std::string_view do_token_bytes(int64_t id) const override {
    return bytes_[static_cast<size_t>(id)];
  }
  std::optional<int64_t> do_id_of(std::string_view text) const override {
    const auto found = ids_.find(text);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }
  bool do_is_control(int64_t id) const override {
    return control_[static_cast<size_t>(id)];
  }

  void encode_plain(std::string_view text, bool prefix,
                    std::vector<int64_t>& ids) const;
  void encode_valid(std::string_view text, bool prefix,
                    std::vector<int64_t>& ids) const;

  Processor plain_;     // puts no space before a text
  Processor prefixed_;  // puts one; loaded only if the model does
  bool prefix_;
  bool prefix_everywhere_;
  AddedTokens added_;
  std::vector<std::string> bytes_;  // of each token
  std::vector<bool> control_;
  std::unordered_map<std::string_view, int64_t> ids_;  // by bytes_
  ByteTokens byte_tokens_{};
};

SentencePieceTokenizer::SentencePieceTokenizer(
    SentencePieceDefinition definition, std::vector<AddedToken> tokens)
    : Tokenizer(std::move(definition.special)),
      prefix_(adds_dummy_prefix(definition.model, definition.source)),
      prefix_everywhere_(definition.prefix_everywhere),
      added_(tokens) {
  load(plain_, with_dummy_prefix(definition.model, false), definition.source);
  if (prefix_) load(prefixed_, definition.model, definition.source);
  byte_tokens_.fill(kNoToken);
  for (int id = 0; id < plain_.GetPieceSize(); ++id) {
    bytes_.push_back(piece_bytes(plain_, id));
    control_.push_back(plain_.IsControl(id));
    if (plain_.IsByte(id)) {
      byte_tokens_[static_cast<uint8_t>(bytes_.back()[0])] = id;
    }
  }
  for (const AddedToken& token : tokens) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= bytes_.size()) {
      bytes_.resize(id + 1);
      control_.resize(id + 1, false);
    }
    bytes_[id] = token.text;
    control_[id] = token.control;
  }
  // A piece is preferred to the single byte that spells the same.
  for (const bool bytes : {false, true}) {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const int id = static_cast<int>(i);
      const bool is_byte = id < plain_.GetPieceSize() && plain_.IsByte(id);
      if (is_byte == bytes && !bytes_[i].empty()) {
        ids_.try_emplace(bytes_[i], id);
      }
    }
  }
}

void SentencePieceTokenizer::do_encode(std::string_view text,
                                       const std::string& special,
                                       std::vector<int64_t>& ids) const {
  TORCH_CHECK_VALUE(
      text.size() <= std::numeric_limits<int32_t>::max(),
      "[Tokenizer::encode] a text must have fewer than 2^31 bytes but got ",
      text.size(), "; encode it in parts.");
  added_.split(
      text, special,
      [&](size_t begin, size_t end) {
        const bool prefix = prefix_ && (prefix_everywhere_ || begin == 0);
        encode_plain(text.substr(begin, end - begin), prefix, ids);
      },
      [&](int64_t id) { ids.push_back(id); });
}

// Bytes that are not UTF-8 become byte pieces where the model has them.
void SentencePieceTokenizer::encode_plain(std::string_view text, bool prefix,
                                          std::vector<int64_t>& ids) const {
  for (size_t at = 0; at < text.size();) {
    const size_t valid = valid_run_end(text, at);
    if (valid > at) {
      encode_valid(text.substr(at, valid - at), prefix && at == 0, ids);
    }
    const size_t end = invalid_run_end(text, valid);
    for (size_t i = valid; i < end; ++i) {
      const int32_t token = byte_tokens_[static_cast<uint8_t>(text[i])];
      ids.push_back(token == kNoToken ? plain_.unk_id() : token);
    }
    at = end;
  }
}

void SentencePieceTokenizer::encode_valid(std::string_view text, bool prefix,
                                          std::vector<int64_t>& ids) const {
  std::vector<int> pieces;
  const auto status = (prefix ? prefixed_ : plain_).Encode(text, &pieces);
  TORCH_CHECK(status.ok(), "[Tokenizer::encode] a text of ", text.size(),
              " bytes must be encodable but ", status.ToString(),
              "; check the model.");
  ids.insert(ids.end(), pieces.begin(), pieces.end());
}

// The control pieces of the model, and what the file adds to them.
TokenizerPtr make(SentencePieceDefinition definition) {
  Processor processor;
  load(processor, definition.model, definition.source);
  std::vector<AddedToken> tokens;
  for (int id = 0; id < processor.GetPieceSize(); ++id) {
    if (!processor.IsControl(id)) continue;
    tokens.push_back(
        {.id = id, .text = processor.IdToPiece(id), .control = true});
  }
  for (const AddedToken& token : definition.added) tokens.push_back(token);
  complete_special_ids(tokens, definition.special);
  return std::make_shared<SentencePieceTokenizer>(std::move(definition),
                                                  std::move(tokens));
}

// The tokens that a configuration adds to the model's own.
std::vector<AddedToken> read_added(const JsonField& config, int64_t pieces) {
  std::vector<AddedToken> added;
  const JsonField tokens = config["added_tokens_decoder"];
  if (tokens.is_null()) return added;
  const int64_t limit =
      pieces + static_cast<int64_t>(tokens.object().size()) + 65536;
  for (const auto& [key, value] : tokens.value().items()) {
    const JsonField token = tokens[key.c_str()];
    const bool digits =
        !key.empty() && key.size() < 10 &&
        key.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stoll(key) >= limit) {
      token.refuse("named by an id in [0, " + std::to_string(limit) + ")");
    }
    const int64_t id = std::stoll(key);
    const std::string& text = token["content"].string();
    if (id < pieces) continue;
    added.push_back(
        {.id = id,
         .text = text,
         .control = token["special"].boolean(false) || looks_like_control(text),
         .lstrip = token["lstrip"].boolean(false),
         .rstrip = token["rstrip"].boolean(false),
         .single_word = token["single_word"].boolean(false)});
  }
  return added;
}

std::optional<int64_t> optional_id(int id) {
  if (id < 0) return std::nullopt;
  return id;
}

void read_config(std::string_view config_json, int64_t pieces,
                 SentencePieceDefinition& definition) {
  const std::string source = "tokenizer_config.json";
  const nlohmann::json document = parse_json_object(config_json, source);
  const JsonField config(document, source);
  definition.added = read_added(config, pieces);
  SpecialIds& ids = definition.special;
  ids.add_bos = config["add_bos_token"].boolean(ids.add_bos);
  ids.add_eos = config["add_eos_token"].boolean(ids.add_eos);
  definition.prefix_everywhere = config["legacy"].boolean(true);
  // An end token that was added later, as instruct models do.
  const JsonField eos = config["eos_token"];
  if (eos.is_null()) return;
  const std::string& text =
      eos.value().is_object() ? eos["content"].string() : eos.string();
  for (const AddedToken& token : definition.added) {
    if (token.text == text) ids.eos = token.id;
  }
}

}  // namespace

bool has_sentencepiece() noexcept { return true; }

TokenizerPtr make_sentencepiece_tokenizer(const GgufVocabulary& vocabulary,
                                          SpecialIds ids) {
  return make({.model = to_sentencepiece_model(vocabulary),
               .source = vocabulary.source,
               .special = std::move(ids)});
}

TokenizerPtr make_sentencepiece_tokenizer(std::string_view model,
                                          std::string_view config_json,
                                          const std::string& source) {
  SentencePieceDefinition definition{.model = std::string(model),
                                     .source = source};
  adds_dummy_prefix(model, source);  // throws if it is no model at all
  Processor processor;
  load(processor, definition.model, source);
  SpecialIds& ids = definition.special;
  ids.bos = optional_id(processor.bos_id());
  ids.eos = optional_id(processor.eos_id());
  ids.unknown = optional_id(processor.unk_id());
  ids.padding = optional_id(processor.pad_id());
  ids.add_bos = ids.bos.has_value();
  if (!config_json.empty()) {
    read_config(config_json, processor.GetPieceSize(), definition);
  }
  return make(std::move(definition));
}

}  // namespace kvcache::model
