// tests/support/gguf_writer.h - writes GGUF files, honest or hostile.
//
// Independent of the reader under test and of ggml. Every count, type and
// offset can be overruled, so that a test can lie in exactly one place.

#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvcache::testing {

enum GgufType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kText,
  kArray,
  kU64,
  kI64,
  kF64
};

// Little-endian bytes, one value after another.
class Bytes {
 public:
  template <typename T>
  Bytes& add(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    text_.append(raw, sizeof(T));
    return *this;
  }
  Bytes& text(std::string_view value) {
    add<uint64_t>(value.size());
    text_ += value;
    return *this;
  }
  Bytes& raw(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  Bytes& pad(size_t multiple) {
    while (text_.size() % multiple != 0) text_ += '\0';
    return *this;
  }
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

struct GgufWriter {
  struct Tensor {
    std::string name;
    std::vector<int64_t> sizes;  // the dense dimension first, as in the file
    uint32_t type = 0;           // F32
    std::string data;
    std::optional<uint64_t> offset;  // overrules the true one
  };

  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t alignment = 32;
  std::optional<uint64_t> key_count;  // overrules the true ones
  std::optional<uint64_t> tensor_count;
  std::vector<std::string> keys;  // whole entries: name, type, value
  std::vector<Tensor> tensors;

  template <typename T>
  GgufWriter& value(std::string_view name, GgufType type, T number) {
    keys.push_back(
        Bytes().text(name).add<uint32_t>(type).template add<T>(number).str());
    return *this;
  }
  GgufWriter& u32(std::string_view name, uint32_t number) {
    return value(name, kU32, number);
  }
  GgufWriter& f32(std::string_view name, float number) {
    return value(name, kF32, number);
  }
  GgufWriter& text(std::string_view name, std::string_view content) {
    keys.push_back(Bytes().text(name).add<uint32_t>(kText).text(content).str());
    return *this;
  }
  template <typename T>
  GgufWriter& array(std::string_view name, GgufType type,
                    const std::vector<T>& values) {
    Bytes entry;
    entry.text(name).add<uint32_t>(kArray).add<uint32_t>(type);
    entry.add<uint64_t>(values.size());
    for (const T& item : values) entry.add(item);
    keys.push_back(entry.str());
    return *this;
  }
  GgufWriter& texts(std::string_view name,
                    const std::vector<std::string>& values) {
    Bytes entry;
    entry.text(name).add<uint32_t>(kArray).add<uint32_t>(kText);
    entry.add<uint64_t>(values.size());
    for (const std::string& item : values) entry.text(item);
    keys.push_back(entry.str());
    return *this;
  }
  // Removes the entry of `name`, for tests that then add another.
  GgufWriter& without(std::string_view name) {
    const std::string start = Bytes().text(name).str();
    std::erase_if(
        keys, [&](const std::string& key) { return key.starts_with(start); });
    return *this;
  }
  GgufWriter& tensor(std::string name, std::vector<int64_t> sizes,
                     std::string data, uint32_t type = 0) {
    tensors.push_back(
        {std::move(name), std::move(sizes), type, std::move(data), {}});
    return *this;
  }
  GgufWriter& floats(std::string name, std::vector<int64_t> sizes,
                     const std::vector<float>& values) {
    return tensor(std::move(name), std::move(sizes),
                  std::string(reinterpret_cast<const char*>(values.data()),
                              values.size() * sizeof(float)));
  }

  std::string bytes() const {
    Bytes file;
    file.raw(magic).add<uint32_t>(version);
    file.add<uint64_t>(tensor_count.value_or(tensors.size()));
    file.add<uint64_t>(key_count.value_or(keys.size()));
    for (const std::string& key : keys) file.raw(key);
    Bytes data;
    for (const Tensor& tensor : tensors) {
      file.text(tensor.name).add<uint32_t>(tensor.sizes.size());
      for (const int64_t size : tensor.sizes) file.add<int64_t>(size);
      file.add<uint32_t>(tensor.type);
      file.add<uint64_t>(tensor.offset.value_or(data.str().size()));
      data.raw(tensor.data).pad(alignment);
    }
    if (!tensors.empty()) file.pad(alignment).raw(data.str());
    return file.str();
  }
};

}  // namespace kvcache::testing
