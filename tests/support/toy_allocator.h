// support/toy_allocator.h - a CPU allocator for tests: counts, fills fresh
// memory with NaN, fails on demand.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace kvcache::toy {

// Once installed it serves every storage on the CPU of this process.
class TestAllocator final : public c10::Allocator {
 public:
  static TestAllocator& install() {
    static TestAllocator* made = [] {
      auto* allocator = new TestAllocator;  // lives as long as the process
      c10::SetCPUAllocator(allocator, /*priority=*/100);
      return allocator;
    }();
    return *made;
  }

  c10::DataPtr allocate(size_t bytes) override {
    ++allocations;
    if (fail_after >= 0 && fail_after-- == 0) {
      TORCH_CHECK(false, "[TestAllocator] out of memory, as planned.");
    }
    auto* block = new Block{c10::alloc_cpu(bytes), bytes};
    if (block->data != nullptr) {
      std::memset(block->data, 0xFF, bytes);  // NaN in float32 and bfloat16
    }
    live_bytes += static_cast<int64_t>(bytes);
    return {block->data, block, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::atomic<int64_t> allocations = 0;
  std::atomic<int64_t> live_bytes = 0;
  std::atomic<int64_t> fail_after = -1;  // n: n more succeed, the next throws

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    install().live_bytes -= static_cast<int64_t>(block->bytes);
    c10::free_cpu(block->data);
    delete block;
  }
};

}  // namespace kvcache::toy
