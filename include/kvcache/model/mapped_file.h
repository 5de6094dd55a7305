// kvcache/model/mapped_file.h - a file mapped into memory, read-only.

#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace kvcache::model {

// The bytes of one regular file for as long as the object lives. Thread-safe.
//
// Errors: the constructor throws for a file that is missing, empty, a folder or
// not a regular file. A file that another process shortens while it is mapped
// raises SIGBUS on access, as with every mapping: replace files by renaming.
class MappedFile {
 public:
  enum class Access { kNormal, kSequential, kRandom };

  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

  // A hint on how the pages will be read.
  void advise(Access access) const noexcept;

  // Gives the resident pages back; the next access reads them again.
  void release_pages() const noexcept;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvcache::model
