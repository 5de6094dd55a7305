// Stop strings: the text ends before the earliest one, and nothing of one is
// ever shown (case K101).

#include "kvcache/model/stop_strings.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvcache::model {
namespace {

using Strings = std::vector<std::string>;

struct Shown {
  Strings pieces;  // one a push, and one of finish()
  std::optional<std::string> matched;
};

Shown run(const Strings& stops, const Strings& pieces) {
  StopStrings filter(stops);
  Shown shown;
  for (const std::string& piece : pieces) {
    shown.pieces.push_back(filter.push(piece));
  }
  shown.pieces.push_back(filter.finish());
  shown.matched = filter.matched();
  EXPECT_EQ(filter.stopped(), filter.matched().has_value());
  return shown;
}

std::string text_of(const Shown& shown) {
  std::string text;
  for (const std::string& piece : shown.pieces) text += piece;
  return text;
}

TEST(StopStrings, NothingOfAStopIsShownBeforeItIsCertain) {
  const Shown shown = run({"DEFGHIJ"}, {"ABC", "DEF", "G", "HI", "J", "more"});
  EXPECT_EQ(shown.pieces, (Strings{"ABC", "", "", "", "", "", ""}));
  EXPECT_EQ(shown.matched, "DEFGHIJ");
}

TEST(StopStrings, AStopOverThreeTokens) {
  const Shown shown =
      run({"beta gamma"}, {"alpha ", "be", "ta ga", "mma", " delta"});
  EXPECT_EQ(text_of(shown), "alpha ");
  EXPECT_EQ(shown.matched, "beta gamma");
}

TEST(StopStrings, AStopInsideATokenWithTextAfter) {
  const Shown shown = run({"STOP"}, {"one STOP two", "three"});
  EXPECT_EQ(text_of(shown), "one ");
}

TEST(StopStrings, AFalseStartIsShownAsSoonAsItIsOne) {
  const Shown shown = run({"abcd"}, {"x", "abc", "e", "ab"});
  EXPECT_EQ(shown.pieces, (Strings{"x", "", "abce", "", "ab"}));
  EXPECT_EQ(shown.matched, std::nullopt);
}

TEST(StopStrings, AFalseStartMayHoldTheTrueOne) {
  EXPECT_EQ(text_of(run({"aab"}, {"a", "a", "a", "b"})), "a");
  EXPECT_EQ(text_of(run({"abab!"}, {"ab", "ab", "ab", "!"})), "ab");
}

TEST(StopStrings, OneThatIsAPrefixOfAnother) {
  for (const Strings& stops : {Strings{"ab", "abc"}, Strings{"abc", "ab"}}) {
    const Shown shown = run(stops, {"xa", "b", "c"});
    EXPECT_EQ(text_of(shown), "x");
    EXPECT_EQ(shown.matched, "ab");
  }
}

TEST(StopStrings, TheOneThatStartsEarliestCounts) {
  // "b" is complete first, but lies within "abc".
  EXPECT_EQ(text_of(run({"b", "abc"}, {"xa", "b", "c"})), "x");
  EXPECT_EQ(run({"b", "abc"}, {"xabc"}).matched, "abc");
  // Here "abc" turns out to be none.
  EXPECT_EQ(text_of(run({"b", "abc"}, {"xa", "b", "d"})), "xa");
  EXPECT_EQ(text_of(run({"b", "abc"}, {"xa", "b"})), "xa");
  EXPECT_EQ(run({"b", "abc"}, {"xa", "b"}).matched, "b");
}

TEST(StopStrings, WhatIsHeldBackComesAtTheEnd) {
  EXPECT_EQ(run({"stop"}, {"sto"}).pieces, (Strings{"", "sto"}));
  EXPECT_EQ(run({}, {"a", "b"}).pieces, (Strings{"a", "b", ""}));
  EXPECT_EQ(run({"x"}, {}).pieces, (Strings{""}));
}

TEST(StopStrings, CharactersAreNotCutByAnotherThatStartsAlike) {
  // Both characters begin with the byte C3.
  EXPECT_EQ(run({"\xC3\xA9"}, {"\xC3\xA8", "\xC3\xA9"}).pieces,
            (Strings{"\xC3\xA8", "", ""}));
}

TEST(StopStrings, AnEmptyStopIsRefused) {
  try {
    StopStrings({"a", ""});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_STREQ(
        error.what_without_backtrace(),
        "[StopStrings] a stop string must not be empty; leave it out.");
  }
}

// What the whole text at once gives.
std::string expected_text(const Strings& stops, const std::string& text) {
  size_t end = text.size();
  for (const std::string& stop : stops) end = std::min(end, text.find(stop));
  return text.substr(0, end);
}

TEST(StopStrings, EqualsTheSearchInTheWholeText) {
  std::mt19937 random(17);
  const auto word = [&](size_t most) {
    std::string text;
    for (size_t size = 1 + random() % most; text.size() < size;) {
      text += static_cast<char>('a' + random() % 2);
    }
    return text;
  };
  for (int round = 0; round < 20'000; ++round) {
    Strings stops;
    for (size_t count = random() % 4; stops.size() < count;) {
      stops.push_back(word(5));
    }
    Strings pieces;
    std::string text;
    for (size_t count = random() % 8; pieces.size() < count;) {
      pieces.push_back(word(4));
      text += pieces.back();
    }
    const Shown shown = run(stops, pieces);
    EXPECT_EQ(text_of(shown), expected_text(stops, text));
    std::string so_far;
    for (const std::string& piece : shown.pieces) so_far += piece;
    EXPECT_EQ(shown.matched.has_value(), expected_text(stops, text) != text);
  }
}

TEST(StopStrings, LongTextsAndStopsAreLinear) {
  // Not in the braces: GCC 12 warns of a copy of so long a text there.
  std::string long_stop(50'000, 'a');
  long_stop += 'b';
  StopStrings filter({long_stop, "ab"});
  size_t shown = 0;
  for (int i = 0; i < 200'000; ++i) shown += filter.push("a").size();
  shown += filter.push("c").size() + filter.finish().size();
  EXPECT_EQ(shown, 200'001u);
}

}  // namespace
}  // namespace kvcache::model
