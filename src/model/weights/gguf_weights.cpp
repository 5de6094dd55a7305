// gguf_weights.cpp - a GGUF file's tensors, dequantised, heads in order.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <cstring>

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

// Converters swap the two axes of a grid of rows (or values, or columns): the
// block (a, b) of [outer, inner] lies at (b, a) in the file. Grids follow each
// other from `first` on.
struct GridOrder {
  int64_t first = 0;
  int64_t outer = 1;
  int64_t inner = 1;
  int64_t block = 1;  // rows that stay together

  bool in_place() const { return outer == 1 || inner == 1; }
  int64_t in_file(int64_t row) const {
    if (in_place() || row < first) return row;
    const int64_t at = row - first;
    const int64_t in_grid = at % (outer * inner * block);
    const int64_t a = in_grid / (inner * block);
    const int64_t b = in_grid / block % inner;
    return row - in_grid + (b * outer + a) * block + in_grid % block;
  }
};

struct Layout {
  GridOrder rows{};  // of a vector: its values
  GridOrder columns{};
};

// For architecture llama, rows (half, i) of q and k are stored as (i, half)
// inside each head, so that the pairs that rotate together are neighbours.
Layout llama_layout(std::string_view tensor, const ModelConfig& config) {
  const bool turned = tensor == "attn_q.weight" || tensor == "attn_q.bias" ||
                      tensor == "attn_k.weight" || tensor == "attn_k.bias";
  if (!turned) return {};
  return {.rows = {.outer = 2, .inner = config.head_dim / 2}};
}

// For architecture qwen35, value heads (key head, i) are stored as (i, key
// head), wherever a value head has a row, a value or a column.
Layout qwen35_layout(std::string_view tensor, const ModelConfig& config) {
  const LinearAttentionConfig& linear = *config.linear_attention;
  GridOrder heads{.outer = linear.key_heads,
                  .inner = linear.value_heads / linear.key_heads};
  if (tensor == "ssm_a" || tensor == "ssm_dt.bias" ||
      tensor == "ssm_alpha.weight" || tensor == "ssm_beta.weight")
    return {.rows = heads};
  heads.block = linear.value_head_dim;
  if (tensor == "attn_gate.weight") return {.rows = heads};
  if (tensor == "ssm_out.weight") return {.columns = heads};
  if (tensor != "attn_qkv.weight" && tensor != "ssm_conv1d.weight") return {};
  heads.first = 2 * linear.key_size();
  return {.rows = heads};
}

Layout layout_of(std::string_view name, const ModelConfig& config) {
  if (!name.starts_with("blk.")) return {};
  name.remove_prefix(std::min(name.size(), name.find('.', 4) + 1));
  if (config.architecture == "llama") return llama_layout(name, config);
  if (config.architecture == "qwen35") return qwen35_layout(name, config);
  return {};
}

constexpr std::string_view kFeedForwardNorm = ".ffn_norm.weight";
constexpr std::string_view kPostAttentionNorm = ".post_attention_norm.weight";

// The same name with another end, if it has the first.
std::string with_end(std::string_view name, std::string_view from,
                     std::string_view to) {
  if (!name.ends_with(from)) return std::string(name);
  name.remove_suffix(from.size());
  return std::string(name) + std::string(to);
}

template <typename T>
void narrow_into(const float* values, int64_t count, void* out,
                 int64_t offset) {
  T* to = static_cast<T*>(out) + offset;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);
}

class GgufWeights : public WeightSource {
 public:
  GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config,
              const OpenOptions& options)
      : file_(std::move(file)), config_(config) {
    size_t drafting = 0;
    for (const GgufTensor& tensor : file_->tensors()) {
      if (tensor.name == "rope_freqs.weight") continue;  // in the config
      if (drafts(tensor.name)) {
        ++drafting;
        continue;
      }
      WeightInfo info;
      info.name_in_file = tensor.name;
      info.name =
          hybrid() ? with_end(tensor.name, kPostAttentionNorm, kFeedForwardNorm)
                   : tensor.name;
      info.shape = tensor.shape;
      info.dtype = dtype_of(tensor);
      info.type_name = tensor.type_name;
      info.quantised = tensor.quantised;
      add(std::move(info));
    }
    if (drafting > 0 && options.log)
      options.log(LogLevel::kInfo,
                  config.source + ": " + std::to_string(drafting) +
                      " tensors of layers that only draft are left out.");
  }

  std::string name_in_file(std::string_view name) const override {
    return hybrid() ? with_end(name, kFeedForwardNorm, kPostAttentionNorm)
                    : std::string(name);
  }

  void release_pages() const noexcept override { file_->release_pages(); }

 private:
  bool hybrid() const { return config_.architecture == "qwen35"; }

  // A tensor of a layer after the model's own, which drafts the token after
  // next (nextn_predict_layers). The file counts them as its layers too.
  bool drafts(std::string_view name) const {
    if (!hybrid() || !name.starts_with("blk.")) return false;
    int64_t layer = 0;
    const auto [end, error] =
        std::from_chars(name.data() + 4, name.data() + name.size(), layer);
    return error == std::errc() && end != name.data() + name.size() &&
           *end == '.' && layer >= config_.layers &&
           layer < file_->integer("qwen35.block_count");
  }

  at::Tensor do_read(const WeightInfo& info,
                     c10::ScalarType dtype) const override {
    const GgufTensor& tensor = *file_->find(info.name_in_file);
    at::Tensor out = at::empty(tensor.shape, dtype);
    const Layout layout = layout_of(info.name, config_);
    if (tensor.shape.size() == 1) {
      read_vector(tensor, layout.rows, out);
      return out;
    }
    const int64_t rows = out.numel() / tensor.row_values;
    const int64_t grain =
        std::max<int64_t>(1, kChunkValues / tensor.row_values);
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += grain)
        convert_rows(tensor, layout, row, std::min(row + grain, end), out);
    });
    return out;
  }

  // Rows [begin, end) of `out`, in its dtype.
  void convert_rows(const GgufTensor& tensor, const Layout& layout,
                    int64_t begin, int64_t end, at::Tensor& out) const {
    const int64_t width = tensor.row_values;
    if (out.scalar_type() == c10::ScalarType::Float)
      return float_rows(tensor, layout, begin, end,
                        out.data_ptr<float>() + begin * width);
    std::vector<float> values(static_cast<size_t>((end - begin) * width));
    float_rows(tensor, layout, begin, end, values.data());
    const auto count = static_cast<int64_t>(values.size());
    if (out.scalar_type() == c10::ScalarType::BFloat16) {
      narrow_into<c10::BFloat16>(values.data(), count, out.data_ptr(),
                                 begin * width);
    } else {
      narrow_into<c10::Half>(values.data(), count, out.data_ptr(),
                             begin * width);
    }
  }

  void float_rows(const GgufTensor& tensor, const Layout& layout, int64_t begin,
                  int64_t end, float* out) const {
    const int64_t width = tensor.row_values;
    if (layout.rows.in_place()) {
      file_->read_rows(tensor, begin, end - begin, out);
    } else {
      for (int64_t row = begin; row < end; ++row)
        file_->read_rows(tensor, layout.rows.in_file(row), 1,
                         out + (row - begin) * width);
    }
    if (layout.columns.in_place()) return;
    std::vector<float> stored(static_cast<size_t>(width));
    for (float* row = out; row < out + (end - begin) * width; row += width) {
      std::copy(row, row + width, stored.begin());
      for (int64_t i = 0; i < width; ++i)
        row[i] = stored[static_cast<size_t>(layout.columns.in_file(i))];
    }
  }

  // A vector is one row of the file: its values change places, not its rows.
  void read_vector(const GgufTensor& tensor, const GridOrder& order,
                   at::Tensor& out) const {
    std::vector<float> stored(static_cast<size_t>(tensor.row_values));
    file_->read_rows(tensor, 0, 1, stored.data());
    at::Tensor values = at::empty({tensor.row_values}, at::kFloat);
    for (int64_t i = 0; i < tensor.row_values; ++i)
      values.data_ptr<float>()[i] =
          stored[static_cast<size_t>(order.in_file(i))];
    out.copy_(values);
  }

  void do_read_rows(const WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    float_rows(*file_->find(info.name_in_file), layout_of(info.name, config_),
               first, first + count, out);
  }

  BlockType do_block_type(const WeightInfo& info) const override {
    const GgufTensor& tensor = *file_->find(info.name_in_file);
    const bool whole = layout_of(info.name, config_).columns.in_place();
    return whole ? block_type_of(tensor.type) : BlockType::kNone;
  }

  void do_read_blocks(const WeightInfo& info, int64_t first, int64_t count,
                      std::byte* out) const override {
    const GgufTensor& tensor = *file_->find(info.name_in_file);
    const GridOrder rows = layout_of(info.name, config_).rows;
    for (int64_t row = first; row < first + count; ++row) {
      const auto at = static_cast<size_t>(rows.in_file(row)) * tensor.row_bytes;
      std::memcpy(out, tensor.data.data() + at, tensor.row_bytes);
      out += tensor.row_bytes;
    }
  }

  std::shared_ptr<const GgufFile> file_;
  const ModelConfig config_;
};

}  // namespace

BlockType block_type_of(int type) {
  switch (type) {
    case GGML_TYPE_Q4_0:
      return BlockType::kQ4_0;
    case GGML_TYPE_Q4_1:
      return BlockType::kQ4_1;
    case GGML_TYPE_Q5_0:
      return BlockType::kQ5_0;
    case GGML_TYPE_Q8_0:
      return BlockType::kQ8_0;
    default:
      return BlockType::kNone;
  }
}

std::unique_ptr<WeightSource> open_gguf(std::shared_ptr<const GgufFile> file,
                                        const ModelConfig& config,
                                        const OpenOptions& options) {
  return std::make_unique<GgufWeights>(std::move(file), config, options);
}

}  // namespace kvcache::model
