// chat_values.h - a conversation as the values that a template works on.

#pragma once

#include <jinja/value.h>

#include <string>

#include "kvcache/model/chat_template.h"

namespace kvcache::model {

// A list of objects with role, content and what extra_json adds.
jinja::value messages_value(std::span<const ChatMessage> messages);

// The value of a JSON text; `what` names it in messages, `wanted` is the type
// it must have.
enum class JsonKind { kObject, kArray };
jinja::value json_value(const std::string& text, const std::string& what,
                        JsonKind wanted);

}  // namespace kvcache::model
