#include "kv_format.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include "kernels/quantise.h"
#include "storage.h"

namespace kvcache {
namespace {

constexpr int64_t kScaleBytes = sizeof(float);

// Codes of a record, padded so that scales of neighbours are aligned.
int64_t padded(int64_t head_dim) {
  return (head_dim + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

template <typename T>
void quantise_all(const Tensor& values, const Tensor& records) {
  const int64_t D = values.size(-1), R = records.size(-1);
  const auto* from = static_cast<const T*>(values.const_data_ptr());
  auto* to = static_cast<int8_t*>(records.data_ptr());
  for (int64_t i = 0; i < values.numel() / D; ++i) {
    kernels::quantise_row(from + i * D, D, to + i * R,
                          reinterpret_cast<float*>(to + (i + 1) * R) - 1);
  }
}

}  // namespace

const char* format_text(KvFormat format) {
  switch (format) {
    case KvFormat::kPlain:
      return "plain";
    case KvFormat::kInt8:
      return "int8";
  }
  return "unknown";
}

int64_t record_size(KvFormat format, int64_t head_dim) {
  return format == KvFormat::kInt8 ? padded(head_dim) + kScaleBytes : head_dim;
}

at::ScalarType record_dtype(KvFormat format, at::ScalarType dtype) {
  return format == KvFormat::kInt8 ? at::kChar : dtype;
}

int64_t value_bytes(KvFormat format, at::ScalarType dtype, int64_t head_dim) {
  return format == KvFormat::kInt8
             ? padded(head_dim)
             : head_dim * static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t scale_bytes(KvFormat format) {
  return format == KvFormat::kInt8 ? kScaleBytes : 0;
}

Tensor codes_of(const Tensor& records, int64_t head_dim) {
  return records.narrow(-1, 0, head_dim);
}

Tensor scales_of(const Tensor& records) {
  const Tensor words = records.view(at::kFloat);
  return words.narrow(-1, words.size(-1) - 1, 1);
}

Tensor quantised(const Tensor& values) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes.back() = record_size(KvFormat::kInt8, sizes.back());
  const Tensor records = new_zeros(sizes, at::kChar, values.device());
  // Memory is read, where the sign of a lazily negated tensor is not.
  const Tensor dense = values.resolve_neg().contiguous();
  if (dense.scalar_type() == at::kFloat) {
    quantise_all<float>(dense, records);
  } else {
    quantise_all<uint16_t>(dense, records);
  }
  return records;
}

Tensor dequantised(const Tensor& records, int64_t head_dim,
                   at::ScalarType dtype) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  return codes_of(records, head_dim)
      .to(at::kFloat)
      .mul(scales_of(records))
      .to(dtype);
}

}  // namespace kvcache
