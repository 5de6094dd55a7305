// cuda_device_test.cpp - the toolkit and the CUDA half of LibTorch, together.

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include "cuda/device.h"

namespace {

TEST(CudaDevice, ADeviceThatIsNotThereIsUnusable) {
  EXPECT_TRUE(kvcache::cuda::unusable_reason(1 << 20).has_value());
}

TEST(CudaDevice, LibTorchComputesOnIt) {
  ASSERT_TRUE(at::Context::hasCUDART()) << "libtorch_cuda is not loaded";
  if (const auto reason = kvcache::cuda::unusable_reason(0)) {
    GTEST_SKIP() << "no usable GPU: " << *reason;
  }
  const at::Tensor on_device =
      at::arange(10, at::TensorOptions().device(at::kCUDA));
  EXPECT_EQ(on_device.sum().item<int64_t>(), 45);
}

}  // namespace
