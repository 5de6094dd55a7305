// inspect_saved.cpp - what is in saved texts, but for the texts.

#include "examples/cli/inspect_saved.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <tuple>

#include "examples/cli/errors.h"
#include "kvcache/model/checkpoint_file.h"

namespace kvcache::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEnding = ".kvtext.safetensors";

struct Saved {
  fs::path path;
  std::optional<model::CheckpointFile> file;  // empty: `error`
  std::string error;

  std::string space() const {
    const auto found = file->identity().find("namespace");
    return found == file->identity().end() ? std::string() : found->second;
  }
};

bool has_ending(const fs::path& path) {
  return path.filename().string().ends_with(kEnding);
}

std::vector<Saved> open_all(const fs::path& path) {
  std::vector<fs::path> paths;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) {
      if (has_ending(entry.path())) paths.push_back(entry.path());
    }
  } else {
    paths.push_back(path);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Saved> all;
  for (const fs::path& one : paths) {
    Saved saved{.path = one, .file = {}, .error = {}};
    try {
      saved.file.emplace(one);
    } catch (const std::exception& error) {
      saved.error = message_of(error);
    }
    all.push_back(std::move(saved));
  }
  return all;
}

// Readable ones first, by namespace and then token by token.
bool before(const Saved& a, const Saved& b) {
  if (!a.file || !b.file) return a.file.has_value() && !b.file.has_value();
  const std::string space_a = a.space(), space_b = b.space();
  if (space_a != space_b) return space_a < space_b;
  const auto of_a = a.file->tokens(), of_b = b.file->tokens();
  return std::lexicographical_compare(of_a.begin(), of_a.end(), of_b.begin(),
                                      of_b.end());
}

int64_t shared(const Saved* above, const Saved& below) {
  if (above == nullptr || !above->file || above->space() != below.space()) {
    return 0;
  }
  const auto a = above->file->tokens(), b = below.file->tokens();
  const auto most = static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  return std::mismatch(a.begin(), a.begin() + most, b.begin()).first -
         a.begin();
}

double age_seconds(const fs::path& path) {
  std::error_code error;
  const auto time = fs::last_write_time(path, error);
  if (error) return 0;
  return std::chrono::duration<double>(fs::file_time_type::clock::now() - time)
      .count();
}

}  // namespace

bool is_saved(const fs::path& path) {
  if (!fs::is_directory(path)) return has_ending(path);
  return std::any_of(
      fs::directory_iterator(path), fs::directory_iterator(),
      [](const fs::directory_entry& e) { return has_ending(e.path()); });
}

Json saved_json(const fs::path& path) {
  std::vector<Saved> all = open_all(path);
  std::stable_sort(all.begin(), all.end(), before);
  Json texts = Json::array();
  const Saved* above = nullptr;
  for (const Saved& saved : all) {
    Json json;
    json["file"] = saved.path.filename().string();
    if (saved.file) {
      json["bytes"] = saved.file->bytes();
      json["age_s"] = age_seconds(saved.path);
      json["tokens"] = saved.file->tokens().size();
      json["shares"] = shared(above, saved);
      json["restore_points"] = saved.file->restore_points();
      json["identity"] = saved.file->identity();
    } else {
      json["error"] = saved.error;
    }
    texts.push_back(std::move(json));
    above = &saved;
  }
  return texts;
}

std::string saved_lines(const Json& texts) {
  std::string lines;
  for (const Json& text : texts) {
    const std::string name = text["file"].get<std::string>();
    if (text.contains("error")) {
      lines += name + ": " + text["error"].get<std::string>() + "\n";
      continue;
    }
    const auto shares = text["shares"].get<int64_t>();
    char numbers[160];
    std::snprintf(numbers, sizeof numbers, "%lld tokens, %.1f MiB, %.0f s old",
                  static_cast<long long>(text["tokens"].get<int64_t>()),
                  text["bytes"].get<double>() / (1024.0 * 1024.0),
                  text["age_s"].get<double>());
    lines += (shares > 0 ? "  " : "") + name + ": " + numbers;
    if (shares > 0) {
      lines += ", the first " + std::to_string(shares) + " as above";
    }
    if (!text["restore_points"].empty()) {
      lines += ", restores at " + text["restore_points"].dump();
    }
    lines += "\n";
  }
  return lines;
}

}  // namespace kvcache::cli
