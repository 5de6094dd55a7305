// gguf_fuzz.cpp - any bytes as a GGUF file, opened and read in every way.

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "kvcache/model/config.h"
#include "kvcache/model/gguf.h"

namespace {

using namespace kvcache::model;

constexpr int64_t kMaxRow = 1 << 16;  // values of a row that is read

// A file in memory that has a path, as GgufFile wants one.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size)
      : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0) std::abort();
    if (::write(descriptor_, data, size) != static_cast<ssize_t>(size))
      std::abort();
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const {
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }

 private:
  int descriptor_;
};

template <typename Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const c10::Error&) {
  }
}

void read_keys(const GgufFile& file) {
  for (const std::string_view key : file.keys()) {
    attempt([&] { (void)file.describe(key); });
    attempt([&] { (void)file.find_integer(key); });
    attempt([&] { (void)file.find_number(key); });
    attempt([&] { (void)file.find_bool(key); });
    attempt([&] { (void)file.find_string(key); });
    attempt([&] { (void)file.find_integers(key); });
    attempt([&] { (void)file.find_numbers(key); });
    attempt([&] { (void)file.find_strings(key); });
  }
}

void read_tensors(const GgufFile& file) {
  for (const GgufTensor& tensor : file.tensors()) {
    if (tensor.row_values > kMaxRow) continue;
    std::vector<float> row(static_cast<size_t>(tensor.row_values));
    const auto rows =
        static_cast<int64_t>(tensor.data.size() / tensor.row_bytes);
    attempt([&] { file.read_rows(tensor, 0, 1, row.data()); });
    attempt([&] { file.read_rows(tensor, rows - 1, 1, row.data()); });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  attempt([&] {
    const MemoryFile memory(data, size);
    const GgufFile file(memory.path());
    read_keys(file);
    read_tensors(file);
    (void)config_from_gguf(file);
  });
  return 0;
}
