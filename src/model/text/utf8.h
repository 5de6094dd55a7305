// utf8.h - one step through bytes that may or may not be UTF-8.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvcache::model {

// What stands at one place of a byte string. Invalid bytes come in "maximal
// subparts" (Unicode 15, section 3.9), each of which is shown as one U+FFFD.
struct Utf8Step {
  size_t length = 0;       // bytes, at least 1
  uint32_t codepoint = 0;  // of a valid character
  bool valid = false;
  bool truncated = false;  // invalid only because the text ends here
};

// `at` must be within `text`.
Utf8Step utf8_step(std::string_view text, size_t at);

// End of the run of valid characters that starts at `at` (`at` itself if the
// first is invalid), and of the run of invalid bytes.
size_t valid_run_end(std::string_view text, size_t at);
size_t invalid_run_end(std::string_view text, size_t at);

void append_utf8(std::string& out, uint32_t codepoint);

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace kvcache::model
