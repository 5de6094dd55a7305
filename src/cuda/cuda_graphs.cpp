// cuda/cuda_graphs.cpp - recorded work as at::cuda::CUDAGraph.

#include "kvcache/cuda_graphs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <utility>

#include "cuda/device.h"

namespace kvcache {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// What the caching allocator holds of the device, used or not.
size_t reserved_bytes(c10::DeviceIndex device) {
  const auto stats = allocator::getDeviceStats(device);
  return static_cast<size_t>(stats.reserved_bytes[0].current);
}

// The current stream waits for `side`, or `side` for it.
void wait(const c10::cuda::CUDAStream& waiting,
          const c10::cuda::CUDAStream& other) {
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const cudaError_t recorded = cudaEventRecord(event, other.stream());
  const cudaError_t waited = cudaStreamWaitEvent(waiting.stream(), event, 0);
  C10_CUDA_CHECK(cudaEventDestroy(event));
  C10_CUDA_CHECK(recorded);
  C10_CUDA_CHECK(waited);
}

class CudaWork final : public RecordedWork {
 public:
  CudaWork() : graph_(std::make_unique<at::cuda::CUDAGraph>()) {}
  at::cuda::CUDAGraph& graph() { return *graph_; }
  void set_bytes(size_t bytes) { bytes_ = bytes; }
  void replay() override { graph_->replay(); }
  size_t bytes() const override { return bytes_; }

 private:
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
  size_t bytes_ = 0;
};

class CudaGraphs final : public GraphBackend {
 public:
  explicit CudaGraphs(c10::DeviceIndex device)
      : device_(device), pool_(at::cuda::graph_pool_handle()) {}

  const char* name() const override { return "cuda"; }

  std::unique_ptr<RecordedWork> record(
      const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard on_device(device_);
    const auto current = c10::cuda::getCurrentCUDAStream(device_);
    const auto side = c10::cuda::getStreamFromPool(false, device_);
    wait(side, current);
    std::unique_ptr<RecordedWork> recorded;
    {
      const c10::cuda::CUDAStreamGuard on_side(side);
      // Libraries make handles, workspaces and plans when they are first used,
      // which a capture forbids.
      constexpr int kWarmUps = 2;
      for (int i = 0; i < kWarmUps; ++i) {
        work();
      }
      synchronize();
      recorded = capture(work);
    }
    wait(current, side);
    return recorded;
  }

  void synchronize() override {
    const c10::cuda::CUDAGuard on_device(device_);
    c10::cuda::device_synchronize();
  }

  void retired() override {
    pool_ = at::cuda::graph_pool_handle();
    allocator::emptyCache();
  }

 private:
  std::unique_ptr<RecordedWork> capture(const std::function<void()>& work) {
    auto recorded = std::make_unique<CudaWork>();
    const size_t before = reserved_bytes(device_);
    recorded->graph().capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      work();
      recorded->graph().capture_end();
    } catch (...) {
      end_failed(recorded->graph());
      // A pool may stay bound to a capture that failed.
      pool_ = at::cuda::graph_pool_handle();
      throw;
    }
    const size_t after = reserved_bytes(device_);
    recorded->set_bytes(after > before ? after - before : 0);
    return recorded;
  }

  // The stream must not stay in capture; what it has recorded is of no use.
  void end_failed(at::cuda::CUDAGraph& graph) noexcept {
    try {
      graph.capture_end();
    } catch (...) {  // the capture was invalid: that is why we are here
    }
    try {
      graph.reset();
    } catch (...) {
    }
    (void)cudaGetLastError();
  }

  c10::DeviceIndex device_;
  at::cuda::MempoolId_t pool_;
};

}  // namespace

std::shared_ptr<GraphBackend> cuda_graphs(at::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda(),
                    "[kvcache::cuda_graphs] the device must "
                    "be a CUDA device but is ",
                    device, "; use eager_graphs().");
  const int index = device.has_index() ? device.index() : 0;
  const auto unusable = cuda::unusable_reason(index);
  TORCH_CHECK(!unusable, "[kvcache::cuda_graphs] ", device,
              " must be usable but is not: ", unusable.value_or(""),
              "; use eager_graphs().");
  return std::make_shared<CudaGraphs>(static_cast<c10::DeviceIndex>(index));
}

}  // namespace kvcache
