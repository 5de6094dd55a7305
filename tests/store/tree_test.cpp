// src/store/prefix_tree.h: how many nodes a walk goes through.
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "src/store/prefix_tree.h"
#include "src/store/text_index.h"

namespace kvcache::store {
namespace {

constexpr int64_t kTexts = 2000;
constexpr int64_t kLength = 300;

using Keys = std::vector<int32_t>;

class Forest {
 public:
  void add(const Keys& keys) {
    Text& text = texts_.emplace_back();
    text.id = texts_.size();
    text.end = &reach(top_, keys);
    text.depth = static_cast<int64_t>(keys.size());
    enter(*text.end, text.depth, text, text.variant);
    balance(*text.end);
  }
  size_t nodes_to(const Keys& keys) {
    const Match found = match(top_, keys);
    EXPECT_EQ(found.depth, static_cast<int64_t>(keys.size()));
    return found.path.size();
  }

 private:
  Node top_;
  std::deque<Text> texts_;
};

// Of text i, [0, shared) of all texts, then its own.
Keys keys_of(int64_t i, int64_t shared) {
  Keys keys(kLength);
  for (int64_t t = 0; t < kLength; ++t) {
    keys[t] = static_cast<int32_t>(t < shared ? t : 1000 + 7 * i + t % 7);
  }
  return keys;
}

// Wherever texts part, a walk has about as many nodes as the number of texts
// has binary digits: each leaves the one before it, later and later (a state
// that grows, with a question of its own each time); or anywhere.
TEST(PrefixTree, AWalkGoesThroughFewNodes) {
  std::mt19937 random(1);
  for (const bool growing : {true, false}) {
    Forest forest;
    std::vector<Keys> all;
    for (int64_t i = 0; i < kTexts; ++i) {
      const int64_t shared = growing ? i * kLength / kTexts
                                     : static_cast<int64_t>(random() % kLength);
      all.push_back(keys_of(i, shared));
      forest.add(all.back());
    }
    for (const Keys& keys : all) EXPECT_LE(forest.nodes_to(keys), 12U);
  }
}

}  // namespace
}  // namespace kvcache::store
