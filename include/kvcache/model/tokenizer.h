// kvcache/model/tokenizer.h - text to token ids and back.
//
// One interface over byte-level BPE (our own core) and SentencePiece models.
// Text is bytes, UTF-8 where it is valid; ids are int64_t in [0, vocab_size()).
// A control token (turn marker, begin, end) comes out of text only where the
// caller says `special`: what a user typed stays text.

#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvcache::model {

struct EncodeOptions {
  bool special = false;  // recognise control tokens spelled out in the text
  bool add_bos = false;  // begin token first, if the model declares that
  bool add_eos = false;  // end token last, if the model declares that
};

struct DecodeOptions {
  bool skip_special = false;  // leave control tokens out of the text
  // The ids continue a text: SentencePiece's leading space is kept.
  bool continues = false;
};

// A piece of a text of mixed origin. Control tokens are recognised only where
// they lie wholly within `special` parts.
struct TextPart {
  std::string text;
  bool special = false;
};

// What an added token asks for beside its text (tokenizer.json's flags).
struct AddedToken {
  int64_t id = 0;
  std::string text;
  bool control = false;      // never made from plain text
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool single_word = false;  // only where no word character touches it
  bool normalized = false;   // matched in the normalised text
};

// The tokens with a role.
struct SpecialIds {
  std::optional<int64_t> bos = {}, eos = {}, eot = {};
  std::optional<int64_t> unknown = {}, padding = {};
  std::vector<int64_t> ends =
      {};                // every token that ends a generation, ascending
  bool add_bos = false;  // the model wants `bos` before a text
  bool add_eos = false;  // the model wants `eos` after a text
};

// Immutable, so safe to share between threads.
//
// Errors: an id out of range or an option that cannot be met throws.
// Cost: encode() is near-linear in the bytes of the text, whatever they are.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  std::vector<int64_t> encode(std::string_view text,
                              EncodeOptions options = {}) const;
  // The parts are one text: pairs merge across their borders.
  // `options.special` is not looked at.
  std::vector<int64_t> encode(std::span<const TextPart> parts,
                              EncodeOptions options = {}) const;

  // The bytes that `ids` stand for; may be invalid UTF-8.
  std::string decode(std::span<const int64_t> ids,
                     DecodeOptions options = {}) const;
  // The same with U+FFFD for what is not UTF-8.
  std::string decode_text(std::span<const int64_t> ids,
                          DecodeOptions options = {}) const;

  // The bytes of one token within a text; control tokens: their spelling.
  std::string_view token_bytes(int64_t id) const;
  // The token whose spelling is `text` (its bytes, as in token_bytes).
  std::optional<int64_t> id_of(std::string_view text) const;
  bool is_control(int64_t id) const;

  virtual int64_t vocab_size() const noexcept = 0;
  const SpecialIds& special_ids() const noexcept { return special_; }
  std::optional<int64_t> bos_id() const noexcept { return special_.bos; }
  std::optional<int64_t> eos_id() const noexcept { return special_.eos; }
  std::optional<int64_t> eot_id() const noexcept { return special_.eot; }

  // SentencePiece puts a space before a text and takes it away on decoding.
  virtual bool strips_leading_space() const noexcept { return false; }

 protected:
  explicit Tokenizer(SpecialIds special) : special_(std::move(special)) {}

  // `special[i]`: byte i of the text lies in a special part. Empty: none does.
  virtual void do_encode(std::string_view text, const std::string& special,
                         std::vector<int64_t>& ids) const = 0;
  virtual std::string_view do_token_bytes(int64_t id) const = 0;
  virtual std::optional<int64_t> do_id_of(std::string_view text) const = 0;
  virtual bool do_is_control(int64_t id) const = 0;

 private:
  void check_id(const char* function, int64_t id) const;

  SpecialIds special_;
};

using TokenizerPtr = std::shared_ptr<const Tokenizer>;

// The vocabulary of a GGUF file, as its `tokenizer.ggml.*` keys say.
struct GgufVocabulary {
  std::string source;      // file name, for messages
  std::string model = {};  // "gpt2" (byte-level BPE), "llama" (SentencePiece)
  std::string pre = {};    // how a byte-level BPE cuts text: "llama-bpe", ...
  std::vector<std::string> tokens = {};
  std::vector<float> scores = {};        // SentencePiece: one a token
  std::vector<int32_t> types = {};       // one a token, see TokenType
  std::vector<std::string> merges = {};  // "left right", best first
  std::optional<int64_t> bos_id = {}, eos_id = {}, eot_id = {}, eom_id = {};
  std::optional<int64_t> unknown_id = {}, padding_id = {};
  std::optional<bool> add_bos = {}, add_eos = {}, add_space_prefix = {};
};

// Values of `tokenizer.ggml.token_type`.
enum class TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// Throws if the kind or the pre-tokenizer is not known, or the arrays
// contradict each other. Pre-tokenizers: gpt-2, smollm, llama-bpe, qwen2.
TokenizerPtr make_tokenizer(const GgufVocabulary& vocabulary);

// From the text of `tokenizer.json` and, if there is one, of
// `tokenizer_config.json`. `source` names the file in messages.
TokenizerPtr make_json_tokenizer(std::string_view tokenizer_json,
                                 std::string_view config_json = {},
                                 const std::string& source = "tokenizer.json");

// From the bytes of a SentencePiece `tokenizer.model`. Throws if the library
// was built without sentencepiece.
TokenizerPtr make_sentencepiece_tokenizer(
    std::string_view model, std::string_view config_json = {},
    const std::string& source = "tokenizer.model");

// Whether SentencePiece models can be read.
bool has_sentencepiece() noexcept;

// `path` is a .gguf file, a tokenizer.json, a tokenizer.model, or a folder
// with one of the latter two.
TokenizerPtr load_tokenizer(const std::filesystem::path& path);

// `bytes` with U+FFFD for every maximal part that is not UTF-8.
std::string replace_invalid_utf8(std::string_view bytes);

}  // namespace kvcache::model
