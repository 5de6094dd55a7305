// added_tokens.cpp - finds whole tokens in a text, before it is cut into words.

#include "added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "utf8.h"

namespace kvcache::model {
namespace {

// The character that ends before `at`, or begins at it; 0 where there is none.
uint32_t character_before(std::string_view text, size_t at) {
  for (size_t length = 1; length <= std::min<size_t>(4, at); ++length) {
    const Utf8Step step = utf8_step(text, at - length);
    if (step.valid && step.length == length) return step.codepoint;
  }
  return 0;
}

uint32_t character_at(std::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  const Utf8Step step = utf8_step(text, at);
  return step.valid ? step.codepoint : 0;
}

bool is_white_space(uint32_t c) {
  if (c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85) return true;
  const utf8proc_category_t category =
      utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

bool is_word_character(uint32_t c) {
  if (c == 0) return false;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;  // joiners
  }
}

size_t white_space_begin(std::string_view text, size_t at, size_t limit) {
  while (at > limit) {
    const uint32_t c = character_before(text, at);
    if (c == 0 || !is_white_space(c)) break;
    std::string bytes;
    append_utf8(bytes, c);
    if (at - limit < bytes.size()) break;
    at -= bytes.size();
  }
  return at;
}

size_t white_space_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Step step = utf8_step(text, at);
    if (!step.valid || !is_white_space(step.codepoint)) break;
    at += step.length;
  }
  return at;
}

constexpr std::array<std::string_view, 6> kTurnEnds = {
    "<|eot_id|>",    "<|im_end|>", "<|end|>",
    "<end_of_turn>", "<|eot|>",    "<turn|>"};
constexpr std::array<std::string_view, 5> kTextEnds = {
    "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "<\xEF\xBD\x9C"
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names,
              std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool looks_like_control(std::string_view text) {
  const auto between = [&](std::string_view open, std::string_view close) {
    return text.size() > open.size() + close.size() && text.starts_with(open) &&
           text.ends_with(close);
  };
  // The second pair has U+FF5C for a bar.
  return between("<|", "|>") || between("<\xEF\xBD\x9C", "\xEF\xBD\x9C>") ||
         text == "<start_of_turn>" || text == "<end_of_turn>";
}

void complete_special_ids(const std::vector<AddedToken>& tokens,
                          SpecialIds& ids) {
  for (const AddedToken& token : tokens) {
    if (!token.control) continue;
    const bool ends_turn = contains(kTurnEnds, token.text);
    if (ends_turn && !ids.eot) ids.eot = token.id;
    if (ends_turn || contains(kTextEnds, token.text)) {
      ids.ends.push_back(token.id);
    }
  }
  if (ids.eos) ids.ends.push_back(*ids.eos);
  if (ids.eot) ids.ends.push_back(*ids.eot);
  std::sort(ids.ends.begin(), ids.ends.end());
  ids.ends.erase(std::unique(ids.ends.begin(), ids.ends.end()), ids.ends.end());
}

AddedTokens::AddedTokens(const std::vector<AddedToken>& tokens)
    : token_at_(1, -1) {
  for (const AddedToken& token : tokens) {
    if (token.text.empty()) continue;
    insert(token.text, tokens_.size());
    tokens_.push_back(token);
  }
}

void AddedTokens::insert(std::string_view text, size_t token) {
  first_.set(static_cast<uint8_t>(text[0]));
  uint32_t node = 0;
  for (const char byte : text) {
    const uint64_t key = uint64_t{node} << 8 | static_cast<uint8_t>(byte);
    const auto [found, added] =
        next_.try_emplace(key, static_cast<uint32_t>(token_at_.size()));
    if (added) token_at_.push_back(-1);
    node = found->second;
  }
  token_at_[node] = static_cast<int64_t>(token);
}

// The longest token at `at` that its flags let stand there.
AddedTokens::Match AddedTokens::match_at(std::string_view text,
                                         std::string_view special,
                                         size_t at) const {
  Match best;
  uint32_t node = 0;
  bool all_special = !special.empty();
  for (size_t i = at; i < text.size(); ++i) {
    const auto found =
        next_.find(uint64_t{node} << 8 | static_cast<uint8_t>(text[i]));
    if (found == next_.end()) break;
    node = found->second;
    all_special = all_special && special[i] != 0;
    if (token_at_[node] < 0) continue;
    const AddedToken& token = tokens_[static_cast<size_t>(token_at_[node])];
    if (token.control && !all_special) continue;
    if (token.single_word && (is_word_character(character_before(text, at)) ||
                              is_word_character(character_at(text, i + 1)))) {
      continue;
    }
    best = {.token = &token, .begin = at, .end = i + 1};
  }
  return best;
}

void AddedTokens::split(std::string_view text, std::string_view special,
                        const std::function<void(size_t, size_t)>& plain,
                        const std::function<void(int64_t)>& token) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    Match match;
    if (first_.test(static_cast<uint8_t>(text[at]))) {
      match = match_at(text, special, at);
    }
    if (match.token == nullptr) {
      ++at;
      continue;
    }
    if (match.token->lstrip) {
      match.begin = white_space_begin(text, match.begin, done);
    }
    if (match.token->rstrip) match.end = white_space_end(text, match.end);
    if (match.begin > done) plain(done, match.begin);
    token(match.token->id);
    done = at = match.end;
  }
  if (done < text.size()) plain(done, text.size());
}

}  // namespace kvcache::model
