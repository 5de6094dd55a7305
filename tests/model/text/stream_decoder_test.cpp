// Streaming decoding: whole characters only, nothing lost, and together what
// decoding all at once gives (cases K93 and K95).

#include "kvcache/model/stream_decoder.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

// One token for each of `tokens`, which are plain bytes.
class ListTokenizer final : public Tokenizer {
 public:
  explicit ListTokenizer(std::vector<std::string> tokens, bool strips = false)
      : Tokenizer({}), tokens_(std::move(tokens)), strips_(strips) {}
  int64_t vocab_size() const noexcept override {
    return static_cast<int64_t>(tokens_.size());
  }
  bool strips_leading_space() const noexcept override { return strips_; }

 private:
  void do_encode(std::string_view, const std::string&, Ids&) const override {}
  std::string_view do_token_bytes(int64_t id) const override {
    return tokens_[static_cast<size_t>(id)];
  }
  std::optional<int64_t> do_id_of(std::string_view) const override {
    return std::nullopt;
  }
  bool do_is_control(int64_t id) const override {
    return tokens_[static_cast<size_t>(id)].starts_with("<|");
  }

  std::vector<std::string> tokens_;
  bool strips_;
};

TokenizerPtr list(std::vector<std::string> tokens, bool strips = false) {
  return std::make_shared<ListTokenizer>(std::move(tokens), strips);
}

Ids all_of(const Tokenizer& tokenizer) {
  Ids ids;
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) ids.push_back(id);
  return ids;
}

std::vector<std::string> pieces_of(const TokenizerPtr& tokenizer,
                                   const Ids& ids, const Ids& prompt = {},
                                   StreamOptions options = {}) {
  StreamDecoder decoder(tokenizer, prompt, options);
  std::vector<std::string> pieces;
  for (const int64_t id : ids) pieces.push_back(decoder.push(id));
  pieces.push_back(decoder.finish());
  return pieces;
}

std::string joined(const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) {
    EXPECT_EQ(replace_invalid_utf8(piece), piece) << "not valid UTF-8";
    text += piece;
  }
  return text;
}

using Pieces = std::vector<std::string>;

TEST(StreamDecoder, ACharacterOverTwoTokensComesWhole) {
  const auto tokenizer = list({"\xF0\x9F", "\x98\xB8", "\xE3", "\x81", "\x82"});
  EXPECT_EQ(pieces_of(tokenizer, all_of(*tokenizer)),
            (Pieces{"", "\xF0\x9F\x98\xB8", "", "", "\xE3\x81\x82", ""}));
}

TEST(StreamDecoder, SingleBytesMakeCharacters) {
  const auto tokenizer = list({"a\xF0", "\x9F", "\x98", "\xB8z"});
  EXPECT_EQ(pieces_of(tokenizer, all_of(*tokenizer)),
            (Pieces{"a", "", "", "\xF0\x9F\x98\xB8z", ""}));
}

TEST(StreamDecoder, TheTailIsNotLost) {
  const auto tokenizer = list({"a", "\xE3\x81"});
  EXPECT_EQ(pieces_of(tokenizer, {0, 1}), (Pieces{"a", "", "\xEF\xBF\xBD"}));
}

TEST(StreamDecoder, BytesThatCannotBecomeACharacterAreShownAtOnce) {
  const auto tokenizer = list({"\xFF", "\xE3", "x", "\xC3", "\xC3", "\xA9"});
  EXPECT_EQ(pieces_of(tokenizer, all_of(*tokenizer)),
            (Pieces{"\xEF\xBF\xBD", "", "\xEF\xBF\xBDx", "", "\xEF\xBF\xBD",
                    "\xC3\xA9", ""}));
}

TEST(StreamDecoder, ControlTokensGiveNoTextUnlessAskedFor) {
  const auto tokenizer = list({"a", "<|end|>", "b"});
  EXPECT_EQ(pieces_of(tokenizer, {0, 1, 2}), (Pieces{"a", "", "b", ""}));
  EXPECT_EQ(pieces_of(tokenizer, {0, 1, 2}, {}, {.skip_special = false}),
            (Pieces{"a", "<|end|>", "b", ""}));
}

TEST(StreamDecoder, ALeadingSpaceGoesOnlyAtTheStartOfAText) {
  const auto tokenizer =
      list({" the", " cat", ".", " 's", "<|bos|>", ""}, true);
  const Ids ids = {0, 1, 2, 3};
  EXPECT_EQ(joined(pieces_of(tokenizer, ids)), "the cat. 's");
  EXPECT_EQ(joined(pieces_of(tokenizer, ids, {4})), "the cat. 's");
  EXPECT_EQ(joined(pieces_of(tokenizer, ids, {4, 2})), " the cat. 's");
  EXPECT_EQ(joined(pieces_of(tokenizer, {4, 0, 0})), "the the");
  EXPECT_EQ(joined(pieces_of(list({" the"}), {0, 0})), " the the");
  EXPECT_EQ(tokenizer->decode(ids), "the cat. 's");
  EXPECT_EQ(tokenizer->decode(ids, {.continues = true}), " the cat. 's");
}

TEST(StreamDecoder, AnIdOutOfRangeThrowsAndChangesNothing) {
  const auto tokenizer = list({"\xE3", "\x81\x82"});
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(0), "");
  for (const int64_t id : {int64_t{-1}, int64_t{2}}) {
    try {
      decoder.push(id);
      FAIL();
    } catch (const c10::Error& error) {
      EXPECT_EQ(std::string(error.what_without_backtrace()),
                "[Tokenizer::is_control] token id must be in [0, 2) but got " +
                    std::to_string(id) +
                    "; take ids from a model with this vocabulary.");
    }
  }
  EXPECT_EQ(decoder.push(1), "\xE3\x81\x82");
  EXPECT_THROW(StreamDecoder(tokenizer, Ids{7}), c10::Error);
  EXPECT_THROW(StreamDecoder(nullptr), c10::Error);
}

// Prompt + stream equals all at once, wherever the prompt ends.
void expect_stream_equals_whole(const TokenizerPtr& tokenizer, const Ids& ids) {
  EXPECT_EQ(joined(pieces_of(tokenizer, ids)),
            tokenizer->decode_text(ids, {.skip_special = true}));
  EXPECT_EQ(joined(pieces_of(tokenizer, ids, {}, {.skip_special = false})),
            tokenizer->decode_text(ids));
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    const Ids prompt(ids.begin(), ids.begin() + static_cast<int64_t>(cut));
    const Ids rest(ids.begin() + static_cast<int64_t>(cut), ids.end());
    // Bytes, as the prompt may end within a character.
    const bool continues =
        std::any_of(prompt.begin(), prompt.end(), [&](int64_t id) {
          return !tokenizer->is_control(id) &&
                 !tokenizer->token_bytes(id).empty();
        });
    EXPECT_EQ(tokenizer->decode(prompt, {.skip_special = true}) +
                  tokenizer->decode(
                      rest, {.skip_special = true, .continues = continues}),
              tokenizer->decode(ids, {.skip_special = true}));
    EXPECT_EQ(joined(pieces_of(tokenizer, rest, prompt)),
              tokenizer->decode_text(
                  rest, {.skip_special = true, .continues = continues}));
  }
}

std::vector<TokenizerPtr> tokenizers() {
  std::vector<TokenizerPtr> result;
  for (const char* family : {"gpt2", "smollm", "llama3", "qwen2"}) {
    result.push_back(family_tokenizer(family));
  }
  if (has_sentencepiece()) {
    for (const char* name :
         {"sentencepiece_bpe.model", "sentencepiece_unigram.model"}) {
      result.push_back(
          make_sentencepiece_tokenizer(read_file(data_path(name)), {}, name));
    }
  }
  return result;
}

TEST(StreamDecoder, EqualsDecodingAllAtOnce) {
  for (const TokenizerPtr& tokenizer : tokenizers()) {
    for (const std::string& text : texts()) {
      expect_stream_equals_whole(tokenizer, tokenizer->encode(text));
    }
  }
}

TEST(StreamDecoder, EqualsDecodingAllAtOnceForRandomIds) {
  std::mt19937 random(11);
  for (const TokenizerPtr& tokenizer : tokenizers()) {
    for (int round = 0; round < 100; ++round) {
      Ids ids;
      // The first ids are control tokens and single bytes, where there are.
      const int64_t size = tokenizer->vocab_size();
      const auto most = static_cast<size_t>(
          round % 2 == 0 ? std::min<int64_t>(size, 261) : size);
      for (int i = 0; i < 12; ++i) {
        ids.push_back(static_cast<int64_t>(random() % most));
      }
      expect_stream_equals_whole(tokenizer, ids);
    }
  }
}

TEST(Utf8, ReplacesEveryMaximalPart) {
  // Unicode 15, table 3-8 and the examples around it.
  const std::string mark = "\xEF\xBF\xBD";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", ""},
      {"a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80",
       "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"},
      {"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64",
       "a" + mark + mark + mark + "b" + mark + "c" + mark + mark + "d"},
      {"\xC0\x80", mark + mark},                        // overlong
      {"\xE0\x80\x80", mark + mark + mark},             // overlong
      {"\xED\xA0\x80", mark + mark + mark},             // surrogate
      {"\xF4\x90\x80\x80", mark + mark + mark + mark},  // beyond U+10FFFF
      {"\xF5\x80", mark + mark},
      {"\xE2\x82", mark},
      {"\xF0\x9F\x98", mark},
      {"\xF0\x9F\x98x", mark + "x"},
      {std::string("\0a", 2), std::string("\0a", 2)},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(replace_invalid_utf8(bytes), text);
  }
}

TEST(Utf8, AStreamCutAnywhereGivesTheSame) {
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    std::string bytes = random_bytes(random, 20);
    if (round % 2 == 0) bytes += "\xE2\x82\xAC\xF0\x9F\x98\x80" + bytes;
    Utf8Stream stream;
    std::string text;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size = random() % 4;
      const std::string piece = stream.push(bytes.substr(at, size));
      EXPECT_EQ(replace_invalid_utf8(piece), piece);
      text += piece;
      at += size;
    }
    EXPECT_EQ(text + stream.finish(), replace_invalid_utf8(bytes));
  }
}

}  // namespace
}  // namespace kvcache::model::test
