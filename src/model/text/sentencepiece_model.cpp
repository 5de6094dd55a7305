// sentencepiece_model.cpp - the little of SentencePiece's ModelProto that has
// to be read or written here.

#include "sentencepiece_model.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <optional>

namespace kvcache::model {
namespace {

// Field numbers of ModelProto, SentencePiece, TrainerSpec, NormalizerSpec.
constexpr uint32_t kPieces = 1, kTrainer = 2, kNormalizer = 3;
constexpr uint32_t kPieceText = 1, kPieceScore = 2, kPieceType = 3;
constexpr uint32_t kModelType = 3, kByteFallback = 35, kUnknownId = 40;
constexpr uint32_t kNormalizerName = 1, kAddDummyPrefix = 3,
                   kRemoveExtraWhitespaces = 4;
constexpr uint64_t kModelTypeBpe = 2;

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5
};

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

void put_number(std::string& out, uint32_t field, uint64_t value) {
  put_varint(out, field << 3 | kVarint);
  put_varint(out, value);
}

void put_bytes(std::string& out, uint32_t field, std::string_view value) {
  put_varint(out, field << 3 | kBytes);
  put_varint(out, value.size());
  out += value;
}

void put_float(std::string& out, uint32_t field, float value) {
  put_varint(out, field << 3 | kFixed32);
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

// Walks over the fields of one message.
class FieldReader {
 public:
  FieldReader(std::string_view message, const std::string& source)
      : rest_(message), source_(source) {}

  bool next() {
    if (rest_.empty()) return false;
    const uint64_t tag = varint();
    field = static_cast<uint32_t>(tag >> 3);
    bytes = {};
    number = 0;
    switch (static_cast<uint32_t>(tag & 7)) {
      case kVarint:
        number = varint();
        break;
      case kFixed64:
        take(8);
        break;
      case kBytes:
        bytes = take(varint());
        break;
      case kFixed32:
        take(4);
        break;
      default:
        refuse();
    }
    return true;
  }

  uint32_t field = 0;
  uint64_t number = 0;
  std::string_view bytes;

 private:
  [[noreturn]] void refuse() const {
    TORCH_CHECK(false, "[load_tokenizer] ", source_,
                ": must be a SentencePiece model but is not one, ",
                rest_.size(), " bytes before its end; fetch the file again.");
  }
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) refuse();
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    refuse();
  }

  std::string_view rest_;
  const std::string& source_;
};

std::string piece_message(const GgufVocabulary& from, size_t i,
                          TokenType type) {
  std::string piece;
  put_bytes(piece, kPieceText, from.tokens[i]);
  put_float(piece, kPieceScore, from.scores.empty() ? 0 : from.scores[i]);
  put_number(piece, kPieceType, static_cast<uint64_t>(type));
  return piece;
}

}  // namespace

bool adds_dummy_prefix(std::string_view model, const std::string& source) {
  bool add = true;  // the proto's default
  FieldReader fields(model, source);
  while (fields.next()) {
    if (fields.field != kNormalizer) continue;
    FieldReader normalizer(fields.bytes, source);
    while (normalizer.next()) {
      if (normalizer.field == kAddDummyPrefix) add = normalizer.number != 0;
    }
  }
  return add;
}

std::string with_dummy_prefix(std::string_view model, bool add) {
  std::string normalizer;
  put_number(normalizer, kAddDummyPrefix, add ? 1 : 0);
  std::string changed(model);
  put_bytes(changed, kNormalizer, normalizer);
  return changed;
}

std::string to_sentencepiece_model(const GgufVocabulary& vocabulary) {
  std::string model;
  std::optional<size_t> unknown;
  size_t byte_pieces = 0;
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    TokenType type = vocabulary.types.empty()
                         ? TokenType::kNormal
                         : static_cast<TokenType>(vocabulary.types[i]);
    TORCH_CHECK(type >= TokenType::kNormal && type <= TokenType::kByte,
                "[load_tokenizer] ", vocabulary.source,
                ": tokenizer.ggml.token_type[", i,
                "] must be in [1, 6] but got ", static_cast<int32_t>(type),
                "; the file is broken.");
    // SentencePiece takes exactly one unknown piece.
    if (type == TokenType::kUnknown && unknown) type = TokenType::kControl;
    if (type == TokenType::kUnknown) unknown = i;
    if (type == TokenType::kByte) ++byte_pieces;
    put_bytes(model, kPieces, piece_message(vocabulary, i, type));
  }
  TORCH_CHECK(unknown, "[load_tokenizer] ", vocabulary.source,
              ": tokenizer.ggml.token_type must name an unknown token (2) but "
              "none of ",
              vocabulary.tokens.size(), " is one; the file is broken.");
  std::string trainer;
  put_number(trainer, kModelType, kModelTypeBpe);
  put_number(trainer, kByteFallback, byte_pieces > 0 ? 1 : 0);
  put_number(trainer, kUnknownId, *unknown);
  put_bytes(model, kTrainer, trainer);
  std::string normalizer;
  put_bytes(normalizer, kNormalizerName, "identity");
  put_number(normalizer, kAddDummyPrefix,
             vocabulary.add_space_prefix.value_or(true) ? 1 : 0);
  put_number(normalizer, kRemoveExtraWhitespaces, 0);
  put_bytes(model, kNormalizer, normalizer);
  return model;
}

}  // namespace kvcache::model
