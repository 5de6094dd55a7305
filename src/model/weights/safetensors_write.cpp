// safetensors_write.cpp - writes a file that is there whole
// or not at all.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "kvcache/model/safetensors.h"
#include "src/model/weights/safetensors_types.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;
using Named = std::pair<std::string, at::Tensor>;

// Data begins at a multiple of this, so that a mapped tensor can be read by
// vector loads; the format allows spaces after the JSON text.
constexpr size_t kDataAlignment = 64;

std::string_view type_name(const Named& tensor) {
  const c10::ScalarType dtype = tensor.second.scalar_type();
  for (const auto& [name, type] : kSafetensorsTypes)
    if (type == dtype) return name;
  TORCH_CHECK(false, "[write_safetensors] tensor ", in_quotes(tensor.first),
              " is ", dtype,
              ", which the format has no name for; convert it first.");
}

// Checked, on the CPU and dense; wide types first, so that every tensor is
// aligned to its own element, then by name.
std::vector<Named> in_file_order(const std::vector<Named>& tensors) {
  std::set<std::string_view> names;
  std::vector<Named> ordered;
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK(tensor.defined(), "[write_safetensors] tensor ",
                in_quotes(name), " is undefined; leave it out.");
    TORCH_CHECK(names.insert(name).second && name != "__metadata__",
                "[write_safetensors] the name ", in_quotes(name),
                " stands twice or is reserved; rename the tensor.");
    ordered.emplace_back(name, tensor.detach().cpu().contiguous());
  }
  std::sort(ordered.begin(), ordered.end(), [](const Named& a, const Named& b) {
    const size_t wide_a = c10::elementSize(a.second.scalar_type());
    const size_t wide_b = c10::elementSize(b.second.scalar_type());
    return wide_a != wide_b ? wide_a > wide_b : a.first < b.first;
  });
  return ordered;
}

std::string header_of(const std::vector<Named>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const Named& named : tensors) {
    const size_t end = offset + named.second.nbytes();
    header[named.first] = {{"dtype", type_name(named)},
                           {"shape", named.second.sizes().vec()},
                           {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK(false,
                "[write_safetensors] names and metadata must be UTF-8 "
                "text; rename the tensors.");
  }
  const size_t used = sizeof(uint64_t) + text.size();
  text.append((kDataAlignment - used % kDataAlignment) % kDataAlignment, ' ');
  return text;
}

// A file beside `path` that becomes it by commit(), or goes away.
class Replacement {
 public:
  explicit Replacement(const fs::path& path) : path_(path) {
    static std::atomic<uint64_t> counter{0};
    do {  // past what a process of the same number left when it was killed
      temporary_ = path_;
      temporary_ += ".tmp-" + std::to_string(::getpid()) + "-" +
                    std::to_string(counter.fetch_add(1));
      fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                   S_IRUSR | S_IWUSR | S_IRGRP | S_IROTH);
    } while (fd_ < 0 && errno == EEXIST);
    require(fd_ >= 0, "created");
  }
  ~Replacement() {
    if (fd_ >= 0) ::close(fd_);
    if (!committed_) ::unlink(temporary_.c_str());
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(const void* data, size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(fd_, next, bytes);
      if (written < 0 && errno == EINTR) continue;
      require(written > 0, "written");
      next += written;
      bytes -= static_cast<size_t>(written);
    }
  }

  void commit() {
    require(::fsync(fd_) == 0, "flushed to disk");
    const int fd = std::exchange(fd_, -1);
    require(::close(fd) == 0, "closed");
    require(::rename(temporary_.c_str(), path_.c_str()) == 0, "renamed");
    committed_ = true;
    // The new name is durable only once its folder is.
    const fs::path folder =
        path_.has_parent_path() ? path_.parent_path() : fs::path(".");
    const int folder_fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    if (folder_fd < 0) return;
    ::fsync(folder_fd);
    ::close(folder_fd);
  }

 private:
  void require(bool holds, const char* verb) const {
    TORCH_CHECK(holds, "[write_safetensors] ", path_.string(), " could not be ",
                verb, ": ", std::strerror(errno),
                "; check the folder and its free space.");
  }

  fs::path path_;
  fs::path temporary_;
  int fd_ = -1;
  bool committed_ = false;
};

}  // namespace

void write_safetensors(const fs::path& path, const std::vector<Named>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<Named> ordered = in_file_order(tensors);
  const std::string header = header_of(ordered, metadata);
  Replacement file(path);
  const uint64_t length = header.size();
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : ordered)
    file.write(tensor.data_ptr(), tensor.nbytes());
  file.commit();
}

}  // namespace kvcache::model
