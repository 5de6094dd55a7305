// byte_pairs.h - the merge loop of byte-pair encoding.
//
// The pair with the lowest rank merges first, the leftmost of equals, until no
// known pair is left: the order of Hugging Face's tokenizers. A heap of pairs
// over a linked list of symbols makes it O(n log n) for a word of n bytes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace kvcache::model {

inline constexpr int32_t kNoToken = -1;

// What a pair of tokens becomes.
struct Merge {
  uint32_t rank = 0;  // the lower, the earlier
  int32_t token = kNoToken;
};

// (left, right) -> Merge; open addressing over a power of two.
class MergeTable {
 public:
  explicit MergeTable(size_t merges);
  // The last merge of a pair counts.
  void insert(int32_t left, int32_t right, Merge merge);
  const Merge* find(int32_t left, int32_t right) const noexcept;

 private:
  struct Slot {
    uint64_t key = kFree;
    Merge merge;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};

  size_t place_of(uint64_t key) const noexcept;

  std::vector<Slot> slots_;
};

// Token of every single byte; kNoToken where the vocabulary has none.
using ByteTokens = std::array<int32_t, 256>;

// Appends the tokens of `word`. A byte without a token becomes `unknown`, a run
// of them once if `fuse_unknown`, or nothing.
struct BytePairs {
  ByteTokens bytes{};
  MergeTable merges;
  std::optional<int32_t> unknown = {};
  bool fuse_unknown = false;

  void encode(std::string_view word, std::vector<int64_t>& ids) const;
};

}  // namespace kvcache::model
