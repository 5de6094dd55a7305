// safetensors_header.cpp - reads and checks the JSON header
// of a file.
//
// Parsed event by event: nlohmann's document type would keep the last of two
// equal keys, and a flat pass needs no stack, however deep a file nests.

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_set>

#include "kvcache/model/safetensors.h"
#include "src/model/weights/safetensors_types.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeaderBytes = 100'000'000;  // as the reference reader
constexpr size_t kMaxDims = 16;

// Builds entries from parser events. Where the parser stands is `depth_`:
// 1 names of tensors, 2 fields of one tensor, 3 numbers of a field.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  HeaderReader(const std::string& path, SafetensorsHeader& header)
      : path_(path), header_(header) {}

  bool start_object(size_t) override {
    require(depth_ < 2 && !in_array_, "a value is an object");
    if (depth_ == 1) {
      metadata_ = name_ == "__metadata__";
      entry_ = {};
      entry_.name = name_;
      dtype_.reset();
      offsets_.reset();
      shape_.reset();
      fields_.clear();
    }
    ++depth_;
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1 && !metadata_) finish_entry();
    if (depth_ == 1) metadata_ = false;
    return true;
  }

  bool key(std::string& key) override {
    if (depth_ == 1) {
      require(names_.insert(key).second, "tensor ", in_quotes(key),
              " stands twice");
      name_ = key;
      return true;
    }
    require(fields_.insert(key).second, "key ", in_quotes(key), " of ",
            in_quotes(name_), " stands twice");
    require(
        metadata_ || key == "dtype" || key == "shape" || key == "data_offsets",
        in_quotes(name_), " has the key ", in_quotes(key),
        " where dtype, shape or data_offsets is expected");
    field_ = key;
    return true;
  }

  bool start_array(size_t) override {
    require(depth_ == 2 && !metadata_ && !in_array_, "an array stands where ",
            expected());
    in_array_ = true;
    if (field_ == "shape") shape_.emplace();
    if (field_ == "data_offsets") offsets_.emplace();
    return true;
  }

  bool end_array() override {
    in_array_ = false;
    return true;
  }

  bool string(std::string& value) override {
    if (depth_ == 2 && metadata_) {
      header_.metadata.emplace(field_, value);
      return true;
    }
    require(depth_ == 2 && !in_array_ && field_ == "dtype",
            "text stands where ", expected());
    dtype_ = value;
    return true;
  }

  bool number_unsigned(json::number_unsigned_t value) override {
    require(depth_ == 2 && in_array_, "a number stands where ", expected());
    require(value <= INT64_MAX, in_quotes(name_), " ", field_, " has ", value,
            ", more than ", INT64_MAX);
    if (field_ == "shape") {
      require(shape_->size() < kMaxDims, in_quotes(name_), " has more than ",
              kMaxDims, " dimensions");
      shape_->push_back(static_cast<int64_t>(value));
    } else if (field_ == "data_offsets") {
      require(offsets_->size() < 2, in_quotes(name_),
              " data_offsets must be two numbers but has more");
      offsets_->push_back(value);
    }
    return true;
  }

  bool number_integer(json::number_integer_t value) override {
    return refuse("a negative number ", value, " stands where ", expected());
  }
  bool number_float(json::number_float_t, const std::string& text) override {
    return refuse("the number ", in_quotes(text), " stands where ", expected());
  }
  bool null() override { return refuse("null stands where ", expected()); }
  bool boolean(bool) override {
    return refuse("true or false stands where ", expected());
  }
  bool binary(json::binary_t&) override { return false; }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return refuse("it is no valid JSON at byte ", position);
  }

 private:
  template <typename... Parts>
  void require(bool holds, const Parts&... parts) const {
    if (!holds) refuse(parts...);
  }

  template <typename... Parts>
  bool refuse(const Parts&... parts) const {
    TORCH_CHECK(false, "[safetensors] ", path_,
                ": the header is damaged: ", parts...,
                "; fetch the file again.");
  }

  std::string expected() const {
    if (depth_ == 0) return "the header's object is expected";
    if (depth_ == 1) return "an object is expected for " + in_quotes(name_);
    if (metadata_) return "text is expected for " + in_quotes(field_);
    return "dtype (text), shape or data_offsets (whole numbers) is expected "
           "for " +
           in_quotes(name_) + " " + in_quotes(field_);
  }

  void finish_entry() {
    require(dtype_.has_value(), in_quotes(name_), " has no dtype");
    require(shape_.has_value(), in_quotes(name_), " has no shape");
    require(offsets_.has_value(), in_quotes(name_), " has no data_offsets");
    require(offsets_->size() == 2, in_quotes(name_),
            " data_offsets must be two numbers but has ", offsets_->size());
    const auto* type =
        std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                     [&](const auto& known) { return known.first == *dtype_; });
    TORCH_CHECK(type != kSafetensorsTypes.end(), "[safetensors] ", path_,
                ": tensor ", in_quotes(name_), " has the dtype ",
                in_quotes(*dtype_),
                ", which is not supported; convert it to BF16, F16 or F32.");
    entry_.dtype = type->second;
    entry_.shape = std::move(*shape_);
    entry_.begin = (*offsets_)[0];
    entry_.end = (*offsets_)[1];
    header_.entries.push_back(std::move(entry_));
  }

  const std::string& path_;
  SafetensorsHeader& header_;
  int depth_ = 0;
  bool in_array_ = false;
  bool metadata_ = false;
  std::string name_;
  std::string field_;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> fields_;
  SafetensorsEntry entry_;
  std::optional<std::string> dtype_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<uint64_t>> offsets_;
};

// Bytes that dtype and shape ask for. The sizes must not overflow even beside
// a zero: LibTorch multiplies them for the strides.
size_t bytes_of(const SafetensorsEntry& entry, const std::string& path) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  bool empty = false;
  for (const int64_t size : entry.shape) {
    empty |= size == 0;
    TORCH_CHECK(
        !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes),
        "[safetensors] ", path, ": tensor ", in_quotes(entry.name),
        " has the shape ", c10::IntArrayRef(entry.shape),
        ", whose size overflows; the file is damaged or hostile.");
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

// The data must be the tensors one after another: no holes, no overlaps.
void check_layout(std::vector<SafetensorsEntry>& entries, size_t data_bytes,
                  const std::string& path) {
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  size_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    TORCH_CHECK(entry.begin <= entry.end && entry.end <= data_bytes,
                "[safetensors] ", path, ": tensor ", in_quotes(entry.name),
                " must lie in bytes 0 to ", data_bytes,
                " but data_offsets are ", entry.begin, " to ", entry.end,
                "; the file is truncated or damaged, fetch it again.");
    const size_t bytes = bytes_of(entry, path);
    TORCH_CHECK(entry.end - entry.begin == bytes, "[safetensors] ", path,
                ": tensor ", in_quotes(entry.name), " ", entry.dtype, " ",
                c10::IntArrayRef(entry.shape), " needs ", bytes,
                " bytes but data_offsets give ", entry.end - entry.begin,
                "; the file is damaged.");
    TORCH_CHECK(entry.begin == covered, "[safetensors] ", path, ": tensor ",
                in_quotes(entry.name), " begins at byte ", entry.begin,
                " but the data before it ends at ", covered,
                "; tensors must leave no hole and not overlap.");
    covered = entry.end;
  }
  TORCH_CHECK(covered == data_bytes, "[safetensors] ", path, ": tensors cover ",
              covered, " bytes but the file has ", data_bytes,
              " of data; the file is damaged.");
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                           const std::string& path) {
  TORCH_CHECK(file.size() >= kLengthBytes, "[safetensors] ", path,
              " must begin with ", kLengthBytes,
              " bytes of header length but has ", file.size(),
              " bytes; fetch the file again.");
  uint64_t length = 0;
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(&length, file.data(), kLengthBytes);
  TORCH_CHECK(length <= file.size() - kLengthBytes, "[safetensors] ", path,
              ": the header says ", length, " bytes but ",
              file.size() - kLengthBytes,
              " follow; the file is truncated or no safetensors file.");
  TORCH_CHECK(length <= kMaxHeaderBytes, "[safetensors] ", path,
              ": the header must not exceed ", kMaxHeaderBytes,
              " bytes but says ", length, "; split the model in shards.");
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  TORCH_CHECK(length > 0 && text[0] == '{', "[safetensors] ", path,
              ": the header of ", length,
              " bytes must be a JSON object; this is no safetensors file.");
  // The parser takes a zero byte for the end and does not look behind it.
  const auto zero = std::string_view(text, length).find('\0');
  TORCH_CHECK(zero == std::string_view::npos, "[safetensors] ", path,
              ": the header is damaged: byte ", zero,
              " is zero; fetch the file again.");
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  HeaderReader reader(path, header);
  json::sax_parse(text, text + length, &reader);
  check_layout(header.entries, file.size() - header.data_offset, path);
  return header;
}

}  // namespace kvcache::model
