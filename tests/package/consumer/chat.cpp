// chat.cpp - a program outside the tree on kvcache::chat: renders a template.

#include <cstdio>
#include <vector>

#include "kvcache/model/chat_template.h"

int main() {
  const kvcache::model::ChatTemplate chat(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
  const std::vector<kvcache::model::ChatMessage> messages{
      {.role = "user", .content = "Hello"}};
  std::string text;
  for (const auto& part : chat.render(messages)) text += part.text;
  std::printf("%s\n", text.c_str());
  return text == "<user>Hello" ? 0 : 1;
}
