// config_section.h - typed reading of one object of a JSON configuration.

#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/model/weights/strict_json.h"

namespace kvcache::model {

// Typed reading of one object of a file. A null stands for a missing key, as
// in transformers.
class Section {
 public:
  // `function` is what messages begin with.
  Section(const nlohmann::json& object, std::string path,
          const char* function = "config_from_json")
      : object_(object), path_(std::move(path)), function_(function) {}

  const std::string& path() const noexcept { return path_; }
  bool has(const std::string& key) const {
    return object_.contains(key) && !object_[key].is_null();
  }
  // The key stands there, be it with null.
  bool mentions(const std::string& key) const { return object_.contains(key); }

  std::optional<int64_t> integer(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    return integer_of(key, object_[key]);
  }
  int64_t required(const std::string& key) const {
    return must(integer(key), key);
  }
  std::optional<double> number(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    check(object_[key].is_number(), key, "a number");
    return object_[key].get<double>();
  }
  double required_number(const std::string& key) const {
    return must(number(key), key);
  }
  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    check(object_[key].is_boolean(), key, "true or false");
    return object_[key].get<bool>();
  }
  std::optional<std::string> text(const std::string& key) const {
    if (!has(key)) return std::nullopt;
    check(object_[key].is_string(), key, "text");
    return object_[key].get<std::string>();
  }
  std::vector<std::string> texts(const std::string& key) const {
    check(object_[key].is_array(), key, "a list of texts");
    std::vector<std::string> out;
    for (const nlohmann::json& item : object_[key]) {
      check(item.is_string(), key, "a list of texts");
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  // A number or a list of numbers.
  std::vector<int64_t> integers(const std::string& key) const {
    std::vector<int64_t> out;
    if (!has(key)) return out;
    if (!object_[key].is_array()) return {integer_of(key, object_[key])};
    for (const nlohmann::json& item : object_[key])
      out.push_back(integer_of(key, item));
    return out;
  }
  Section section(const std::string& key) const {
    check(object_[key].is_object(), key, "an object");
    return {object_[key], path_, function_};
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& value,
                           const std::string& remedy) const {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[", function_, "] ", path_, ": ", key,
                                " ", in_quotes(value), " is not supported; ",
                                remedy);
    throw std::logic_error("unreachable");
  }

 private:
  template <typename T>
  T must(std::optional<T> value, const std::string& key) const {
    TORCH_CHECK(value.has_value(), "[", function_, "] ", path_, ": key ", key,
                " is missing; fetch the file again.");
    return *value;
  }
  void check(bool holds, const std::string& key, const char* want) const {
    TORCH_CHECK(holds, "[", function_, "] ", path_, ": key ", key, " must be ",
                want, " but is ", in_quotes(object_[key].dump()),
                "; correct the file.");
  }
  int64_t integer_of(const std::string& key,
                     const nlohmann::json& value) const {
    check(value.is_number_integer() &&
              !(value.is_number_unsigned() &&
                value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)),
          key, "a whole number");
    return value.get<int64_t>();
  }

  const nlohmann::json& object_;
  std::string path_;
  const char* function_;
};

}  // namespace kvcache::model
