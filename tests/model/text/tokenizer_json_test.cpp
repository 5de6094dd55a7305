// tokenizer.json: what is understood, and that everything else is refused with
// its name.

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <functional>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// A complete tokenizer that knows a, b, ab and one control token.
json small() {
  return json::parse(R"({
    "added_tokens": [{"id": 3, "content": "<end>", "special": true,
                      "normalized": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
    "post_processor": null,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 4},
              "merges": ["a b"]}})");
}

TokenizerPtr make(const json& document, const std::string& config = {}) {
  return make_json_tokenizer(document.dump(), config, "t.json");
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// The error after `value` is put at `pointer`.
std::string error_with(const std::string& pointer, const char* value) {
  json document = small();
  document[json::json_pointer(pointer)] = json::parse(value);
  return error_of([&] { make(document); });
}

TEST(TokenizerJson, TheSmallOneWorks) {
  const TokenizerPtr tokenizer = make(small());
  EXPECT_EQ(tokenizer->encode("abba"), (Ids{2, 1, 0}));
  EXPECT_EQ(tokenizer->vocab_size(), 5);
  EXPECT_EQ(tokenizer->encode(""), Ids{});
}

TEST(TokenizerJson, BothSpellingsOfAMergeMeanTheSame) {
  json document = small();
  document["model"]["merges"] = json::parse(R"([["a", "b"]])");
  EXPECT_EQ(make(document)->encode("abba"), (Ids{2, 1, 0}));
}

TEST(TokenizerJson, WhatIsNotSupportedIsNamed) {
  struct Case {
    const char* pointer;
    const char* value;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"/model/type", R"("WordPiece")",
       "[load_tokenizer] t.json: model.type must be 'BPE' but got "
       "\"WordPiece\"; use another tokenizer file."},
      {"/model/byte_fallback", "true",
       "model.byte_fallback must be false, as in byte-level BPE, but got true"},
      {"/model/dropout", "0.1", "model.dropout must be null but got 0.1"},
      {"/model/end_of_word_suffix", R"("</w>")", "model.end_of_word_suffix"},
      {"/model/vocab", "[]", "model.vocab must be an object"},
      {"/model/vocab/a", "-1", "model.vocab['a'] must be an id in [0, 65544)"},
      {"/model/vocab/a", "99999999999", "model.vocab['a'] must be an id in"},
      {"/model/vocab/a", "1.5", "model.vocab['a'] must be an id in"},
      {"/model/vocab/a", "1", "model.vocab must have one token an id but got"},
      {"/model/vocab", "{}", "the vocabulary must not be empty"},
      {"/model/merges", "7", "model.merges must be an array but got 7"},
      {"/model/merges/0", R"("ab")",
       "model.merges[0] must be two tokens with a space between but got"},
      {"/model/merges/0", R"("a b c")", "model.merges[0] must be two tokens"},
      {"/model/merges/0", R"(["a"])", "model.merges[0] must be a pair"},
      {"/model/merges/0", R"(["a", 1])", "model.merges[0][1] must be a string"},
      {"/model/merges/0", R"("a x")",
       "merge 0 ('a' 'x') must be of known tokens but 'x' is not in the "
       "vocabulary"},
      {"/model/merges/0", R"("b b")", "but 'bb' is not in the vocabulary"},
      {"/normalizer", R"({"type": "Lowercase"})",
       "normalizer.type must be one of Sequence, NFC, NFD, NFKC, NFKD, Replace "
       "and Prepend but got \"Lowercase\""},
      {"/normalizer", R"({"type": "Replace", "pattern": {"Regex": "x"}})",
       "normalizer.pattern.String must be a string but got null"},
      {"/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "X"}]})",
       "normalizer.normalizers[0].type must be one of"},
      {"/pre_tokenizer", "null",
       "pre_tokenizer must be one that ends in ByteLevel but got null"},
      {"/pre_tokenizer", R"({"type": "Metaspace"})",
       "pre_tokenizer.type must be one of Sequence, Split, Digits, ByteLevel, "
       "Whitespace, WhitespaceSplit and Punctuation but got \"Metaspace\""},
      {"/pre_tokenizer", R"({"type": "Digits"})", "that ends in ByteLevel"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [
           {"type": "ByteLevel"}, {"type": "Digits"}]})",
       "pretokenizers[1].type must be before ByteLevel, which comes last,"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "("}, "behavior":
           "Isolated"})",
       "the pattern '(' must be a regular expression but missing closing "
       "parenthesis at byte 1"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "\\h"}, "behavior":
           "Isolated"})",
       "must not use \\h"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Best"})",
       "pre_tokenizer.behavior must be a known behaviour but got \"Best\""},
      {"/decoder", R"({"type": "Metaspace"})",
       "decoder.type must be 'ByteLevel' but got \"Metaspace\""},
      {"/post_processor", R"({"type": "BertProcessing"})",
       "post_processor.type must be one of"},
      {"/added_tokens", "{}", "added_tokens must be an array"},
      {"/added_tokens/0/id", "-3", "added_tokens[0].id must be an id in"},
      {"/added_tokens/0/id", "999999999", "added_tokens[0].id must be an id"},
      {"/added_tokens/0/content", "null",
       "added_tokens[0].content must be a string but got null"},
      {"/added_tokens/0/special", "1",
       "added_tokens[0].special must be true or false but got 1"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(error_with(test.pointer, test.value), HasSubstr(test.message))
        << test.pointer << " " << test.value;
  }
}

TEST(TokenizerJson, WhatIsNoJsonIsRefused) {
  for (const char* text :
       {"", "{", "nul", "[1]", "\xFF", "{\"model\": \"\xFF\"}"}) {
    EXPECT_THAT(error_of([&] { make_json_tokenizer(text, {}, "t.json"); }),
                HasSubstr("[load_tokenizer] t.json: "))
        << text;
  }
  // Nesting alone must not exhaust the stack.
  const std::string deep(1'000'000, '[');
  EXPECT_THAT(error_of([&] { make_json_tokenizer(deep); }),
              HasSubstr("must be JSON but"));
  EXPECT_THAT(error_of([&] {
                make_json_tokenizer(small().dump() + std::string("\0{", 2));
              }),
              HasSubstr("must be JSON but byte "));
  json nested = json::parse(R"({"type": "ByteLevel"})");
  for (int i = 0; i < 1000; ++i) {
    nested = json{{"type", "Sequence"}, {"pretokenizers", {nested}}};
  }
  json document = small();
  document["pre_tokenizer"] = nested;
  EXPECT_THAT(error_of([&] { make(document); }),
              HasSubstr("must be a component nested less deeply"));
}

TEST(TokenizerJson, AHugePatternOrASlowOneIsRefused) {
  EXPECT_THAT(
      error_with("/pre_tokenizer",
                 json{{"type", "Split"},
                      {"pattern", {{"Regex", std::string(20'000, 'a')}}},
                      {"behavior", "Isolated"}}
                     .dump()
                     .c_str()),
      HasSubstr("a pattern must have at most 16384 bytes but got 20000"));
  json document = small();
  document["pre_tokenizer"] = json::parse(R"({"type": "Sequence",
      "pretokenizers": [{"type": "Split", "behavior": "Isolated",
                         "pattern": {"Regex": "(?:a|a)*(?:a|a)*[cd]"}},
                        {"type": "ByteLevel"}]})");
  const TokenizerPtr tokenizer = make(document);
  EXPECT_THAT(error_of([&] { tokenizer->encode(std::string(5000, 'a')); }),
              HasSubstr("must match within bounds but"));
}

TEST(TokenizerJson, SplitsBehaveAsTheyAreCalled) {
  struct Case {
    const char* behavior;
    bool invert;
    std::vector<std::string> words;
  };
  // The words of "a  bb c", cut at spaces; no merges, so a word shows by what
  // ignore_merges finds.
  const std::vector<Case> cases = {
      {"Isolated", false, {"a", " ", " ", "bb", " ", "c"}},
      {"Removed", false, {"a", "bb", "c"}},
      {"MergedWithPrevious", false, {"a ", " ", "bb ", "c"}},
      {"MergedWithNext", false, {"a", " ", " bb", " c"}},
      {"Contiguous", false, {"a", "  ", "bb", " ", "c"}},
      {"Removed", true, {" ", " ", " "}},
  };
  for (const Case& test : cases) {
    json document = small();
    document["model"] =
        json::parse(R"({"vocab": {}, "merges": [], "ignore_merges": true})");
    int id = 0;
    for (const char* word :
         {"a", "b", "c", "Ġ", "bb", "aĠ", "bbĠ", "Ġbb", "Ġc", "ĠĠ"}) {
      document["model"]["vocab"][word] = id++;
    }
    document["added_tokens"] = json::array();
    document["pre_tokenizer"] = json{{"type", "Sequence"},
                                     {"pretokenizers",
                                      {{{"type", "Split"},
                                        {"pattern", {{"String", " "}}},
                                        {"behavior", test.behavior},
                                        {"invert", test.invert}},
                                       {{"type", "ByteLevel"},
                                        {"add_prefix_space", false},
                                        {"use_regex", false}}}}};
    const TokenizerPtr tokenizer = make(document);
    std::vector<std::string> words;
    for (const int64_t token : tokenizer->encode("a  bb c")) {
      words.emplace_back(tokenizer->token_bytes(token));
    }
    EXPECT_EQ(words, test.words) << test.behavior << " " << test.invert;
  }
}

TEST(TokenizerJson, TheConfigurationNamesTheRoles) {
  json document = small();
  document["added_tokens"].push_back(
      {{"id", 5}, {"content", "<begin>"}, {"special", true}});
  const TokenizerPtr tokenizer =
      make(document, R"({"bos_token": {"content": "<begin>"},
                         "eos_token": "<end>", "add_bos_token": true})");
  EXPECT_EQ(tokenizer->bos_id(), 5);
  EXPECT_EQ(tokenizer->eos_id(), 3);
  EXPECT_EQ(tokenizer->special_ids().ends, Ids{3});
  EXPECT_EQ(tokenizer->encode("a", {.add_bos = true, .add_eos = true}),
            (Ids{5, 0}));
  EXPECT_THAT(error_of([&] { make(document, R"({"eos_token": 5})"); }),
              HasSubstr("tokenizer_config.json: eos_token must be a string"));
  EXPECT_THAT(error_of([&] { make(document, R"({"add_bos_token": "x"})"); }),
              HasSubstr("add_bos_token must be true or false but got \"x\""));
}

TEST(TokenizerJson, ATemplateAroundATextIsItsBeginAndEnd) {
  json document = small();
  document["post_processor"] = json::parse(R"({"type": "TemplateProcessing",
      "single": [{"Sequence": {"id": "A", "type_id": 0}},
                 {"SpecialToken": {"id": "<end>", "type_id": 0}}],
      "special_tokens": {"<end>": {"id": "<end>", "ids": [3],
                                   "tokens": ["<end>"]}}})");
  EXPECT_EQ(make(document)->encode("a", {.add_bos = true, .add_eos = true}),
            (Ids{0, 3}));
  document["post_processor"]["special_tokens"]["<end>"]["ids"] = {77};
  EXPECT_THAT(error_of([&] { make(document); }),
              HasSubstr("the end token must be an id in [0, 5) but got 77"));
}

// Case K113: neither spelled out, nor by merges, nor as a whole word.
TEST(TokenizerJson, PlainTextNeverBecomesAControlToken) {
  json document = small();
  document["model"]["vocab"]["<"] = 5;
  document["model"]["vocab"]["e"] = 6;
  document["model"]["vocab"]["<e"] = 7;
  document["model"]["merges"] = {"a b", "< e"};
  document["model"]["ignore_merges"] = true;
  document["added_tokens"].push_back(
      {{"id", 7}, {"content", "<e"}, {"special", true}});
  document["added_tokens"].push_back(
      {{"id", 1}, {"content", "b"}, {"special", true}});
  const TokenizerPtr tokenizer = make(document);
  for (const char* text : {"<e", "<end>", "ab", "b", "a b"}) {
    for (const int64_t id : tokenizer->encode(text)) {
      EXPECT_FALSE(tokenizer->is_control(id)) << text;
    }
  }
  EXPECT_EQ(tokenizer->encode("<e", {.special = true}), Ids{7});
}

TEST(TokenizerJson, PartsAreOneText) {
  const TokenizerPtr tokenizer = make(small());
  const std::vector<TextPart> parts = {{.text = "a", .special = true},
                                       {.text = "b", .special = false},
                                       {.text = "<end>", .special = false},
                                       {.text = "<end>", .special = true}};
  const Ids ids = tokenizer->encode(parts);
  EXPECT_EQ(ids.front(), 2);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 3), 1);
}

TEST(TokenizerJson, AByteWithoutATokenIsTheUnknownToken) {
  json document = small();
  document["model"]["vocab"]["?"] = 5;
  document["model"]["unk_token"] = "?";
  EXPECT_EQ(make(document)->encode("axxb"), (Ids{0, 5, 5, 1}));
  document["model"]["fuse_unk"] = true;
  EXPECT_EQ(make(document)->encode("axxb"), (Ids{0, 5, 1}));
  document["model"]["unk_token"] = "<end>";  // a control token: left out
  EXPECT_EQ(make(document)->encode("axxb"), (Ids{2}));
}

class TokenizerFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("kvcache_text_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const char* name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  std::filesystem::path folder_;
};

TEST_F(TokenizerFolder, IsReadWithItsConfiguration) {
  write("tokenizer.json", small().dump());
  write("tokenizer_config.json", R"({"eos_token": "<end>"})");
  EXPECT_EQ(load_tokenizer(folder_)->eos_id(), 3);
  EXPECT_EQ(load_tokenizer(folder_ / "tokenizer.json")->eos_id(), 3);
}

TEST_F(TokenizerFolder, SentencePieceIsTakenWhereTheJsonIsNoByteLevelBpe) {
  if (!has_sentencepiece()) GTEST_SKIP() << "built without sentencepiece";
  write("tokenizer.model", read_file(data_path("sentencepiece_bpe.model")));
  EXPECT_EQ(load_tokenizer(folder_)->vocab_size(), 480);
  EXPECT_EQ(load_tokenizer(folder_ / "tokenizer.model")->vocab_size(), 480);
  json other = small();
  other["pre_tokenizer"] = {{"type", "Metaspace"}};
  write("tokenizer.json", other.dump());
  EXPECT_EQ(load_tokenizer(folder_)->vocab_size(), 480);
}

TEST_F(TokenizerFolder, WhatIsMissingIsNamed) {
  const std::string path = folder_.string();
  EXPECT_EQ(error_of([&] { load_tokenizer(folder_); }),
            "[load_tokenizer] " + path +
                ": must hold tokenizer.json or tokenizer.model but has "
                "neither; pass the folder of a model.");
  EXPECT_EQ(error_of([&] { load_tokenizer(folder_ / "x.gguf"); }),
            "[load_tokenizer] " + path +
                "/x.gguf: must be a file or folder but there is none; check "
                "the path.");
  write("x.gguf", "GGUF");
  EXPECT_THAT(error_of([&] { load_tokenizer(folder_ / "x.gguf"); }),
              HasSubstr("x.gguf"));
}

}  // namespace
}  // namespace kvcache::model::test
