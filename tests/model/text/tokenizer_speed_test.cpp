// Encoding is near-linear whatever the text (case K98).

#include <gtest/gtest.h>

#include <ctime>
#include <random>

#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {
namespace {

constexpr size_t kLong = 100'000;
// The sanitizers slow it down; a quadratic loop would take minutes.
constexpr double kMostSeconds = 1.0;
#if defined(__SANITIZE_ADDRESS__)  // g++
constexpr double kSlower = 20;
#elif defined(__clang__)
constexpr double kSlower = __has_feature(address_sanitizer) ? 20 : 1;
#else
constexpr double kSlower = 1;
#endif

std::string repeat(std::string_view unit, size_t times) {
  std::string text;
  for (size_t i = 0; i < times; ++i) text += unit;
  return text;
}

std::string random_text(size_t size, std::string_view alphabet) {
  std::mt19937 random(3);
  std::string text;
  for (size_t i = 0; i < size; ++i)
    text += alphabet[random() % alphabet.size()];
  return text;
}

// 50,000 different CJK characters, and some that the training text had.
std::string cjk_text() {
  std::string text;
  for (uint32_t i = 0; i < 50'000; ++i) {
    const uint32_t c = 0x4E00 + i * 7919 % 20'000;
    text += static_cast<char>(0xE0 | c >> 12);
    text += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    text += static_cast<char>(0x80 | (c & 0x3F));
  }
  return text;
}

std::vector<std::pair<const char*, std::string>> long_texts() {
  return {
      {"a", repeat("a", kLong)},
      {"underscore", repeat("_", kLong)},
      {"space", repeat(" ", kLong)},
      {"space_then_letter", repeat(" ", kLong) + "x"},
      {"newline", repeat("\n", kLong)},
      {"space_newline", repeat(" \n", kLong / 2)},
      {"digit", repeat("7", kLong)},
      {"letters", random_text(kLong, "abcdefghijklmnopqrstuvwxyz")},
      {"two_letters", random_text(kLong, "ab")},
      {"bytes", random_text(kLong, "\x80\xBF\xC2\xE4\xF0\xFF")},
      {"cjk", cjk_text()},
      {"marks", "a" + repeat("\xCC\x81\xCC\xA3", kLong / 4)},
      {"apostrophe", repeat("'", kLong)},
      {"bar", repeat("<|", kLong / 2)},
  };
}

// Of this thread on the processor, so that other work does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds_of(const Tokenizer& tokenizer, const std::string& text,
                  bool special) {
  const double start = cpu_seconds();
  tokenizer.encode(text, {.special = special});
  return cpu_seconds() - start;
}

void expect_fast(const Tokenizer& tokenizer, const std::string& name) {
  for (const auto& [kind, text] : long_texts()) {
    for (const bool special : {false, true}) {
      EXPECT_LT(seconds_of(tokenizer, text, special), kMostSeconds * kSlower)
          << name << " " << kind;
    }
  }
}

TEST(TokenizerSpeed, LongTextsTakeUnderASecond) {
  for (const char* family : {"gpt2", "smollm", "llama3", "qwen2", "flags"}) {
    expect_fast(*family_tokenizer(family), family);
  }
}

TEST(TokenizerSpeed, LongTextsTakeUnderASecondWithSmolLm2) {
  const auto path = smollm2_path();
  if (!path) GTEST_SKIP() << "SmolLM2 is not there; fetch the weights first";
  expect_fast(*load_tokenizer(*path), "SmolLM2");
}

TEST(TokenizerSpeed, LongTextsTakeUnderASecondWithSentencePiece) {
  if (!has_sentencepiece()) GTEST_SKIP() << "built without sentencepiece";
  for (const char* name :
       {"sentencepiece_bpe.model", "sentencepiece_unigram.model"}) {
    expect_fast(*make_sentencepiece_tokenizer(read_file(data_path(name))),
                name);
  }
}

// Ten times the text takes ten times as long, a quadratic loop a hundred times.
// Between them there is room for a processor that changes its speed.
TEST(TokenizerSpeed, TenTimesTheTextIsFarFromAHundredTimesAsLong) {
  constexpr double kBetween = 50;
  const TokenizerPtr tokenizer = family_tokenizer("gpt2");
  const std::string text = repeat("a", 10 * kLong);
  const auto best_of_three = [&](size_t size) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      best =
          std::min(best, seconds_of(*tokenizer, text.substr(0, size), false));
    }
    return best;
  };
  EXPECT_LT(best_of_three(10 * kLong), kBetween * best_of_three(kLong));
}

}  // namespace
}  // namespace kvcache::model::test
