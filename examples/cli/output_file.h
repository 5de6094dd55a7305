// output_file.h - a file that is there whole or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace kvcache::cli {

// A place for a file. Checked when it is made, so that hours of work are not
// lost to a wrong name; written beside it and renamed into place by write().
class OutputFile {
 public:
  // Throws unless `path` is a regular file or does not exist, in a folder that
  // can be written to.
  explicit OutputFile(const std::string& path);

  // Throws, and leaves what was there before, if it cannot be written.
  void write(std::string_view text) const;

 private:
  std::string name_;             // as given, for messages
  std::filesystem::path place_;  // links followed
};

}  // namespace kvcache::cli
