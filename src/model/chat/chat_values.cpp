// chat_values.cpp - a conversation as the values that a template works on.
//
// Every text of it is marked as input, so that what the template writes can be
// told from what the conversation says. The one exception is a role that is a
// plain word: templates build their turn markers from it ('<|' + role + '|>').

#include "chat_values.h"

#include <c10/util/Exception.h>
#include <jinja/runtime.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <utility>

namespace kvcache::model {
namespace {

using Json = nlohmann::ordered_json;

jinja::value text_value(const std::string& text, bool input) {
  return jinja::mk_val<jinja::value_string>(jinja::string(text, input));
}

bool is_plain_word(const std::string& text) {
  constexpr size_t kMostBytes = 32;
  return !text.empty() && text.size() <= kMostBytes &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '_' || c == '-';
         });
}

jinja::value to_value(const Json& json) {
  const jinja::depth_guard guard;
  switch (json.type()) {
    case Json::value_t::boolean:
      return jinja::mk_val<jinja::value_bool>(json.get<bool>());
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return jinja::mk_val<jinja::value_int>(json.get<int64_t>());
    case Json::value_t::number_float:
      return jinja::mk_val<jinja::value_float>(json.get<double>());
    case Json::value_t::string:
      return text_value(json.get_ref<const std::string&>(), true);
    case Json::value_t::array: {
      auto array = jinja::mk_val<jinja::value_array>();
      for (const Json& item : json) array->push_back(to_value(item));
      return array;
    }
    case Json::value_t::object: {
      auto object = jinja::mk_val<jinja::value_object>();
      for (const auto& [key, item] : json.items()) {
        object->insert(text_value(key, true), to_value(item));
      }
      return object;
    }
    default:
      return jinja::mk_val<jinja::value_none>();
  }
}

Json parse(const std::string& text, const std::string& what, JsonKind wanted) {
  Json json;
  std::string problem;
  try {
    json = Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    problem = error.what();
  }
  TORCH_CHECK_VALUE(problem.empty(), "[ChatTemplate::render] ", what,
                    " must be JSON but ", problem, "; check the text.");
  const bool object = wanted == JsonKind::kObject;
  TORCH_CHECK_VALUE(object ? json.is_object() : json.is_array(),
                    "[ChatTemplate::render] ", what, " must be a JSON ",
                    object ? "object" : "array", " but got ", json.type_name(),
                    "; check the text.");
  return json;
}

jinja::value message_value(const ChatMessage& message, size_t index) {
  auto object = jinja::mk_val<jinja::value_object>();
  const auto set = [&](const char* key, const jinja::value& value) {
    object->insert(text_value(key, false), value);
  };
  std::string role = message.role;
  set("role", text_value(role, !is_plain_word(role)));
  set("content", text_value(message.content, true));
  if (message.extra_json.empty()) return object;
  const Json extra = parse(message.extra_json,
                           "extra_json of message " + std::to_string(index),
                           JsonKind::kObject);
  for (const auto& [key, item] : extra.items()) {
    const bool is_role = key == "role" && item.is_string();
    if (is_role) role = item.get<std::string>();
    object->insert(
        text_value(key, true),
        is_role ? text_value(role, !is_plain_word(role)) : to_value(item));
  }
  return object;
}

}  // namespace

jinja::value messages_value(std::span<const ChatMessage> messages) {
  auto list = jinja::mk_val<jinja::value_array>();
  for (size_t i = 0; i < messages.size(); ++i) {
    list->push_back(message_value(messages[i], i));
  }
  return list;
}

jinja::value json_value(const std::string& text, const std::string& what,
                        JsonKind wanted) {
  return to_value(parse(text, what, wanted));
}

}  // namespace kvcache::model
