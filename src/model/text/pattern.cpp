// pattern.cpp - a Unicode regular expression, by PCRE2.

#include "pattern.h"

#include <c10/util/Exception.h>

#include <array>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "utf8.h"

namespace kvcache::model {
namespace {

constexpr size_t kMaxPatternBytes = 16 << 10;

std::string error_text(int code) {
  std::array<PCRE2_UCHAR8, 256> text{};
  pcre2_get_error_message_8(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

struct FreeMatchData {
  void operator()(pcre2_match_data_8* data) const noexcept {
    pcre2_match_data_free_8(data);
  }
};
using MatchData = std::unique_ptr<pcre2_match_data_8, FreeMatchData>;

// The next match that is not empty. What needs more than the stack of the
// compiled matcher goes to the interpreter, which PCRE2 bounds in steps and
// memory; the patterns of the known families never do, however long the text.
int match(const pcre2_code_8* code, std::string_view text, size_t at,
          const MatchData& data) {
  const auto run = [&](uint32_t options) {
    return pcre2_match_8(
        code, reinterpret_cast<PCRE2_SPTR8>(text.data()), text.size(), at,
        options | PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK, data.get(), nullptr);
  };
  const int found = run(0);
  return found == PCRE2_ERROR_JIT_STACKLIMIT ? run(PCRE2_NO_JIT) : found;
}

}  // namespace

// Oniguruma: \s is White_Space, \w is letters, marks, decimal digits and
// connectors, \h is a hexadecimal digit. PCRE2 differs in each.
std::string to_pcre2(std::string_view pattern, const std::string& source) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '\\' || i + 1 == pattern.size()) {
      if (c == '[' && !in_class) {
        in_class = true;
      } else if (c == ']') {
        in_class = false;
      }
      out += c;
      continue;
    }
    const char escaped = pattern[++i];
    constexpr std::string_view kWord = "\\p{L}\\p{M}\\p{Nd}\\p{Pc}";
    if (escaped == 's') {
      out += "\\p{White_Space}";
    } else if (escaped == 'S') {
      out += "\\P{White_Space}";
    } else if (escaped == 'w') {
      out += in_class ? std::string(kWord) : "[" + std::string(kWord) + "]";
    } else if (escaped == 'W' && !in_class) {
      out += "[^" + std::string(kWord) + "]";
    } else {
      TORCH_CHECK(
          escaped != 'h' && escaped != 'H' && escaped != 'W' && escaped != 'C',
          "[load_tokenizer] ", source, ": the pattern '", pattern,
          "' must not use \\", std::string(1, escaped),
          ", which is not supported; use another tokenizer file.");
      out += c;
      out += escaped;
    }
  }
  return out;
}

std::string quote_pattern(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       (c >= '0' && c <= '9') || (c & 0x80) != 0;
    if (!plain) out += '\\';
    out += c;
  }
  return out;
}

void Pattern::Free::operator()(pcre2_real_code_8* code) const noexcept {
  pcre2_code_free_8(code);
}

Pattern::Pattern(std::string_view pattern, const std::string& source)
    : pattern_(pattern) {
  TORCH_CHECK(pattern.size() <= kMaxPatternBytes, "[load_tokenizer] ", source,
              ": a pattern must have at most ", kMaxPatternBytes,
              " bytes but got ", pattern.size(), "; the file is broken.");
  TORCH_CHECK(valid_run_end(pattern, 0) == pattern.size(), "[load_tokenizer] ",
              source, ": a pattern must be UTF-8; the file is broken.");
  const std::string text = to_pcre2(pattern, source);
  int error = 0;
  PCRE2_SIZE where = 0;
  // Ruby's ^ and $ match at every line.
  code_ = {
      pcre2_compile_8(
          reinterpret_cast<PCRE2_SPTR8>(text.data()), text.size(),
          PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
          &error, &where, nullptr),
      Free{}};
  TORCH_CHECK(code_ != nullptr, "[load_tokenizer] ", source, ": the pattern '",
              pattern_, "' must be a regular expression but ",
              error_text(error), " at byte ", where,
              "; use another tokenizer file.");
  // Where there is no JIT, the same pattern is interpreted.
  pcre2_jit_compile_8(code_.get(), PCRE2_JIT_COMPLETE);
}

void Pattern::split(std::string_view text, size_t offset,
                    std::vector<Range>& ranges) const {
  // Room for the whole match only: groups are of no interest.
  const MatchData data(pcre2_match_data_create_8(1, nullptr));
  const PCRE2_SIZE* place = pcre2_get_ovector_pointer_8(data.get());
  size_t done = 0;  // text before it is in `ranges`
  while (done < text.size()) {
    const int found = match(code_.get(), text, done, data);
    if (found == PCRE2_ERROR_NOMATCH) break;
    TORCH_CHECK(found >= 0, "[Tokenizer::encode] the pattern '", pattern_,
                "' must match within bounds but ", error_text(found),
                " in a text of ", text.size(),
                " bytes; use another tokenizer file.");
    const size_t begin = place[0];
    const size_t end = place[1];
    // \K may put the start before what is done already.
    TORCH_CHECK(begin >= done && end > begin,
                "[Tokenizer::encode] the pattern '", pattern_,
                "' must match forwards but got bytes ", begin, " to ", end,
                "; use another tokenizer file.");
    if (begin > done) ranges.push_back({offset + done, offset + begin, false});
    ranges.push_back({offset + begin, offset + end, true});
    done = end;
  }
  if (done < text.size()) {
    ranges.push_back({offset + done, offset + text.size(), false});
  }
}

}  // namespace kvcache::model
