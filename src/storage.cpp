#include "storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cctype>
#include <cstdint>
#include <sstream>

namespace kvcache {

void StorageBytes::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() > 0 &&
      seen_.insert(storage.unsafeGetStorageImpl()).second) {
    total_ += storage.nbytes();
  }
}

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kChar:
      return "int8";
    default: {
      std::string text = c10::toString(dtype);
      for (char& letter : text) {
        letter =
            static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      }
      return text;
    }
  }
}

std::string tensor_text(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "an undefined tensor";
  }
  std::ostringstream text;
  text << tensor.sizes() << ' ' << dtype_text(tensor.scalar_type()) << " on "
       << tensor.device();
  return text.str();
}

namespace {

// Attention strides through storage by position; on 4 KB pages address
// translation costs it up to a third. Only a wish: the kernel may refuse.
void ask_for_huge_pages(const at::Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (begin + tensor.nbytes()) & ~(kHugePage - 1);
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace

at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype,
                     at::Device device) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (!device.is_cpu()) {
    return at::zeros(sizes, options);
  }
  at::Tensor tensor = at::empty(sizes, options);
  ask_for_huge_pages(tensor);  // before the first touch
  return tensor.zero_();
}

at::Tensor new_empty(at::IntArrayRef sizes, at::ScalarType dtype,
                     at::Device device) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace kvcache
