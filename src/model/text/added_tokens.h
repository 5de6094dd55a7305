// added_tokens.h - finds whole tokens in a text, before it is cut into words.

#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

// A set of added tokens. Where several match, the leftmost counts, the longest
// of those (Hugging Face's rule).
class AddedTokens {
 public:
  // `tokens` with an empty text are passed over.
  explicit AddedTokens(const std::vector<AddedToken>& tokens);

  bool empty() const noexcept { return tokens_.empty(); }

  // Calls `plain(begin, end)` and `token(id)` in the order of the text. A
  // control token is found only where all bytes are `special`; an empty
  // `special` means that none is.
  void split(std::string_view text, std::string_view special,
             const std::function<void(size_t, size_t)>& plain,
             const std::function<void(int64_t)>& token) const;

 private:
  struct Match {
    const AddedToken* token = nullptr;
    size_t begin = 0, end = 0;
  };

  Match match_at(std::string_view text, std::string_view special,
                 size_t at) const;
  void insert(std::string_view text, size_t token);

  std::vector<AddedToken> tokens_;
  std::bitset<256> first_;  // bytes that a token may start with
  // The trie: (node << 8 | byte) -> node, and the token that ends at a node.
  std::unordered_map<uint64_t, uint32_t> next_;
  std::vector<int64_t> token_at_;  // index into tokens_, -1: none
};

// Spellings by which a token is taken for control whatever its file says: no
// one writes <|im_end|> by accident.
bool looks_like_control(std::string_view text);

// Completes the roles that a file leaves open, from the spelling of the control
// tokens: which one ends a turn, which ones end a generation.
void complete_special_ids(const std::vector<AddedToken>& tokens,
                          SpecialIds& ids);

}  // namespace kvcache::model
