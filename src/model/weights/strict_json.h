// strict_json.h - JSON files of strangers: bounded, without
// duplicate keys.

#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvcache::model {

// Quotes a name from a file for a one-line message: cut to a readable length,
// control characters replaced.
std::string in_quotes(std::string_view text);

// Parses `text`; `path` names it in errors. Throws for malformed JSON, a key
// that stands twice in one object, and nesting deeper than 64.
nlohmann::json parse_strict_json(std::string_view text,
                                 const std::string& path);

// Reads a whole file of at most 100 MB and parses it.
nlohmann::json read_strict_json(const std::filesystem::path& path);

}  // namespace kvcache::model
