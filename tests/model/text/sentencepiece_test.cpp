// SentencePiece models, from tokenizer.model and from a GGUF vocabulary,
// against the sentencepiece library for Python.

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

using testing::HasSubstr;

class SentencePiece : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_sentencepiece()) GTEST_SKIP() << "built without sentencepiece";
  }

  static std::string model(const std::string& kind) {
    return read_file(data_path("sentencepiece_" + kind + ".model"));
  }
  static TokenizerPtr load(const std::string& kind,
                           const std::string& config = {}) {
    return make_sentencepiece_tokenizer(model(kind), config);
  }
  // The model's pieces, as llama.cpp's converter writes them.
  static GgufVocabulary vocabulary() {
    const nlohmann::json pieces = read_json("sentencepiece_bpe_pieces.json");
    GgufVocabulary result{.source = "spm.gguf", .model = "llama"};
    for (const auto& piece : pieces) {
      result.tokens.push_back(piece[0]);
      result.scores.push_back(piece[1]);
      result.types.push_back(piece[2]);
    }
    result.bos_id = 1;
    result.eos_id = 2;
    result.unknown_id = 0;
    return result;
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_ids(const Tokenizer& tokenizer, const nlohmann::json& expected,
                bool ties = false) {
  const std::vector<std::string> strings = texts();
  for (size_t i = 0; i < strings.size(); ++i) {
    const Ids ids = tokenizer.encode(strings[i]);
    Ids wanted = expected["plain"][i].get<Ids>();
    EXPECT_EQ(tokenizer.decode(ids), expected["decoded"][i].get<std::string>());
    if (ties) {
      // Which of two equally likely cuts is taken differs between versions.
      Ids sorted = ids;
      std::sort(sorted.begin(), sorted.end());
      std::sort(wanted.begin(), wanted.end());
      EXPECT_EQ(sorted, wanted) << strings[i];
    } else {
      EXPECT_EQ(ids, wanted) << strings[i];
    }
  }
}

TEST_F(SentencePiece, ModelsGiveTheLibrarysIdsAndText) {
  expect_ids(*load("bpe"), read_json("sentencepiece_bpe_ids.json"));
  expect_ids(*load("unigram"), read_json("sentencepiece_unigram_ids.json"),
             true);
}

TEST_F(SentencePiece, AGgufVocabularyGivesTheSame) {
  expect_ids(*make_tokenizer(vocabulary()),
             read_json("sentencepiece_bpe_ids.json"));
}

TEST_F(SentencePiece, RolesAreThoseOfTheModel) {
  const TokenizerPtr tokenizer = load("bpe");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_TRUE(tokenizer->special_ids().add_bos);
  EXPECT_EQ(tokenizer->special_ids().ends, Ids{2});
  EXPECT_EQ(tokenizer->encode("a", {.add_bos = true}).front(), 1);
  EXPECT_TRUE(tokenizer->is_control(3));   // <|turn|>
  EXPECT_FALSE(tokenizer->is_control(4));  // [TOOL]
  EXPECT_EQ(tokenizer->id_of("<|turn|>"), 3);
  EXPECT_EQ(tokenizer->id_of("nothing like it"), std::nullopt);
}

TEST_F(SentencePiece, ControlPiecesComeOnlyOutOfSpecialText) {
  const TokenizerPtr tokenizer = load("bpe");
  const auto controls = [&](const Ids& ids) {
    return std::count_if(ids.begin(), ids.end(),
                         [&](int64_t id) { return tokenizer->is_control(id); });
  };
  const std::string text = "</s>a<|turn|><s>b<unk>";
  EXPECT_EQ(controls(tokenizer->encode(text)), 0);
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  EXPECT_EQ(controls(tokenizer->encode(text, {.special = true})), 3);
}

TEST_F(SentencePiece, BytesThatAreNotUtf8ComeBack) {
  const TokenizerPtr tokenizer = load("bpe");
  for (const char* text : {"\xFF", "a\xFF\x80z", "\xE4\xBD", "a \xC0 \xC1"}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST_F(SentencePiece, ATextAfterAControlTokenBeginsWithASpaceUnlessNotLegacy) {
  const auto pieces = [](const TokenizerPtr& tokenizer) {
    std::vector<std::string> result;
    for (const int64_t id :
         tokenizer->encode("a<|turn|>b", {.special = true})) {
      result.emplace_back(tokenizer->token_bytes(id));
    }
    return result;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(pieces(load("bpe")), (Strings{" a", "<|turn|>", " b"}));
  EXPECT_EQ(pieces(load("bpe", R"({"legacy": false})")),
            (Strings{" a", "<|turn|>", "b"}));
}

TEST_F(SentencePiece, NoSpaceIsPutWhereTheModelPutsNone) {
  GgufVocabulary from = vocabulary();
  from.add_space_prefix = false;
  const TokenizerPtr tokenizer = make_tokenizer(from);
  EXPECT_FALSE(tokenizer->strips_leading_space());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(" a b")), " a b");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("a b")), "a b");
}

TEST_F(SentencePiece, TokensOfTheConfigurationAreAdded) {
  const TokenizerPtr tokenizer =
      load("bpe",
           R"({"add_bos_token": false, "eos_token": "<|end|>",
          "added_tokens_decoder": {
            "2": {"content": "</s>", "special": true},
            "480": {"content": "<|end|>", "special": true, "rstrip": true},
            "481": {"content": "<fn>", "special": false}}})");
  EXPECT_EQ(tokenizer->vocab_size(), 482);
  EXPECT_FALSE(tokenizer->special_ids().add_bos);
  EXPECT_EQ(tokenizer->eos_id(), 480);
  EXPECT_TRUE(tokenizer->is_control(480));
  EXPECT_EQ(tokenizer->encode("<fn>"), Ids{481});
  EXPECT_EQ(tokenizer->encode("<|end|>  ", {.special = true}), Ids{480});
}

TEST_F(SentencePiece, BrokenModelsAreRefused) {
  const std::string good = model("bpe");
  EXPECT_THAT(error_of([&] { make_sentencepiece_tokenizer(""); }),
              HasSubstr("must be a SentencePiece model but"));
  EXPECT_THAT(error_of([&] { make_sentencepiece_tokenizer("hello, world"); }),
              HasSubstr("must be a SentencePiece model but"));
  for (const size_t size : {size_t{1}, size_t{100}, good.size() - 1}) {
    EXPECT_THAT(
        error_of([&] { make_sentencepiece_tokenizer(good.substr(0, size)); }),
        HasSubstr("must be a SentencePiece model but"))
        << size;
  }
  for (const char* config :
       {R"({"added_tokens_decoder": {"x": {"content": "a"}}})",
        R"({"added_tokens_decoder": {"99999999": {"content": "a"}}})",
        R"({"added_tokens_decoder": {"480": {"content": 5}}})",
        R"({"added_tokens_decoder": []})", R"({"legacy": 3})", "[]", "{"}) {
    EXPECT_THAT(error_of([&] { load("bpe", config); }),
                HasSubstr("tokenizer_config.json: "))
        << config;
  }
}

TEST_F(SentencePiece, BrokenVocabulariesAreRefused) {
  const auto error_with =
      [](const std::function<void(GgufVocabulary&)>& change) {
        GgufVocabulary from = vocabulary();
        change(from);
        return error_of([&] { make_tokenizer(from); });
      };
  EXPECT_THAT(error_with([](auto& from) { from.types[7] = 9; }),
              HasSubstr("tokenizer.ggml.token_type[7] must be in [1, 6] but "
                        "got 9"));
  EXPECT_THAT(error_with([](auto& from) { from.types[0] = 3; }),
              HasSubstr("must name an unknown token (2) but none of 480 is"));
  EXPECT_THAT(
      error_with([](auto& from) { from.tokens[300] = from.tokens[301]; }),
      HasSubstr("must be a SentencePiece model but"));
  EXPECT_THAT(error_with([](auto& from) { from.scores.pop_back(); }),
              HasSubstr("tokenizer.ggml.scores must have one entry a token, "
                        "480, but got 479"));
  EXPECT_EQ(error_with([](auto& from) { from.types[4] = 2; }), "no error");
}

}  // namespace
}  // namespace kvcache::model::test
