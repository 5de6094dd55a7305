// kernels/scratch_buffer.h - memory that a loop uses again and again.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvcache::kernels {

// Grows and never shrinks, so that a steady decode allocates nothing.
class ScratchBuffer {
 public:
  void* at_least(size_t bytes) {
    if (bytes > bytes_) {
      const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
      data_.reset();
      bytes_ = 0;
      data_.reset(std::aligned_alloc(kPage, rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = rounded;
    }
    return data_.get();
  }

 private:
  static constexpr size_t kPage = 4096;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace kvcache::kernels
