// Tensors by the memory they hold: unique storages, text for errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <set>
#include <string>

namespace kvcache {

// Counts each storage once, however many tensors share it.
class StorageBytes {
 public:
  void add(const at::Tensor& tensor);
  size_t total() const { return total_; }

 private:
  std::set<const void*> seen_;
  size_t total_ = 0;
};

// "[1, 4, 8, 64] bfloat16 on cpu"
std::string tensor_text(const at::Tensor& tensor);
// "bfloat16"
std::string dtype_text(at::ScalarType dtype);

// Dense zeros or uninitialised memory that any autograd mode may write later:
// made outside inference mode, requiring no gradient.
at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype,
                     at::Device device);
at::Tensor new_empty(at::IntArrayRef sizes, at::ScalarType dtype,
                     at::Device device);

}  // namespace kvcache
