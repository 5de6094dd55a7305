// kvcache/model/gguf.h - a GGUF file: metadata, tensors, dequantised rows.
//
// Parsing and dequantisation are ggml's. Its parser trusts some of what it
// reads, so each file is scanned first and refused when a length, count, type,
// alignment or offset is out of bounds.

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcache/model/mapped_file.h"

struct gguf_context;

namespace kvcache::model {

// Checks everything that ggml's parser takes on trust; throws with the key or
// tensor and the numbers. `path` only names the file in errors.
void check_gguf(std::span<const std::byte> file, const std::string& path);

// One tensor of a file. Rows are runs of shape.back() values.
struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  // torch order: the last dimension is dense
  int type = 0;                // ggml_type
  std::string type_name;       // "q4_1"
  bool quantised = false;      // blocks with scales, not plain numbers
  int64_t row_values = 0;
  size_t row_bytes = 0;
  std::span<const std::byte> data;
};

// A mapped GGUF file. Thread-safe.
//
// Metadata: find_x() is empty when the key is missing; x() throws then. Both
// throw, naming the key, when the value is of another type. Views live as long
// as the object.
class GgufFile {
 public:
  explicit GgufFile(std::filesystem::path path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::filesystem::path& path() const noexcept { return file_.path(); }

  std::vector<std::string_view> keys() const;
  bool has(std::string_view key) const noexcept;

  std::optional<int64_t> find_integer(std::string_view key) const;
  std::optional<double> find_number(std::string_view key) const;  // f32, f64
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::string_view> find_string(std::string_view key) const;
  std::optional<std::vector<int64_t>> find_integers(std::string_view key) const;
  std::optional<std::vector<float>> find_numbers(std::string_view key) const;
  std::optional<std::vector<bool>> find_bools(std::string_view key) const;
  std::optional<std::vector<std::string_view>> find_strings(
      std::string_view key) const;

  int64_t integer(std::string_view key) const;
  double number(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::string_view string(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key) const;
  std::vector<float> numbers(std::string_view key) const;
  std::vector<std::string_view> strings(std::string_view key) const;

  // True if the value of `key` is an array (of any type).
  bool is_array(std::string_view key) const;
  // A value as a person reads it: arrays as their type and length.
  std::string describe(std::string_view key) const;

  const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  const GgufTensor* find(std::string_view name) const noexcept;

  // Rows [first, first + count) of a tensor as float32 into `out`, which holds
  // count * row_values values.
  void read_rows(const GgufTensor& tensor, int64_t first, int64_t count,
                 float* out) const;

  void release_pages() const noexcept { file_.release_pages(); }

 private:
  struct Free {
    void operator()(gguf_context* context) const noexcept;
  };

  std::optional<int64_t> id_of(std::string_view key) const noexcept;
  int element_type(std::string_view key, int64_t id, const char* want) const;
  void index_tensors();

  MappedFile file_;
  std::unique_ptr<gguf_context, Free> context_;
  std::unordered_map<std::string_view, int64_t> keys_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> index_;  // into tensors_
};

}  // namespace kvcache::model
