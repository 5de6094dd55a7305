// output_file.cpp - a file that is there whole or not at all.

#include "examples/cli/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace kvcache::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& name, const std::string& reason) {
  throw std::runtime_error(name + ": cannot be written: " + reason);
}

// A file that is removed again unless it is kept.
class Draft {
 public:
  Draft(const std::string& name, const fs::path& place)
      : path_(place.string() + "." + std::to_string(getpid()) + ".part"),
        file_(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                   0666)) {
    if (file_ < 0) fail(name, std::strerror(errno));
  }
  ~Draft() {
    if (file_ >= 0) close(file_);
    if (!path_.empty()) unlink(path_.c_str());
  }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  bool append(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t written = ::write(file_, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return false;
      text.remove_prefix(static_cast<size_t>(written));
    }
    return true;
  }
  // On the disk before it gets its name.
  bool keep_as(const fs::path& place) {
    if (fsync(file_) != 0 && errno != EINVAL) return false;
    const int file = file_;
    file_ = -1;
    if (close(file) != 0) return false;
    if (rename(path_.c_str(), place.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::string path_;
  int file_;
};

}  // namespace

OutputFile::OutputFile(const std::string& path) : name_(path), place_(path) {
  std::error_code error;
  const fs::file_status status = fs::status(place_, error);
  if (fs::exists(status)) {
    if (!fs::is_regular_file(status)) {
      fail(name_, fs::is_directory(status) ? "it is a folder"
                                           : "it is no regular file");
    }
    place_ = fs::canonical(place_, error);
    if (error) fail(name_, error.message());
  }
  const fs::path folder = place_.has_parent_path() ? place_.parent_path() : ".";
  if (!fs::is_directory(folder, error)) {
    fail(name_, folder.string() + " is no folder");
  }
  if (!place_.has_filename()) fail(name_, "it has no file name");
  if (access(folder.c_str(), W_OK) != 0) {
    fail(name_, folder.string() + ": " + std::strerror(errno));
  }
}

void OutputFile::write(std::string_view text) const {
  Draft draft(name_, place_);
  if (!draft.append(text) || !draft.keep_as(place_)) {
    fail(name_, std::strerror(errno));
  }
}

}  // namespace kvcache::cli
