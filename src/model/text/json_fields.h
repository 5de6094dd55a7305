// json_fields.h - typed access to a JSON document, with errors that name the
// file and the key.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvcache::model {

// Throws with the place if `text` is no JSON object.
nlohmann::json parse_json_object(std::string_view text,
                                 const std::string& source);

// A value in a document, and where it is.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, const std::string& source,
            std::string path = {})
      : value_(&value), source_(&source), path_(std::move(path)) {}

  const nlohmann::json& value() const noexcept { return *value_; }
  const std::string& path() const noexcept { return path_; }
  bool is_null() const noexcept { return value_->is_null(); }

  // A member of an object; a JSON null if it is missing.
  JsonField operator[](const char* key) const;
  JsonField operator[](size_t index) const;

  // Throw unless the value has that type. size(): of an array or object.
  const std::string& string() const;
  int64_t integer() const;
  const nlohmann::json& array() const;
  const nlohmann::json& object() const;
  // `missing` if the value is null.
  bool boolean(bool missing) const;
  std::optional<std::string> optional_string() const;

  // Throws: the value must be `wanted` but is what it is.
  [[noreturn]] void refuse(const std::string& wanted) const;

 private:
  const nlohmann::json* value_;
  const std::string* source_;
  std::string path_;
};

}  // namespace kvcache::model
