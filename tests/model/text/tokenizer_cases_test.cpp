// Ids against those of Hugging Face tokenizers and sentencepiece, for hundreds
// of hard strings and each family of pre-tokenizer (case K96).

#include <gtest/gtest.h>

#include <random>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

void expect_ids(const Tokenizer& tokenizer,
                const std::vector<std::string>& strings,
                const nlohmann::json& expected) {
  for (const bool special : {false, true}) {
    const nlohmann::json& ids = expected[special ? "special" : "plain"];
    ASSERT_EQ(ids.size(), strings.size());
    for (size_t i = 0; i < strings.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(strings[i], {.special = special}),
                ids[i].get<Ids>())
          << testing::PrintToString(strings[i]) << " special " << special;
    }
  }
}

struct Family {
  const char* name;
  const char* pre;
};

void PrintTo(const Family& family, std::ostream* out) { *out << family.name; }

class TokenizerFamily : public testing::TestWithParam<Family> {};

TEST_P(TokenizerFamily, JsonGivesTheIdsOfHuggingFace) {
  const std::string name = GetParam().name;
  expect_ids(*family_tokenizer(name), texts(), read_json(name + "_ids.json"));
}

TEST_P(TokenizerFamily, GgufGivesTheSameIds) {
  const std::string name = GetParam().name;
  expect_ids(*make_tokenizer(family_vocabulary(name, GetParam().pre)), texts(),
             read_json(name + "_ids.json"));
}

INSTANTIATE_TEST_SUITE_P(
    , TokenizerFamily,
    testing::Values(Family{"gpt2", "gpt-2"}, Family{"smollm", "smollm"},
                    Family{"llama3", "llama-bpe"}, Family{"qwen2", "qwen2"},
                    Family{"qwen35", "qwen35"}),
    [](const auto& info) { return std::string(info.param.name); });

// These have a token for every byte and normalise nothing; SmolLM2 lacks some
// bytes, and Qwen2 normalises.
constexpr const char* kLossless[] = {"gpt2", "llama3"};

TEST(Tokenizer, IdsOfATextGiveTheTextBack) {
  for (const char* family : kLossless) {
    const TokenizerPtr tokenizer = family_tokenizer(family);
    for (const std::string& text : texts()) {
      for (const bool special : {false, true}) {
        EXPECT_EQ(
            tokenizer->decode(tokenizer->encode(text, {.special = special})),
            text);
      }
    }
  }
}

TEST(Tokenizer, RandomBytesComeBack) {
  std::mt19937 random(7);
  for (const char* family : kLossless) {
    const TokenizerPtr tokenizer = family_tokenizer(family);
    for (int round = 0; round < 300; ++round) {
      const std::string text = random_bytes(random, random() % 64);
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
    }
  }
}

TEST(Tokenizer, Qwen2NormalisesAndKeepsWhatIsNotUtf8) {
  const TokenizerPtr tokenizer = family_tokenizer("qwen2");
  const auto again = [&](const char* text) {
    return tokenizer->decode(tokenizer->encode(text));
  };
  EXPECT_EQ(again("e\xCC\x81"), "\xC3\xA9");
  EXPECT_EQ(again("e\xCC\x81\xFF\x80 e\xCC"), "\xC3\xA9\xFF\x80 e\xCC");
}

// Hugging Face's tokenizers do the same: there is no id to give.
TEST(Tokenizer, AByteThatTheVocabularyLacksIsLeftOut) {
  const TokenizerPtr tokenizer = family_tokenizer("smollm");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("a\x04z\xFF")), "az");
}

TEST(Tokenizer, AddedTokensObeyTheirFlags) {
  const nlohmann::json expected = read_json("flags_ids.json");
  expect_ids(*family_tokenizer("flags"),
             expected["texts"].get<std::vector<std::string>>(), expected);
}

TEST(Tokenizer, SmolLm2GivesTheIdsOfHuggingFace) {
  const auto path = smollm2_path();
  if (!path) GTEST_SKIP() << "SmolLM2 is not there; fetch the weights first";
  expect_ids(*load_tokenizer(*path), texts(), read_json("smollm2_ids.json"));
}

TEST(Tokenizer, FamiliesDifferWhereTheyShould) {
  const auto count = [](const char* family, const char* text) {
    return family_tokenizer(family)->encode(text).size();
  };
  EXPECT_EQ(count("smollm", "12345"), 5u);
  EXPECT_EQ(count("qwen2", "12345"), 5u);
  EXPECT_LT(count("gpt2", "12345"), 5u);
  EXPECT_LT(count("llama3", "12345"), 5u);
}

}  // namespace
}  // namespace kvcache::model::test
