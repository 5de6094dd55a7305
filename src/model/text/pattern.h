// pattern.h - a Unicode regular expression, as pre-tokenizers use them.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace kvcache::model {

// [begin, end) in a text.
struct Range {
  size_t begin = 0;
  size_t end = 0;
  bool matched = false;  // the pattern matched it, or it lies between matches
};

// A pattern in the dialect of Hugging Face's tokenizers (Oniguruma's Ruby
// syntax), compiled by PCRE2. Immutable, safe to share between threads.
//
// Errors: a pattern that does not compile, or that means something else to
// PCRE2, throws.
class Pattern {
 public:
  Pattern(std::string_view pattern, const std::string& source);

  // Cuts `text`, which must be valid UTF-8, into matches and what is between.
  // Empty matches are passed over. Appends to `ranges`, `offset` added.
  void split(std::string_view text, size_t offset,
             std::vector<Range>& ranges) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const noexcept;
  };

  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
};

// `pattern` in PCRE2's dialect: \s, \w and \d as Oniguruma understands them.
std::string to_pcre2(std::string_view pattern, const std::string& source);

// `text` as a pattern that matches just that.
std::string quote_pattern(std::string_view text);

}  // namespace kvcache::model
