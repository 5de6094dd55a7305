// What of the index serves a request, and why no more does.
#pragma once

#include <cstdint>
#include <optional>

#include "text_index.h"

namespace kvcache::store {

struct Wanted {
  std::optional<int32_t> route = {};  // empty: any; -1: one that no text has
  uint64_t generation = 0;
  std::optional<int32_t> layout = {};
  int64_t limit = 0;          // deepest position
  bool final_hidden = false;  // or all tokens, where their hidden state is
  int64_t min_prefix = 0;
};

struct Found {
  Text* text = nullptr;
  int64_t position = 0;
  LookupReport report = {};  // all but `computed`
};

// `others`: there are texts, maybe in other roots.
Found search(const Root* root, const TextIndex& index, const Match& match,
             const Key& key, const Wanted& wanted, bool others);

}  // namespace kvcache::store
