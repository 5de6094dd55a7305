// strict_json.cpp - nlohmann's parser with the checks that it
// leaves out.

#include "src/model/weights/strict_json.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kvcache/model/mapped_file.h"

namespace kvcache::model {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr size_t kMaxBytes = 100'000'000;
constexpr size_t kMaxQuoted = 80;

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxQuoted)) {
    const auto byte = static_cast<unsigned char>(c);
    out += (byte < 0x20 || byte == 0x7f) ? '?' : c;
  }
  return out + (text.size() > kMaxQuoted ? "...\"" : "\"");
}

json parse_strict_json(std::string_view text, const std::string& path) {
  // nlohmann takes a zero byte for the end and does not look behind it.
  TORCH_CHECK(text.find('\0') == text.npos, "[parse_strict_json] ", path,
              " must be JSON but byte ", text.find('\0'),
              " is zero; fetch the file again.");
  // nlohmann keeps the last of two equal keys without a word, so the keys of
  // the objects that are open are kept here.
  std::vector<std::set<std::string>> open;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    TORCH_CHECK(depth < kMaxDepth, "[parse_strict_json] ", path,
                ": nesting must not exceed ", kMaxDepth,
                " levels; the file is damaged or hostile.");
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      TORCH_CHECK(open.back().insert(key).second, "[parse_strict_json] ", path,
                  ": key ", in_quotes(key),
                  " stands twice in one object; remove one.");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& error) {
    std::string reason = error.what();
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    TORCH_CHECK(false, "[parse_strict_json] ", path, " must be JSON but got ",
                in_quotes(reason), "; fetch the file again.");
  }
}

json read_strict_json(const std::filesystem::path& path) {
  const MappedFile file(path);
  TORCH_CHECK(file.bytes().size() <= kMaxBytes, "[read_strict_json] ",
              path.string(), " must not exceed ", kMaxBytes, " bytes but has ",
              file.bytes().size(), "; this is not a configuration file.");
  const auto* text = reinterpret_cast<const char*>(file.bytes().data());
  return parse_strict_json({text, file.bytes().size()}, path.string());
}

}  // namespace kvcache::model
