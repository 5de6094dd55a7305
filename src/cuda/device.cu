// device.cu - asks a CUDA device to run the smallest kernel.

#include <cuda_runtime.h>

#include "cuda/device.h"

namespace kvcache::cuda {
namespace {

constexpr int kProof = 42;

__global__ void write_proof(int* out) { *out = kProof; }

std::string text_of(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " +
         cudaGetErrorString(status);
}

}  // namespace

std::optional<std::string> unusable_reason(int index) {
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return text_of(status);
  if (index < 0 || index >= count) {
    return "device " + std::to_string(index) + " of " + std::to_string(count);
  }
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(index);
  int* out = nullptr;
  int proof = 0;
  status = cudaMalloc(&out, sizeof(int));
  if (status == cudaSuccess) {
    write_proof<<<1, 1>>>(out);
    status = cudaGetLastError();
  }
  if (status == cudaSuccess) {
    status = cudaMemcpy(&proof, out, sizeof(int), cudaMemcpyDeviceToHost);
  }
  cudaFree(out);
  cudaSetDevice(before);
  if (status != cudaSuccess) return text_of(status);
  if (proof != kProof) return "a kernel ran without effect";
  return std::nullopt;
}

}  // namespace kvcache::cuda
