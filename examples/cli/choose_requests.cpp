// choose_requests.cpp - the requests of `kvcache choose`: one JSON object a
// line.

#include "examples/cli/choose_requests.h"

#include <stdexcept>

#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

TextOrTokens text_or_tokens(const std::string& key, const Json& value) {
  if (value.is_array()) return ids(key, value);
  if (!value.is_string()) refuse(key, "a text or a list of token ids", value);
  return full_text(key, value);
}

std::vector<int64_t> wholes(const std::string& key, const Json& value) {
  if (!value.is_array()) refuse(key, "a list of whole numbers", value);
  std::vector<int64_t> numbers;
  for (const Json& number : value) numbers.push_back(whole(key, number));
  return numbers;
}

constexpr RequestKey<ChooseLine> kKeys[] = {
    {"id", [](const std::string&, const Json&, ChooseLine&) {}},  // set before
    {"tokens", [](const std::string& key, const Json& value,
                  ChooseLine& line) { line.tokens = ids(key, value); }},
    {"state_len", [](const std::string& key, const Json& value,
                     ChooseLine& line) { line.state_len = whole(key, value); }},
    {"state",
     [](const std::string& key, const Json& value, ChooseLine& line) {
       line.state = text_or_tokens(key, value);
     }},
    {"suffix",
     [](const std::string& key, const Json& value, ChooseLine& line) {
       line.suffix = text_or_tokens(key, value);
     }},
    {"slots", [](const std::string& key, const Json& value,
                 ChooseLine& line) { line.slots = wholes(key, value); }},
    {"options", [](const std::string& key, const Json& value,
                   ChooseLine& line) { line.options = wholes(key, value); }},
    {"namespace",
     [](const std::string& key, const Json& value, ChooseLine& line) {
       line.name_space = full_text(key, value);
     }},
    {"route",
     [](const std::string& key, const Json& value, ChooseLine& line) {
       if (value.is_string()) {
         line.route = value.get<std::string>();
       } else {
         line.route = whole(key, value);
       }
     }},
};

void check(const ChooseLine& line) {
  const bool pair = line.state && line.suffix;
  if (line.tokens.has_value() == pair ||
      line.state.has_value() != line.suffix.has_value()) {
    throw std::runtime_error(
        "give either tokens with state_len, or state and suffix");
  }
  if (pair && line.state_len) {
    throw std::runtime_error(
        "state_len is about tokens; state ends where suffix begins");
  }
  if (line.options.size() != line.slots.size()) {
    throw std::runtime_error("options must be one count for each of " +
                             std::to_string(line.slots.size()) +
                             " slots but there are " +
                             std::to_string(line.options.size()));
  }
}

ChooseLine parse_line(std::string_view text, int64_t number) {
  ChooseLine line;
  line.id = number;
  try {
    const Json object = parse_object(text);
    line.id = id_of(object).value_or(line.id);
    set_keys(kKeys, object, line);
    check(line);
  } catch (const std::exception& error) {
    line.error = message_of(error);
  }
  return line;
}

}  // namespace

std::vector<ChooseLine> parse_choices(std::string_view file) {
  return parse_lines<ChooseLine>(file, parse_line);
}

}  // namespace kvcache::cli
