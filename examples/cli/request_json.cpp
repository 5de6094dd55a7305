// request_json.cpp - values of requests, each checked and named in its error.

#include "examples/cli/request_json.h"

#include <limits>
#include <set>
#include <stdexcept>

#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

constexpr int kMaxDepth = 16;      // a request has 2
constexpr size_t kMaxQuoted = 60;  // bytes of a value in a message

}  // namespace

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() <= kMaxQuoted) return text;
  return text.substr(0, kMaxQuoted) + "...";
}

[[noreturn]] void refuse(const std::string& key, const char* wanted,
                         const Json& value) {
  throw std::runtime_error(key + " must be " + wanted + " but got " +
                           shown(value));
}

int64_t whole(const std::string& key, const Json& value) {
  constexpr auto kMost =
      static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || value.get<uint64_t>() <= kMost);
  if (!fits) refuse(key, "a whole number of 64 bits", value);
  return value.get<int64_t>();
}

uint64_t unsigned_whole(const std::string& key, const Json& value) {
  if (!value.is_number_unsigned()) {
    refuse(key, "a whole number from 0 on, of 64 bits", value);
  }
  return value.get<uint64_t>();
}

double number(const std::string& key, const Json& value) {
  if (!value.is_number()) refuse(key, "a number", value);
  return value.get<double>();
}

bool flag(const std::string& key, const Json& value) {
  if (!value.is_boolean()) refuse(key, "true or false", value);
  return value.get<bool>();
}

std::string full_text(const std::string& key, const Json& value) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    refuse(key, "a text that is not empty", value);
  }
  return value.get<std::string>();
}

std::vector<int64_t> ids(const std::string& key, const Json& value) {
  if (!value.is_array()) refuse(key, "a list of token ids", value);
  std::vector<int64_t> ids;
  for (const Json& id : value) ids.push_back(whole(key, id));
  return ids;
}

std::vector<std::string> texts(const std::string& key, const Json& value) {
  if (!value.is_array()) return {full_text(key, value)};
  std::vector<std::string> texts;
  for (const Json& text : value) texts.push_back(full_text(key, text));
  return texts;
}

// nlohmann's parser with what it leaves out: zero bytes, which it takes for the
// end, keys that stand twice, of which it keeps the last, and a bound on depth.
Json parse_object(std::string_view text) {
  if (const size_t zero = text.find('\0'); zero != text.npos) {
    throw std::runtime_error("the line must be JSON but byte " +
                             std::to_string(zero) + " is zero");
  }
  std::set<std::string> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) {
      throw std::runtime_error("the line must not nest deeper than " +
                               std::to_string(kMaxDepth) + " levels");
    }
    if (depth == 1 && event == Json::parse_event_t::key &&
        !keys.insert(parsed.get<std::string>()).second) {
      throw std::runtime_error("the key " + shown(parsed) +
                               " stands twice; remove one");
    }
    return true;
  };
  Json object;
  try {
    object = Json::parse(text.begin(), text.end(), check);
  } catch (const Json::exception& error) {
    throw std::runtime_error("the line must be JSON: " + message_of(error));
  }
  if (!object.is_object()) {
    throw std::runtime_error("the line must be a JSON object but is " +
                             shown(object));
  }
  return object;
}

std::optional<Json> id_of(const Json& object) {
  const auto id = object.find("id");
  if (id == object.end() || id->is_null()) return {};
  if (!id->is_string() && !id->is_number_integer()) {
    refuse("id", "a string or an integer", *id);
  }
  return *id;
}

}  // namespace kvcache::cli
