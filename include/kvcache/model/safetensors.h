// kvcache/model/safetensors.h - safetensors files: one, many shards, writing.
//
// Files are untrusted: every number of a header is checked before it is used.
// Format: 8 bytes little-endian header length, a JSON object, then the data.
// Source: the format section of the safetensors README. Stricter here: tensors
// cover the data without holes and overlaps, and no key stands twice.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/model/mapped_file.h"

namespace kvcache::model {

// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  size_t begin = 0;  // bytes, counted from the first byte of the data section
  size_t end = 0;
};

// What the JSON header says, checked against the size of the file.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
  size_t data_offset = 0;  // bytes, counted from the first byte of the file
};

// Reads and checks the header of a whole file. `path` only names it in errors.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                           const std::string& path);

// One safetensors file, mapped. Thread-safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const std::vector<SafetensorsEntry>& entries() const noexcept {
    return header_.entries;
  }
  const std::map<std::string, std::string>& metadata() const noexcept {
    return header_.metadata;
  }
  const std::filesystem::path& path() const noexcept { return file_->path(); }
  const SafetensorsEntry* find(std::string_view name) const noexcept;

  // The tensor on the mapping, which lives as long as the tensor does; reading
  // is the only thing that may be done with it. A copy where the data cannot be
  // used in place (bool, or not aligned to its type).
  at::Tensor view(std::string_view name) const;

  void release_pages() const noexcept { file_->release_pages(); }

 private:
  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> index_;  // into entries()
};

// The tensors of a folder: model.safetensors, or else the shards that
// model.safetensors.index.json names. Other files are not looked at.
//
// A shard's name must stay in the folder. A symbolic link that leaves it is
// refused too, except into `../../blobs` of a folder under `snapshots`: the
// layout of the Hugging Face cache.
class SafetensorsFolder {
 public:
  explicit SafetensorsFolder(const std::filesystem::path& folder);

  // Names in the order of shards and data.
  const std::vector<std::string>& names() const noexcept { return names_; }
  const SafetensorsEntry* find(std::string_view name) const noexcept;
  at::Tensor view(std::string_view name) const;
  const std::filesystem::path& file_of(std::string_view name) const;
  void release_pages() const noexcept;

 private:
  void add_shards(const std::filesystem::path& folder,
                  const std::filesystem::path& index);
  const SafetensorsFile& shard_of(std::string_view name) const;

  std::vector<std::unique_ptr<SafetensorsFile>> shards_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, size_t> shard_;  // by tensor name
};

// Writes `tensors` to `path`: the file is there complete, or not at all (a
// temporary file beside it, flushed to disk, then renamed). An existing file is
// replaced. Throws for a name given twice or a dtype that the format lacks.
void write_safetensors(
    const std::filesystem::path& path,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors,
    const std::map<std::string, std::string>& metadata = {});

}  // namespace kvcache::model
