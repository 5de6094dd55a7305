// load_chat_template.cpp - finds the chat template of a model on disk.

#include <c10/util/Exception.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "kvcache/model/chat_template.h"
#include "kvcache/model/gguf.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;
using Templates = std::map<std::string, std::string, std::less<>>;

constexpr std::uintmax_t kMaxFileBytes = 64 << 20;

std::string read_file(const fs::path& path) {
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  TORCH_CHECK(!error && size <= kMaxFileBytes, "[load_chat_template] ",
              path.string(), ": must be a file of at most ", kMaxFileBytes,
              " bytes but ",
              error ? error.message() : "has " + std::to_string(size),
              "; check the path.");
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  TORCH_CHECK(file.gcount() == static_cast<std::streamsize>(size),
              "[load_chat_template] ", path.string(), ": must give ", size,
              " bytes but gave ", file.gcount(), "; check the disk.");
  return text;
}

Templates from_gguf(const fs::path& path) {
  constexpr std::string_view kKey = "tokenizer.chat_template";
  const GgufFile file(path);
  Templates templates;
  for (const std::string_view key : file.keys()) {
    if (key == kKey) {
      templates.emplace("default", file.string(key));
    } else if (key.starts_with(std::string(kKey) + ".")) {
      templates.emplace(key.substr(kKey.size() + 1), file.string(key));
    }
  }
  return templates;
}

// The value is one template, or a list of {name, template}.
void add_from_json(const fs::path& path, Templates& templates) {
  const std::string text = read_file(path);
  const nlohmann::json document =
      nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  TORCH_CHECK(document.is_object(), "[load_chat_template] ", path.string(),
              ": must be a JSON object; fetch the file again.");
  const auto found = document.find("chat_template");
  if (found == document.end() || found->is_null()) return;
  if (found->is_string()) {
    templates.emplace("default", found->get<std::string>());
    return;
  }
  const auto is_entry = [](const nlohmann::json& entry) {
    return entry.is_object() && entry.contains("name") &&
           entry.contains("template") && entry["name"].is_string() &&
           entry["template"].is_string();
  };
  bool well_formed = found->is_array();
  for (const nlohmann::json& entry : *found) {
    well_formed = well_formed && is_entry(entry);
    if (!well_formed) break;
    templates.emplace(entry["name"].get<std::string>(),
                      entry["template"].get<std::string>());
  }
  TORCH_CHECK(well_formed, "[load_chat_template] ", path.string(),
              ": chat_template must be a string or a list of objects with name "
              "and template but got ",
              found->type_name(), "; fetch the file again.");
}

// A file of its own wins over the configuration.
Templates from_folder(const fs::path& folder) {
  Templates templates;
  const fs::path file = folder / "chat_template.jinja";
  if (fs::exists(file)) templates.emplace("default", read_file(file));
  const fs::path more = folder / "additional_chat_templates";
  if (fs::is_directory(more)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(more)) {
      if (entry.path().extension() != ".jinja") continue;
      templates.emplace(entry.path().stem().string(), read_file(entry.path()));
    }
  }
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    if (fs::exists(folder / name)) add_from_json(folder / name, templates);
  }
  return templates;
}

}  // namespace

std::optional<std::string> load_chat_template(const fs::path& path,
                                              std::string_view name) {
  TORCH_CHECK(fs::exists(path), "[load_chat_template] ", path.string(),
              ": must be a file or folder but there is none; check the path.");
  const Templates templates =
      fs::is_directory(path) ? from_folder(path) : from_gguf(path);
  if (templates.empty()) return std::nullopt;
  const auto found = templates.find(name);
  std::string names;
  for (const auto& [known, source] : templates) names += " " + known;
  TORCH_CHECK_VALUE(found != templates.end(), "[load_chat_template] ",
                    path.string(), ": the template must be one of", names,
                    " but got ", name, "; choose one of them.");
  return found->second;
}

}  // namespace kvcache::model
