// rendering.h - templates, conversations and their text, for tests.
#pragma once

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include <functional>

#include "kvcache/model/chat_template.h"
#include "tests/model/text/tokenizer_data.h"

namespace kvcache::model::test {

inline std::string chat_file(const std::string& name) {
  return read_file("tests/model/chat/data/" + name);
}

inline std::string text_of(const std::vector<TextPart>& parts) {
  std::string text;
  for (const TextPart& part : parts) text += part.text;
  return text;
}

// What only the template wrote.
inline std::string markup_of(const std::vector<TextPart>& parts) {
  std::string text;
  for (const TextPart& part : parts) {
    if (part.special) text += part.text;
  }
  return text;
}

// Keeps the order of the keys, which templates show.
using Json = nlohmann::ordered_json;

inline ChatMessage message_of(Json json) {
  ChatMessage message{.role = json["role"], .content = json["content"]};
  json.erase("role");
  json.erase("content");
  if (!json.empty()) message.extra_json = json.dump();
  return message;
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

inline std::string render_error(const std::string& source,
                                ChatLimits limits = {},
                                const std::string& content = "hi") {
  return error_of([&] {
    const ChatTemplate chat(source, "<s>", "</s>", limits);
    const ChatMessage message{.role = "user", .content = content};
    chat.render(std::span(&message, 1));
  });
}

inline std::string rendered(const std::string& source,
                            const std::string& content = "hi") {
  const ChatTemplate chat(source, "<s>", "</s>");
  const ChatMessage message{.role = "user", .content = content};
  return text_of(chat.render(std::span(&message, 1)));
}

}  // namespace kvcache::model::test
