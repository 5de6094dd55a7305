// byte_pairs.cpp - the merge loop of byte-pair encoding.

#include "byte_pairs.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <tuple>

namespace kvcache::model {
namespace {

uint64_t key_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 |
         static_cast<uint32_t>(right);
}

// A pair that may merge. It is stale once the pair at its place no longer
// becomes `token`.
struct Candidate {
  uint32_t rank = 0;
  uint32_t place = 0;  // of the left symbol
  int32_t token = kNoToken;

  bool operator>(const Candidate& other) const {
    return std::tie(rank, place) > std::tie(other.rank, other.place);
  }
};

struct Symbol {
  int32_t token = kNoToken;
  int32_t previous = -1, next = -1;  // places; -1: none
  bool fixed = false;                // unknown: merges with nothing
};

// One word while its pairs merge.
class Word {
 public:
  Word(const BytePairs& pairs, std::string_view bytes) : pairs_(pairs) {
    symbols_.reserve(bytes.size());
    for (const char byte : bytes) add(pairs.bytes[static_cast<uint8_t>(byte)]);
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) {
      symbols_[i].next = static_cast<int32_t>(i + 1);
      symbols_[i + 1].previous = static_cast<int32_t>(i);
    }
  }

  void merge() {
    for (size_t i = 0; i + 1 < symbols_.size(); ++i) offer(i);
    while (!heap_.empty()) {
      const Candidate best = heap_.top();
      heap_.pop();
      take(best);
    }
  }

  void append_to(std::vector<int64_t>& ids) const {
    // The first symbol is never merged into another.
    for (int32_t i = symbols_.empty() ? -1 : 0; i >= 0; i = symbols_[i].next) {
      ids.push_back(symbols_[i].token);
    }
  }

 private:
  void add(int32_t token) {
    if (token != kNoToken) {
      symbols_.push_back({.token = token});
    } else if (pairs_.unknown && !(pairs_.fuse_unknown && !symbols_.empty() &&
                                   symbols_.back().fixed)) {
      symbols_.push_back({.token = *pairs_.unknown, .fixed = true});
    }
  }

  // What the symbol at `place` and its successor become.
  const Merge* merge_at(size_t place) const {
    const Symbol& left = symbols_[place];
    if (left.token == kNoToken || left.next < 0) return nullptr;
    const Symbol& right = symbols_[left.next];
    if (left.fixed || right.fixed) return nullptr;
    return pairs_.merges.find(left.token, right.token);
  }

  void offer(size_t place) {
    const Merge* merge = merge_at(place);
    if (merge == nullptr) return;
    heap_.push({merge->rank, static_cast<uint32_t>(place), merge->token});
  }

  void take(const Candidate& best) {
    const Merge* merge = merge_at(best.place);
    if (merge == nullptr || merge->token != best.token) return;
    Symbol& left = symbols_[best.place];
    Symbol& right = symbols_[left.next];
    left.token = best.token;
    right.token = kNoToken;
    left.next = right.next;
    if (left.next >= 0) {
      symbols_[left.next].previous = static_cast<int32_t>(best.place);
      offer(best.place);
    }
    if (left.previous >= 0) offer(static_cast<size_t>(left.previous));
  }

  const BytePairs& pairs_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap_;
};

}  // namespace

MergeTable::MergeTable(size_t merges)
    : slots_(std::bit_ceil(std::max<size_t>(merges, 4) * 2)) {}

// Where `key` is, or the free slot where it belongs.
size_t MergeTable::place_of(uint64_t key) const noexcept {
  const size_t mask = slots_.size() - 1;
  // Fibonacci hashing; the upper bits are the well-mixed ones.
  size_t place = (key * 0x9E3779B97F4A7C15u) >> 32 & mask;
  while (slots_[place].key != kFree && slots_[place].key != key) {
    place = (place + 1) & mask;
  }
  return place;
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  Slot& slot = slots_[place_of(key_of(left, right))];
  slot = {key_of(left, right), merge};
}

const Merge* MergeTable::find(int32_t left, int32_t right) const noexcept {
  const Slot& slot = slots_[place_of(key_of(left, right))];
  return slot.key == kFree ? nullptr : &slot.merge;
}

void BytePairs::encode(std::string_view word, std::vector<int64_t>& ids) const {
  Word symbols(*this, word);
  symbols.merge();
  symbols.append_to(ids);
}

}  // namespace kvcache::model
