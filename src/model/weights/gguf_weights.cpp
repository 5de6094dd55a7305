// gguf_weights.cpp - a GGUF file's tensors, dequantised,
// heads in order.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <ggml.h>

#include <algorithm>

#include "src/model/weights/weight_files.h"

namespace kvcache::model {
namespace {

// Values that one thread dequantises at a time: 64 KiB, half of a common L2.
constexpr int64_t kChunkValues = 16384;

c10::ScalarType dtype_of(const GgufTensor& tensor) {
  switch (tensor.type) {
    case GGML_TYPE_F16:
      return c10::ScalarType::Half;
    case GGML_TYPE_BF16:
      return c10::ScalarType::BFloat16;
    case GGML_TYPE_F64:
      return c10::ScalarType::Double;
    default:
      return c10::ScalarType::Float;
  }
}

// For architecture llama, converters reorder the rows of q and k inside each
// head, so that the pairs that rotate together are neighbours. This is undone:
// in half rotation order, row (half, i) of a head is the file's row (i, half).
struct HeadOrder {
  int64_t heads = 0;  // 0: rows are as they are needed
  int64_t head_dim = 0;

  int64_t row_in_file(int64_t row) const {
    if (heads == 0) return row;
    const int64_t in_head = row % head_dim;
    const int64_t half = head_dim / 2;
    return row - in_head + 2 * (in_head % half) + in_head / half;
  }
};

HeadOrder order_of(std::string_view name, const ModelConfig& config) {
  const auto ends = [&](std::string_view tail) { return name.ends_with(tail); };
  if (config.architecture != "llama") return {};
  if (ends(".attn_q.weight") || ends(".attn_q.bias"))
    return {config.heads, config.head_dim};
  if (ends(".attn_k.weight") || ends(".attn_k.bias"))
    return {config.kv_heads, config.head_dim};
  return {};
}

template <typename T>
void narrow_into(const float* values, int64_t count, void* out,
                 int64_t offset) {
  T* to = static_cast<T*>(out) + offset;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
}

class GgufWeights : public WeightSource {
 public:
  GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config)
      : file_(std::move(file)), config_(config) {
    for (const GgufTensor& tensor : file_->tensors()) {
      if (tensor.name == "rope_freqs.weight") continue;  // in the config
      WeightInfo info;
      info.name = info.name_in_file = tensor.name;
      info.shape = tensor.shape;
      info.dtype = dtype_of(tensor);
      info.type_name = tensor.type_name;
      info.quantised = tensor.quantised;
      add(std::move(info));
    }
  }

  void release_pages() const noexcept override { file_->release_pages(); }

 private:
  at::Tensor do_read(const WeightInfo& info,
                     c10::ScalarType dtype) const override {
    const GgufTensor& tensor = *file_->find(info.name_in_file);
    at::Tensor out = at::empty(tensor.shape, dtype);
    const HeadOrder order = order_of(info.name, config_);
    if (tensor.shape.size() == 1) {
      read_vector(tensor, order, out);
      return out;
    }
    const int64_t rows = out.numel() / tensor.row_values;
    const int64_t grain =
        std::max<int64_t>(1, kChunkValues / tensor.row_values);
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += grain)
        convert_rows(tensor, order, row, std::min(row + grain, end), out);
    });
    return out;
  }

  // Rows [begin, end) of `out`, in its dtype.
  void convert_rows(const GgufTensor& tensor, const HeadOrder& order,
                    int64_t begin, int64_t end, at::Tensor& out) const {
    const int64_t width = tensor.row_values;
    if (out.scalar_type() == c10::ScalarType::Float)
      return float_rows(tensor, order, begin, end,
                        out.data_ptr<float>() + begin * width);
    std::vector<float> values(static_cast<size_t>((end - begin) * width));
    float_rows(tensor, order, begin, end, values.data());
    const auto count = static_cast<int64_t>(values.size());
    if (out.scalar_type() == c10::ScalarType::BFloat16) {
      narrow_into<c10::BFloat16>(values.data(), count, out.data_ptr(),
                                 begin * width);
    } else {
      narrow_into<c10::Half>(values.data(), count, out.data_ptr(),
                             begin * width);
    }
  }

  void float_rows(const GgufTensor& tensor, const HeadOrder& order,
                  int64_t begin, int64_t end, float* out) const {
    if (order.heads == 0)
      return file_->read_rows(tensor, begin, end - begin, out);
    for (int64_t row = begin; row < end; ++row, out += tensor.row_values)
      file_->read_rows(tensor, order.row_in_file(row), 1, out);
  }

  // A vector is one row of the file: its values change places, not its rows.
  void read_vector(const GgufTensor& tensor, const HeadOrder& order,
                   at::Tensor& out) const {
    std::vector<float> stored(static_cast<size_t>(tensor.row_values));
    file_->read_rows(tensor, 0, 1, stored.data());
    at::Tensor values = at::empty({tensor.row_values}, at::kFloat);
    for (int64_t i = 0; i < tensor.row_values; ++i)
      values.data_ptr<float>()[i] =
          stored[static_cast<size_t>(order.row_in_file(i))];
    out.copy_(values);
  }

  void do_read_rows(const WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    float_rows(*file_->find(info.name_in_file), order_of(info.name, config_),
               first, first + count, out);
  }

  std::shared_ptr<const GgufFile> file_;
  const ModelConfig config_;
};

}  // namespace

std::unique_ptr<WeightSource> open_gguf(std::shared_ptr<const GgufFile> file,
                                        const ModelConfig& config) {
  return std::make_unique<GgufWeights>(std::move(file), config);
}

}  // namespace kvcache::model
