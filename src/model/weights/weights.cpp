// weights.cpp - opens a model and accounts for every tensor
// of it.

#include "kvcache/model/weights.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <system_error>

#include "src/model/weights/strict_json.h"
#include "src/model/weights/weight_files.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHead = "output.weight";
constexpr const char* kEmbedding = "token_embd.weight";
constexpr size_t kNamed = 3;  // tensors that a message names of each kind

bool is_output_type(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float ||
         dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

}  // namespace

bool WeightSource::contains(std::string_view name) const noexcept {
  return index_.contains(std::string(name));
}

const WeightInfo& WeightSource::info(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  TORCH_CHECK(found != index_.end(), "[WeightSource] no tensor ",
              in_quotes(name), " among ", tensors_.size(), "; see tensors().");
  return tensors_[found->second];
}

const std::vector<int64_t>& WeightSource::shape(std::string_view name) const {
  return info(name).shape;
}

c10::ScalarType WeightSource::dtype(std::string_view name) const {
  return info(name).dtype;
}

at::Tensor WeightSource::read(std::string_view name,
                              c10::ScalarType dtype) const {
  TORCH_CHECK(is_output_type(dtype),
              "[WeightSource::read] dtype must be "
              "float32, bfloat16 or float16 but got ",
              dtype, ".");
  return do_read(info(name), dtype);
}

int64_t block_bytes(BlockType type) {
  switch (type) {
    case BlockType::kQ4_0:
      return 18;
    case BlockType::kQ4_1:
      return 20;
    case BlockType::kQ5_0:
      return 22;
    case BlockType::kQ8_0:
      return 34;
    case BlockType::kNone:
      break;
  }
  return 0;
}

const WeightInfo& WeightSource::rows_of(std::string_view name, int64_t first,
                                        int64_t count) const {
  const WeightInfo& tensor = info(name);
  TORCH_CHECK(tensor.shape.size() == 2, "[WeightSource::read_rows] ",
              in_quotes(name), " must be a matrix but has the shape ",
              c10::IntArrayRef(tensor.shape), ".");
  TORCH_CHECK(first >= 0 && count >= 0 && first <= tensor.shape[0] - count,
              "[WeightSource::read_rows] rows ", first, " to ", first + count,
              " of ", in_quotes(name), " must lie in 0 to ", tensor.shape[0],
              ".");
  return tensor;
}

void WeightSource::read_rows(std::string_view name, int64_t first,
                             int64_t count, float* out) const {
  do_read_rows(rows_of(name, first, count), first, count, out);
}

void WeightSource::read_rows(std::string_view name, int64_t first,
                             int64_t count, at::Tensor& out) const {
  const WeightInfo& tensor = rows_of(name, first, count);
  const std::vector<int64_t> want{count, tensor.shape[1]};
  TORCH_CHECK(out.defined() && out.sizes() == c10::IntArrayRef(want) &&
                  out.is_contiguous() && out.device().is_cpu() &&
                  is_output_type(out.scalar_type()),
              "[WeightSource::read_rows] out must be ", c10::IntArrayRef(want),
              ", contiguous float32, bfloat16 or float16 on the CPU.");
  if (out.scalar_type() == c10::ScalarType::Float)
    return do_read_rows(tensor, first, count, out.data_ptr<float>());
  std::vector<float> values(static_cast<size_t>(count * tensor.shape[1]));
  do_read_rows(tensor, first, count, values.data());
  out.copy_(at::from_blob(values.data(), want, at::kFloat));
}

BlockType WeightSource::block_type(std::string_view name) const {
  const WeightInfo& tensor = info(name);
  return tensor.shape.size() == 2 ? do_block_type(tensor) : BlockType::kNone;
}

void WeightSource::read_blocks(std::string_view name, int64_t first,
                               int64_t count, std::byte* out) const {
  const WeightInfo& tensor = rows_of(name, first, count);
  TORCH_CHECK(do_block_type(tensor) != BlockType::kNone,
              "[WeightSource::read_blocks] ", in_quotes(name),
              " must be stored in blocks of 32 values but is ",
              tensor.type_name, "; use read_rows().");
  do_read_blocks(tensor, first, count, out);
}

BlockType WeightSource::do_block_type(const WeightInfo& /*info*/) const {
  return BlockType::kNone;
}

void WeightSource::do_read_blocks(const WeightInfo& info, int64_t /*first*/,
                                  int64_t /*count*/, std::byte* /*out*/) const {
  TORCH_CHECK(false, "[WeightSource::read_blocks] ", in_quotes(info.name),
              " is not stored in blocks.");
}

std::string WeightSource::name_in_file(std::string_view name) const {
  return std::string(name);
}

void WeightSource::add(WeightInfo info) {
  const auto [place, added] = index_.emplace(info.name, tensors_.size());
  TORCH_CHECK(added, "[open_model] the tensors ",
              in_quotes(tensors_[place->second].name_in_file), " and ",
              in_quotes(info.name_in_file),
              " are the same weight; remove one of them.");
  tensors_.push_back(std::move(info));
}

void WeightSource::leave_out(std::string_view name) {
  std::erase_if(tensors_,
                [&](const WeightInfo& info) { return info.name == name; });
  index_.clear();
  for (size_t i = 0; i < tensors_.size(); ++i)
    index_.emplace(tensors_[i].name, i);
}

namespace {

// Collects the tensors of one kind of block under the block's name.
class Expected {
 public:
  void matrix(const std::string& name, int64_t out, int64_t in, bool bias) {
    tensors_.push_back({prefix_ + name + ".weight", {out, in}});
    if (bias) tensors_.push_back({prefix_ + name + ".bias", {out}});
  }
  void norm(const std::string& name, int64_t size, bool bias = false) {
    tensors_.push_back({prefix_ + name + ".weight", {size}});
    if (bias) tensors_.push_back({prefix_ + name + ".bias", {size}});
  }
  void vector(const std::string& name, int64_t size) {
    tensors_.push_back({prefix_ + name, {size}});
  }
  void enter(std::string prefix) { prefix_ = std::move(prefix); }
  std::vector<ExpectedTensor> take() { return std::move(tensors_); }

 private:
  std::string prefix_;
  std::vector<ExpectedTensor> tensors_;
};

void expect_attention(const ModelConfig& config, Expected& expected) {
  const int64_t width = config.hidden_size;
  const int64_t query = config.query_size() * (config.output_gate ? 2 : 1);
  if (config.fused_qkv) {
    expected.matrix("attn_qkv", query + 2 * config.kv_size(), width,
                    config.qkv_bias);
  } else {
    expected.matrix("attn_q", query, width, config.qkv_bias);
    expected.matrix("attn_k", config.kv_size(), width, config.qkv_bias);
    expected.matrix("attn_v", config.kv_size(), width, config.qkv_bias);
  }
  if (config.qk_norm) {
    expected.norm("attn_q_norm", config.head_dim);
    expected.norm("attn_k_norm", config.head_dim);
  }
  expected.matrix("attn_output", width, config.query_size(),
                  config.output_bias);
}

void expect_linear_attention(const ModelConfig& config, Expected& expected) {
  const LinearAttentionConfig& linear = *config.linear_attention;
  const int64_t width = config.hidden_size;
  expected.matrix("attn_qkv", linear.conv_channels(), width, false);
  expected.matrix("attn_gate", linear.value_size(), width, false);
  expected.matrix("ssm_beta", linear.value_heads, width, false);
  expected.matrix("ssm_alpha", linear.value_heads, width, false);
  expected.matrix("ssm_conv1d", linear.conv_channels(), linear.conv_kernel,
                  false);
  expected.vector("ssm_a", linear.value_heads);
  expected.vector("ssm_dt.bias", linear.value_heads);
  expected.norm("ssm_norm", linear.value_head_dim);
  expected.matrix("ssm_out", width, linear.value_size(), false);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream out;
  out << c10::IntArrayRef(shape);
  return out.str();
}

// "3 tensors are missing: a, b, c" with a few of them named.
void append(std::string& message, const std::vector<std::string>& names,
            const char* what) {
  if (names.empty()) return;
  if (!message.empty()) message += "; ";
  message += std::to_string(names.size()) +
             (names.size() == 1 ? " tensor is " : " tensors are ") + what +
             ": ";
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    message += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kNamed) message += ", ...";
}

}  // namespace

std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config) {
  const bool layer_norm = config.norm == Norm::kLayer;
  const int64_t width = config.hidden_size;
  Expected expected;
  expected.matrix("token_embd", config.vocab_size, width, false);
  if (config.positions == Positions::kLearned)
    expected.matrix("position_embd", config.context_length, width, false);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    expected.enter("blk." + std::to_string(layer) + ".");
    expected.norm("attn_norm", width, layer_norm);
    if (config.layer_types[static_cast<size_t>(layer)] == LayerType::kLinear) {
      expect_linear_attention(config, expected);
    } else {
      expect_attention(config, expected);
    }
    expected.norm("ffn_norm", width, layer_norm);
    if (config.gated_mlp)
      expected.matrix("ffn_gate", config.intermediate_size, width,
                      config.mlp_bias);
    expected.matrix("ffn_up", config.intermediate_size, width, config.mlp_bias);
    expected.matrix("ffn_down", width, config.intermediate_size,
                    config.mlp_bias);
  }
  expected.enter("");
  expected.norm("output_norm", width, layer_norm);
  if (!config.tie_word_embeddings)
    expected.matrix("output", config.vocab_size, width, false);
  return expected.take();
}

void check_tensors(const ModelConfig& config, const WeightSource& source) {
  std::vector<std::string> missing;
  std::vector<std::string> misshapen;
  std::vector<std::string> unexpected;
  std::unordered_map<std::string, bool> known;
  for (const ExpectedTensor& want : expected_tensors(config)) {
    known.emplace(want.name, true);
    if (!source.contains(want.name)) {
      missing.push_back(in_quotes(source.name_in_file(want.name)));
    } else if (source.shape(want.name) != want.shape) {
      misshapen.push_back(in_quotes(source.info(want.name).name_in_file) +
                          " is " + shape_text(source.shape(want.name)) +
                          " but the configuration needs " +
                          shape_text(want.shape));
    }
  }
  for (const WeightInfo& tensor : source.tensors())
    if (!known.contains(tensor.name))
      unexpected.push_back(in_quotes(tensor.name_in_file) + " " +
                           shape_text(tensor.shape));
  std::string message;
  append(message, missing, "missing");
  append(message, unexpected, "unexpected");
  append(message, misshapen, "of another shape");
  TORCH_CHECK(message.empty(), "[open_model] ", config.source, ": ", message,
              "; the files do not belong together or one is incomplete.");
}

namespace {

// A tied model may bring its head once more (K90, K91 of the bug reports that
// the tests name): an equal one is dropped, a different one wins.
void settle_head(const OpenOptions& options, ModelConfig& config,
                 WeightSource& weights) {
  if (!config.tie_word_embeddings || !weights.contains(kHead)) return;
  config.tie_word_embeddings = false;
  check_tensors(config, weights);  // before anything is read
  c10::ScalarType dtype = weights.dtype(kHead);
  if (dtype != weights.dtype(kEmbedding) || !is_output_type(dtype))
    dtype = c10::ScalarType::Float;
  const bool same =
      weights.read(kHead, dtype).equal(weights.read(kEmbedding, dtype));
  weights.release_pages();
  if (same) {
    config.tie_word_embeddings = true;
    weights.leave_out(kHead);
  } else if (options.log) {
    options.log(LogLevel::kWarning,
                config.source + ": tie_word_embeddings is true but " +
                    weights.info(kHead).name_in_file +
                    " differs from the embeddings; the file's head is used.");
  }
}

// What most values of the model are stored in.
c10::ScalarType main_dtype(const WeightSource& weights) {
  std::map<c10::ScalarType, int64_t> values;
  for (const WeightInfo& tensor : weights.tensors()) {
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    values[tensor.dtype] += count;
  }
  return std::max_element(
             values.begin(), values.end(),
             [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

}  // namespace

OpenedModel open_model(const fs::path& path, const OpenOptions& options) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  TORCH_CHECK(fs::exists(status), "[open_model] ", path.string(),
              " does not exist; give a folder with config.json and "
              "safetensors, or a .gguf file.");
  TORCH_CHECK(fs::is_directory(status) || path.extension() != ".safetensors",
              "[open_model] ", path.string(),
              " is one file of a model; give its folder, with config.json.");
  OpenedModel model;
  model.path = path;
  if (fs::is_directory(status)) {
    model.kind = FileKind::kSafetensors;
    model.config = config_from_json(path, options);
    model.weights = open_safetensors(path, model.config, options);
  } else {
    model.kind = FileKind::kGguf;
    model.gguf = std::make_shared<GgufFile>(path);
    model.config = config_from_gguf(*model.gguf);
    model.weights = open_gguf(model.gguf, model.config, options);
  }
  settle_head(options, model.config, *model.weights);
  check_tensors(model.config, *model.weights);
  const auto& tensors = model.weights->tensors();
  model.quantised =
      std::any_of(tensors.begin(), tensors.end(),
                  [](const WeightInfo& tensor) { return tensor.quantised; });
  model.dtype = main_dtype(*model.weights);
  return model;
}

}  // namespace kvcache::model
