// tests/support/model_path.h - where the real weights are, if they are there.

#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace kvcache::testing {

// What a test that needs the weights prints when it skips itself.
inline constexpr const char* kNoModel =
    "SmolLM2-135M-Instruct.Q4_1.gguf is not there: fetch it with scripts/demo "
    "or set KVCACHE_TEST_MODEL to the file";

// The file that KVCACHE_TEST_MODEL names, or the one in the user's cache.
// Empty if it does not exist.
inline std::filesystem::path smollm2_path() {
  namespace fs = std::filesystem;
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  fs::path path = variable("KVCACHE_TEST_MODEL");
  if (path.empty()) {
    fs::path cache = variable("KVCACHE_CACHE_DIR");
    if (cache.empty() && !variable("XDG_CACHE_HOME").empty())
      cache = fs::path(variable("XDG_CACHE_HOME")) / "kvcache";
    if (cache.empty()) cache = fs::path(variable("HOME")) / ".cache/kvcache";
    path = cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  }
  std::error_code none;
  return fs::exists(path, none) ? path : fs::path();
}

}  // namespace kvcache::testing
