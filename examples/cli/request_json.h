// request_json.h - files of requests: one JSON object a line, wrong ones told
// apart from the others.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/cli/engine.h"

namespace kvcache::cli {

std::string shown(const Json& value);  // for messages, cut where it is long

// Values of `key`; throw, naming it, for anything else.
[[noreturn]] void refuse(const std::string& key, const char* wanted,
                         const Json& value);
int64_t whole(const std::string& key, const Json& value);
uint64_t unsigned_whole(const std::string& key, const Json& value);
double number(const std::string& key, const Json& value);
bool flag(const std::string& key, const Json& value);
std::string full_text(const std::string& key, const Json& value);
std::vector<int64_t> ids(const std::string& key, const Json& value);
std::vector<std::string> texts(const std::string& key, const Json& value);

Json parse_object(std::string_view text);
// A string or an integer; empty: it has none.
std::optional<Json> id_of(const Json& object);

// The lines of `file` that are not blank, in their order; one whose id another
// has carries an error. parse(text, number from 1 on) -> Line, throws nothing.
template <typename Line, typename Parse>
std::vector<Line> parse_lines(std::string_view file, const Parse& parse) {
  std::vector<Line> lines;
  std::map<std::string, int64_t> places;  // of the ids, as JSON
  int64_t number = 0;
  while (!file.empty()) {
    const size_t end = file.find('\n');
    const std::string_view text = file.substr(0, end);
    file.remove_prefix(end == file.npos ? file.size() : end + 1);
    ++number;
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    Line line = parse(text, number);
    const auto [place, fresh] = places.emplace(line.id.dump(), number);
    if (!fresh && line.error.empty()) {
      line.error = "the id " + shown(line.id) + " is taken by line " +
                   std::to_string(place->second) + "; ids must differ";
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

// A key of a request and what it sets.
template <typename Line>
struct RequestKey {
  const char* name;
  void (*set)(const std::string& key, const Json& value, Line& line);
};

// Sets all of `object`; null is as if it were not there.
template <typename Line, size_t kCount>
void set_keys(const RequestKey<Line> (&keys)[kCount], const Json& object,
              Line& line) {
  for (const auto& [name, value] : object.items()) {
    const RequestKey<Line>* found = nullptr;
    std::string known;
    for (const RequestKey<Line>& key : keys) {
      if (name == key.name) found = &key;
      known += (known.empty() ? "" : ", ") + std::string(key.name);
    }
    if (found == nullptr) {
      throw std::runtime_error("the key " + shown(name) +
                               " is not known; there are " + known);
    }
    if (!value.is_null()) found->set(name, value, line);
  }
}

}  // namespace kvcache::cli
