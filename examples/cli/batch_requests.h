// batch_requests.h - the requests of `kvcache batch`: one JSON object a line.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/cli/engine.h"
#include "examples/cli/options.h"

namespace kvcache::cli {

// A line of the file. One with an `error` asks for nothing.
struct BatchLine {
  Json id;  // a string or an integer; the number of the line if it gives none
  std::string error;
  std::optional<std::string> prompt;
  std::optional<std::vector<int64_t>> tokens;
  TextOptions text;
  std::string name_space;    // requests share within it only
  std::optional<bool> chat;  // empty: as the command line says
  // The adapter, and its first token; empty: as the command line says.
  std::optional<std::string> route;
  std::optional<int64_t> adapter_from;
};

// The lines of `file` that are not blank, in their order. What a line does not
// say is as in `defaults`. A line that is no request, and one whose id another
// has, carry an error.
std::vector<BatchLine> parse_batch(std::string_view file,
                                   const TextOptions& defaults);

}  // namespace kvcache::cli
