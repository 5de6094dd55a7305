// inspect_saved.h - what is in saved texts, but for the texts.
#pragma once

#include <filesystem>

#include "examples/cli/engine.h"

namespace kvcache::cli {

// A saved text, or a folder with some.
bool is_saved(const std::filesystem::path& path);

// One object per file, by namespace, then by what they begin with: "file",
// "bytes", "age_s", "tokens", "shares" (tokens, with the text before it),
// "restore_points", "identity"; or "file" and "error".
Json saved_json(const std::filesystem::path& path);

// The same for people.
std::string saved_lines(const Json& texts);

}  // namespace kvcache::cli
