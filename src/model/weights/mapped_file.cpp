// mapped_file.cpp - mmap with errors that say what is wrong
// with the file.

#include "kvcache/model/mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvcache::model {
namespace {

// Closes a descriptor on every way out; a mapping outlives its descriptor.
class Descriptor {
 public:
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  explicit Descriptor(const char* path)
      : fd_(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

}  // namespace

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  const Descriptor file(path_.c_str());
  TORCH_CHECK(file.get() >= 0, "[MappedFile] ", path_.string(),
              " must be readable but got: ", std::strerror(errno),
              "; check the path.");
  struct stat status {};
  TORCH_CHECK(::fstat(file.get(), &status) == 0, "[MappedFile] ",
              path_.string(), " cannot be examined: ", std::strerror(errno),
              "; check the file.");
  TORCH_CHECK(!S_ISDIR(status.st_mode), "[MappedFile] ", path_.string(),
              " must be a file but is a folder; name the file in it.");
  TORCH_CHECK(S_ISREG(status.st_mode), "[MappedFile] ", path_.string(),
              " must be a regular file but is a pipe, socket or device; copy "
              "its content to a file.");
  TORCH_CHECK(status.st_size > 0, "[MappedFile] ", path_.string(),
              " is empty (0 bytes); fetch the file again.");
  size_ = static_cast<size_t>(status.st_size);
  void* data =
      ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), /*offset=*/0);
  TORCH_CHECK(data != MAP_FAILED, "[MappedFile] ", path_.string(), " of ",
              size_, " bytes cannot be mapped: ", std::strerror(errno),
              "; free address space or copy it to another file system.");
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::byte*>(data_), size_); }

void MappedFile::advise(Access access) const noexcept {
  int advice = MADV_NORMAL;
  if (access == Access::kSequential) advice = MADV_SEQUENTIAL;
  if (access == Access::kRandom) advice = MADV_RANDOM;
  ::madvise(const_cast<std::byte*>(data_), size_, advice);
}

void MappedFile::release_pages() const noexcept {
  ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

}  // namespace kvcache::model
