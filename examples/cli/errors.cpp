// errors.cpp - what a person sees when the program cannot go on.

#include "examples/cli/errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>

namespace kvcache::cli {
namespace {

std::string first_text(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) {
    return "out of memory; use a smaller --context or model";
  }
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    return torch->what_without_backtrace();
  }
  return error.what();
}

// "[Class::function] text" is for programmers; people get the text.
void drop_place(std::string& text) {
  if (text.empty() || text.front() != '[') return;
  const size_t end = text.find("] ");
  const size_t space = text.find(' ');
  if (end != std::string::npos && end < space) text.erase(0, end + 2);
}

}  // namespace

std::string message_of(const std::exception& error) {
  return message_of(first_text(error));
}

std::string message_of(std::string text) {
  drop_place(text);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::replace_if(
      text.begin(), text.end(),
      [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return text;
}

}  // namespace kvcache::cli
