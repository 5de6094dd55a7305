// utf8.cpp - one step through bytes that may or may not be UTF-8.

#include "utf8.h"

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {
namespace {

// The lead byte decides the length and narrows the second byte (Unicode 15,
// table 3-7).
struct Lead {
  size_t length = 1;
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xBF;
  uint32_t bits = 0;
};

Lead lead_of(uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF, byte & 0x1Fu};
  if (byte == 0xE0) return {3, 0xA0, 0xBF, 0};
  if (byte == 0xED) return {3, 0x80, 0x9F, byte & 0x0Fu};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF, byte & 0x0Fu};
  if (byte == 0xF0) return {4, 0x90, 0xBF, 0};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF, byte & 0x07u};
  if (byte == 0xF4) return {4, 0x80, 0x8F, 4};
  return {1, 0x80, 0xBF, 0};
}

}  // namespace

Utf8Step utf8_step(std::string_view text, size_t at) {
  const auto byte = static_cast<uint8_t>(text[at]);
  if (byte < 0x80) return {.length = 1, .codepoint = byte, .valid = true};
  const Lead lead = lead_of(byte);
  if (lead.length == 1) return {.length = 1};
  uint32_t codepoint = lead.bits;
  for (size_t i = 1; i < lead.length; ++i) {
    if (at + i >= text.size()) return {.length = i, .truncated = true};
    const auto next = static_cast<uint8_t>(text[at + i]);
    const uint8_t low = i == 1 ? lead.second_min : 0x80;
    const uint8_t high = i == 1 ? lead.second_max : 0xBF;
    if (next < low || next > high) return {.length = i};
    codepoint = codepoint << 6 | (next & 0x3Fu);
  }
  return {.length = lead.length, .codepoint = codepoint, .valid = true};
}

size_t valid_run_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Step step = utf8_step(text, at);
    if (!step.valid) break;
    at += step.length;
  }
  return at;
}

size_t invalid_run_end(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Step step = utf8_step(text, at);
    if (step.valid) break;
    at += step.length;
  }
  return at;
}

void append_utf8(std::string& out, uint32_t codepoint) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (codepoint < 0x80) {
    put(codepoint);
  } else if (codepoint < 0x800) {
    put(0xC0 | codepoint >> 6);
    put(0x80 | (codepoint & 0x3F));
  } else if (codepoint < 0x10000) {
    put(0xE0 | codepoint >> 12);
    put(0x80 | (codepoint >> 6 & 0x3F));
    put(0x80 | (codepoint & 0x3F));
  } else {
    put(0xF0 | codepoint >> 18);
    put(0x80 | (codepoint >> 12 & 0x3F));
    put(0x80 | (codepoint >> 6 & 0x3F));
    put(0x80 | (codepoint & 0x3F));
  }
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, at);
    text += step.valid ? bytes.substr(at, step.length) : kReplacement;
    at += step.length;
  }
  return text;
}

}  // namespace kvcache::model
