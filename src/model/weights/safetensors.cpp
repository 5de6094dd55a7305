// safetensors.cpp - mapped safetensors files and folders of
// shards.

#include "kvcache/model/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

bool is_within(const fs::path& path, const fs::path& folder) {
  const auto [end, rest] =
      std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

// The Hugging Face cache keeps the bytes of <repo>/snapshots/<revision>/<file>
// in <repo>/blobs and links there.
bool is_blob_of_snapshot(const fs::path& path, const fs::path& folder) {
  return folder.parent_path().filename() == "snapshots" &&
         path.parent_path() == folder.parent_path().parent_path() / "blobs";
}

// The path of a shard that an index names, checked before anything is opened.
fs::path shard_path(const fs::path& folder, const std::string& name,
                    const std::string& index) {
  const bool plain = !name.empty() && name.front() != '/' &&
                     name.find('\0') == std::string::npos &&
                     name.find_first_of("\\:") == std::string::npos;
  const fs::path relative(name);
  const bool climbs =
      std::any_of(relative.begin(), relative.end(),
                  [](const fs::path& part) { return part == ".."; });
  TORCH_CHECK(plain && !climbs, "[SafetensorsFolder] ", index,
              ": weight_map must name files in its own folder but has ",
              in_quotes(name), "; the index is damaged or hostile.");
  std::error_code error;
  const fs::path root = fs::canonical(folder, error);
  TORCH_CHECK(!error, "[SafetensorsFolder] ", folder.string(), ": ",
              error.message(), "; check the path.");
  const fs::path target = fs::canonical(folder / relative, error);
  TORCH_CHECK(!error, "[SafetensorsFolder] ", index, " names the shard ",
              in_quotes(name), " but it cannot be opened: ", error.message(),
              "; fetch the missing file.");
  TORCH_CHECK(is_within(target, root) || is_blob_of_snapshot(target, root),
              "[SafetensorsFolder] ", index, " names the shard ",
              in_quotes(name),
              ", a link that leaves the folder; copy the file into it.");
  return target;
}

}  // namespace

SafetensorsFile::SafetensorsFile(fs::path path)
    : file_(std::make_shared<MappedFile>(std::move(path))),
      header_(
          parse_safetensors_header(file_->bytes(), file_->path().string())) {
  for (size_t i = 0; i < header_.entries.size(); ++i)
    index_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(
    std::string_view name) const noexcept {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

at::Tensor SafetensorsFile::view(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  TORCH_CHECK(entry != nullptr, "[SafetensorsFile::view] ", path().string(),
              " has no tensor ", in_quotes(name), "; see entries().");
  const std::byte* data =
      file_->bytes().data() + header_.data_offset + entry->begin;
  // The tensor type has no read-only form; the contract forbids writing.
  void* address = const_cast<std::byte*>(data);
  if (entry->dtype == c10::ScalarType::Bool) {
    // Any byte but 0 is true; a bool with another value than 0 or 1 is
    // undefined behaviour.
    return at::from_blob(address, entry->shape, at::kByte).ne(0);
  }
  const size_t size = c10::elementSize(entry->dtype);
  if (reinterpret_cast<uintptr_t>(data) % size != 0) {
    at::Tensor copy = at::empty(entry->shape, entry->dtype);
    std::memcpy(copy.data_ptr(), data, entry->end - entry->begin);
    return copy;
  }
  return at::from_blob(
      address, entry->shape, [file = file_](void*) {}, entry->dtype);
}

SafetensorsFolder::SafetensorsFolder(const fs::path& folder) {
  const fs::path single = folder / kSingleFile;
  const fs::path index = folder / kIndexFile;
  std::error_code ignored;
  // As transformers chooses: the single file wins over an index beside it.
  if (fs::exists(single, ignored) || !fs::exists(index, ignored)) {
    TORCH_CHECK(fs::exists(single, ignored), "[SafetensorsFolder] ",
                folder.string(), " must contain ", kSingleFile, " or ",
                kIndexFile, " but has neither; fetch the weights.");
    shards_.push_back(std::make_unique<SafetensorsFile>(single));
    for (const SafetensorsEntry& entry : shards_[0]->entries()) {
      names_.push_back(entry.name);
      shard_.emplace(entry.name, 0);
    }
    return;
  }
  add_shards(folder, index);
}

void SafetensorsFolder::add_shards(const fs::path& folder,
                                   const fs::path& index) {
  const nlohmann::json document = read_strict_json(index);
  TORCH_CHECK(document.is_object() && document.contains("weight_map") &&
                  document["weight_map"].is_object(),
              "[SafetensorsFolder] ", index.string(),
              " must have an object weight_map; fetch the file again.");
  // Every name is checked before the first shard is opened.
  std::map<std::string, fs::path> paths;
  const auto& weight_map = document["weight_map"];
  for (const auto& [tensor, shard] : weight_map.items()) {
    TORCH_CHECK(shard.is_string(), "[SafetensorsFolder] ", index.string(),
                ": weight_map ", in_quotes(tensor),
                " must be a file name; fetch the file again.");
    const auto& name = shard.get_ref<const std::string&>();
    if (!paths.contains(name))
      paths.emplace(name, shard_path(folder, name, index.string()));
  }
  std::map<std::string, size_t> numbers;
  for (const auto& [name, path] : paths) {
    numbers.emplace(name, shards_.size());
    shards_.push_back(std::make_unique<SafetensorsFile>(path));
  }
  for (const auto& [tensor, shard] : weight_map.items()) {
    const size_t number = numbers.at(shard.get<std::string>());
    TORCH_CHECK(shards_[number]->find(tensor) != nullptr,
                "[SafetensorsFolder] ", index.string(), " says that ",
                in_quotes(tensor), " is in ", shard.get<std::string>(),
                " but that file lacks it; fetch the shards again.");
    shard_.emplace(tensor, number);
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const SafetensorsEntry& entry : shards_[i]->entries()) {
      const auto found = shard_.find(entry.name);
      TORCH_CHECK(found != shard_.end(), "[SafetensorsFolder] ", index.string(),
                  " does not name ", in_quotes(entry.name), ", which ",
                  shards_[i]->path().string(),
                  " contains; fetch the index again.");
      if (found->second == i) names_.push_back(entry.name);
    }
  }
}

const SafetensorsFile& SafetensorsFolder::shard_of(
    std::string_view name) const {
  const auto found = shard_.find(std::string(name));
  TORCH_CHECK(found != shard_.end(), "[SafetensorsFolder] no tensor ",
              in_quotes(name), " in ", shards_.size(),
              " safetensors files; see names().");
  return *shards_[found->second];
}

const SafetensorsEntry* SafetensorsFolder::find(
    std::string_view name) const noexcept {
  const auto found = shard_.find(std::string(name));
  return found == shard_.end() ? nullptr : shards_[found->second]->find(name);
}

at::Tensor SafetensorsFolder::view(std::string_view name) const {
  return shard_of(name).view(name);
}

const fs::path& SafetensorsFolder::file_of(std::string_view name) const {
  return shard_of(name).path();
}

void SafetensorsFolder::release_pages() const noexcept {
  for (const auto& shard : shards_) shard->release_pages();
}

}  // namespace kvcache::model
