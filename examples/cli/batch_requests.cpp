// batch_requests.cpp - the requests of `kvcache batch`: one JSON object a line.

#include "examples/cli/batch_requests.h"

#include <limits>
#include <map>
#include <set>
#include <stdexcept>

#include "examples/cli/errors.h"

namespace kvcache::cli {
namespace {

constexpr int kMaxDepth = 16;      // a request has 2
constexpr size_t kMaxQuoted = 60;  // bytes of a value in a message

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

// A key of a request and what it sets.
struct Key {
  const char* name;
  void (*set)(const std::string& key, const Json& value, BatchLine& line);
};

[[noreturn]] void needs_adapters(const std::string& key, const Json&,
                                 BatchLine&) {
  throw std::runtime_error(
      key + " chooses an adapter, and the model has none; leave it out");
}

constexpr Key kKeys[] = {
    {"id", [](const std::string&, const Json&, BatchLine&) {}},  // set before
    {"prompt", [](const std::string& key, const Json& value,
                  BatchLine& line) { line.prompt = full_text(key, value); }},
    {"tokens", [](const std::string& key, const Json& value,
                  BatchLine& line) { line.tokens = ids(key, value); }},
    {"max_new_tokens",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.max_new_tokens = whole(key, value);
     }},
    {"temperature",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.temperature = number(key, value);
     }},
    {"top_k",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.top_k = whole(key, value);
     }},
    {"top_p",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.top_p = number(key, value);
     }},
    {"min_p",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.min_p = number(key, value);
     }},
    {"repetition_penalty",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.repetition_penalty = number(key, value);
     }},
    {"seed",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.sampling.seed = unsigned_whole(key, value);
     }},
    {"stop", [](const std::string& key, const Json& value,
                BatchLine& line) { line.text.stop = texts(key, value); }},
    {"ignore_eos",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.text.ignore_eos = flag(key, value);
     }},
    {"chat", [](const std::string& key, const Json& value,
                BatchLine& line) { line.chat = flag(key, value); }},
    {"namespace",
     [](const std::string& key, const Json& value, BatchLine& line) {
       line.name_space = full_text(key, value);
     }},
    {"route", needs_adapters},
};

void set_key(const std::string& name, const Json& value, BatchLine& line) {
  std::string known;
  for (const Key& key : kKeys) {
    if (name == key.name) {
      if (!value.is_null()) key.set(name, value, line);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(key.name);
  }
  throw std::runtime_error("the key " + shown(name) + " is not known; there " +
                           "are " + known);
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

void read_id(const Json& object, BatchLine& line) {
  const auto id = object.find("id");
  if (id == object.end() || id->is_null()) return;
  if (!id->is_string() && !id->is_number_integer()) {
    refuse("id", "a string or an integer", *id);
  }
  line.id = *id;
}

BatchLine parse_line(std::string_view text, int64_t number,
                     const TextOptions& defaults) {
  BatchLine line;
  line.id = number;
  line.text = defaults;
  try {
    const Json object = parse_object(text);
    read_id(object, line);
    for (const auto& [key, value] : object.items()) set_key(key, value, line);
    if (line.prompt.has_value() == line.tokens.has_value()) {
      throw std::runtime_error("give exactly one of prompt and tokens");
    }
    if (line.tokens && line.chat.value_or(false)) {
      throw std::runtime_error(
          "tokens are used exactly as they are; leave chat out");
    }
  } catch (const std::exception& error) {
    line.error = message_of(error);
  }
  return line;
}

}  // namespace

std::vector<BatchLine> parse_batch(std::string_view file,
                                   const TextOptions& defaults) {
  std::vector<BatchLine> lines;
  std::map<std::string, int64_t> places;  // of the ids, as JSON
  int64_t number = 0;
  while (!file.empty()) {
    const size_t end = file.find('\n');
    const std::string_view text = file.substr(0, end);
    file.remove_prefix(end == file.npos ? file.size() : end + 1);
    ++number;
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    BatchLine line = parse_line(text, number, defaults);
    const auto [place, fresh] = places.emplace(line.id.dump(), number);
    if (!fresh && line.error.empty()) {
      line.error = "the id " + shown(line.id) + " is taken by line " +
                   std::to_string(place->second) + "; ids must differ";
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace kvcache::cli
