// choose_requests.h - the requests of `kvcache choose`: one JSON object a line.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "examples/cli/request_json.h"

namespace kvcache::cli {

using TextOrTokens = std::variant<std::string, std::vector<int64_t>>;

// A line of the file. One with an `error` asks for nothing.
struct ChooseLine {
  Json id;  // a string or an integer; the number of the line if it gives none
  std::string error;
  std::optional<std::vector<int64_t>> tokens;
  std::optional<int64_t> state_len;           // of tokens
  std::optional<TextOrTokens> state, suffix;  // in place of both
  std::vector<int64_t> slots = {-1};  // positions; below 0: from the end
  std::vector<int64_t> options;       // counts, one a slot
  std::string name_space;             // requests share within it only
  // An adapter by its name or place, from 1 on; "" and 0: none. Empty: as the
  // command line says.
  std::optional<std::variant<std::string, int64_t>> route;
};

// As parse_batch().
std::vector<ChooseLine> parse_choices(std::string_view file);

}  // namespace kvcache::cli
