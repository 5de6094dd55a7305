// json_fields.cpp - typed access to a JSON document.

#include "json_fields.h"

#include <c10/util/Exception.h>

namespace kvcache::model {
namespace {

// A value in a message: short, and on one line.
std::string excerpt(const nlohmann::json& value) {
  if (value.is_array()) {
    return "an array of " + std::to_string(value.size());
  }
  if (value.is_object()) {
    return "an object of " + std::to_string(value.size());
  }
  constexpr size_t kMost = 60;
  std::string text = value.dump();
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

const nlohmann::json& missing() {
  static const nlohmann::json null;
  return null;
}

}  // namespace

nlohmann::json parse_json_object(std::string_view text,
                                 const std::string& source) {
  // The parser takes a zero byte for the end and does not look behind it.
  TORCH_CHECK(text.find('\0') == text.npos, "[load_tokenizer] ", source,
              ": must be JSON but byte ", text.find('\0'),
              " is zero; fetch the file again.");
  nlohmann::json document;
  std::string problem;
  try {
    document = nlohmann::json::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& error) {
    problem = error.what();
  }
  TORCH_CHECK(problem.empty(), "[load_tokenizer] ", source,
              ": must be JSON but ", problem, "; fetch the file again.");
  TORCH_CHECK(document.is_object(), "[load_tokenizer] ", source,
              ": must be a JSON object but got ", excerpt(document),
              "; fetch the file again.");
  return document;
}

JsonField JsonField::operator[](const char* key) const {
  const std::string path = path_.empty() ? key : path_ + "." + key;
  if (!value_->is_object()) return {missing(), *source_, path};
  const auto found = value_->find(key);
  return {found == value_->end() ? missing() : *found, *source_, path};
}

JsonField JsonField::operator[](size_t index) const {
  const std::string path = path_ + "[" + std::to_string(index) + "]";
  if (!value_->is_array() || index >= value_->size()) {
    return {missing(), *source_, path};
  }
  return {(*value_)[index], *source_, path};
}

void JsonField::refuse(const std::string& wanted) const {
  TORCH_CHECK(false, "[load_tokenizer] ", *source_, ": ", path_, " must be ",
              wanted, " but got ", excerpt(*value_),
              "; use another tokenizer file.");
}

const std::string& JsonField::string() const {
  if (!value_->is_string()) refuse("a string");
  return value_->get_ref<const std::string&>();
}

int64_t JsonField::integer() const {
  if (!value_->is_number_integer()) refuse("an integer");
  return value_->get<int64_t>();
}

const nlohmann::json& JsonField::array() const {
  if (!value_->is_array()) refuse("an array");
  return *value_;
}

const nlohmann::json& JsonField::object() const {
  if (!value_->is_object()) refuse("an object");
  return *value_;
}

bool JsonField::boolean(bool missing) const {
  if (value_->is_null()) return missing;
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}

std::optional<std::string> JsonField::optional_string() const {
  if (value_->is_null()) return std::nullopt;
  return string();
}

}  // namespace kvcache::model
