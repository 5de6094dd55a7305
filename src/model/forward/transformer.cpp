// src/model/forward/transformer.cpp - the decoder: embedding, layers, head.
#include "kvcache/model/transformer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <utility>
#include <vector>

#include "src/model/forward/blocks.h"
#include "src/model/forward/loader.h"
#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

constexpr const char* kEmbedding = "token_embd.weight";
constexpr const char* kPositions = "position_embd.weight";

// Rows of the head that run together: bounds the memory of all_logits.
constexpr int64_t kHeadRows = 256;

std::span<const int64_t> values_of(const Tensor& ids) {
  return {ids.const_data_ptr<int64_t>(), static_cast<size_t>(ids.numel())};
}

std::vector<int64_t> sliding_windows(const ModelConfig& config) {
  std::vector<int64_t> sliding;
  for (const LayerType type : config.layer_types) {
    sliding.push_back(
        type == LayerType::kSliding ? config.sliding_window.value_or(0) : 0);
  }
  return sliding;
}

// Of the tokens of each row that the caller wants logits of: their indices, -1
// where there is none.
std::vector<int64_t> wanted_tokens(const Tokens& tokens, bool all) {
  std::vector<int64_t> wanted;
  for (int64_t row = 0; row < tokens.rows; ++row) {
    int64_t last = -1;
    for (int64_t t = 0; t < tokens.per_row; ++t) {
      const int64_t i = row * tokens.per_row + t;
      if (tokens.live(i)) last = i;
      if (all) wanted.push_back(tokens.live(i) ? i : -1);
    }
    if (!all) wanted.push_back(last);
  }
  return wanted;
}

// A step of so many tokens gives its scratch, some 20 KB a token, back.
constexpr int64_t kTrimmedTokens = 128;

// Memory that was freed goes back to the system.
void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

struct Transformer::Impl {
  Impl(ModelConfig of, std::shared_ptr<const WeightSource> from,
       const LoadOptions& options);

  // Checks ids against the step's shape; contiguous.
  Tensor checked_ids(const Tensor& ids) const;
  void check_tokens(const Tokens& tokens) const;
  Tensor run(const Tokens& tokens, LayerMemory& memory,
             const ForwardOptions& options) const;
  void run_layers(Pass& pass, const std::vector<int64_t>& wanted,
                  const Tensor& logits) const;
  void embed(const Pass& pass) const;
  void write_logits(Pass& pass, const Tensor& delta,
                    const std::vector<int64_t>& wanted,
                    const Tensor& logits) const;

  ModelConfig config;
  std::shared_ptr<const WeightSource> source;  // embeddings are read from it
  at::ScalarType dtype;
  std::vector<float> frequencies;  // empty: learned positions
  std::vector<int64_t> sliding;    // [layers]
  PackedLinear head;
  std::vector<Layer> layers;
  std::optional<Normalisation> final_norm;
  size_t weight_bytes = 0;
  bool row_exact = false;
};

Transformer::Impl::Impl(ModelConfig of,
                        std::shared_ptr<const WeightSource> from,
                        const LoadOptions& options)
    : config(std::move(of)), source(std::move(from)) {
  TORCH_CHECK_VALUE(source != nullptr,
                    "[Transformer] weights must be given but are null.");
  config.validate();
  check_tensors(config, *source);
  dtype = options.dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16,
                    "[Transformer] dtype must be float32 or bfloat16 but got ",
                    dtype, "; choose one of them.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !config.output_gate, "[Transformer] ", config.source,
      " asks for gated attention outputs, which this forward has not; use a "
      "model without them.");
  if (config.positions == Positions::kRotary) {
    frequencies = inverse_frequencies(config.rope);
  }
  sliding = sliding_windows(config);
  if (options.log && !PackedLinear::packs(dtype)) {
    options.log(LogLevel::kWarning,
                c10::str("this CPU cannot pack ", dtype,
                         " weights: long prompts will be slow; float32 is "
                         "faster here"));
  }
  const c10::InferenceMode inference;
  Loader loader(config, *source, dtype, options);
  head = loader.head();  // the largest first, while little else is there
  for (int64_t i = 0; i < config.layers; ++i) layers.push_back(loader.layer(i));
  final_norm = loader.final_norm();
  weight_bytes = loader.bytes();
  row_exact = loader.row_exact();
  source->release_pages();
  trim_heap();
  if (options.progress) options.progress(1.0);
}

Tensor Transformer::Impl::checked_ids(const Tensor& ids) const {
  TORCH_CHECK_VALUE(
      ids.defined() && ids.dim() == 2 && ids.scalar_type() == at::kLong &&
          ids.device().is_cpu() && ids.numel() > 0,
      "[Transformer::forward] ids must be a non-empty [B, T] of int64 on the "
      "CPU but got ",
      ids.defined() ? c10::str(ids.sizes(), " of ", ids.scalar_type(), " on ",
                               ids.device())
                    : std::string("an undefined tensor"),
      "; pass one row of token ids per sequence.");
  return ids.contiguous();
}

void Transformer::Impl::check_tokens(const Tokens& tokens) const {
  for (int64_t i = 0; i < tokens.count(); ++i) {
    if (!tokens.live(i)) continue;
    const int64_t id = tokens.ids[static_cast<size_t>(i)];
    const int64_t position = tokens.positions[static_cast<size_t>(i)];
    TORCH_CHECK_INDEX(id >= 0 && id < config.vocab_size,
                      "[Transformer::forward] ids must be in [0, ",
                      config.vocab_size, ") but token ", i % tokens.per_row,
                      " of row ", i / tokens.per_row, " is ", id,
                      "; use the model's own tokenizer.");
    TORCH_CHECK_VALUE(position < config.context_length,
                      "[Transformer::forward] positions must be below the "
                      "model's context of ",
                      config.context_length, " tokens but token ",
                      i % tokens.per_row, " of row ", i / tokens.per_row,
                      " is at ", position, "; prefill the cropped window.");
  }
}

// Dead tokens are 0, whatever their ids.
void Transformer::Impl::embed(const Pass& pass) const {
  const Tokens& tokens = pass.tokens;
  const int64_t width = config.hidden_size;
  auto* hidden = data_of<float>(pass.hidden);
  const bool learned = config.positions == Positions::kLearned;
  constexpr int64_t kCost = 8;  // dequantising takes longer than a plain pass
  for_each_row(tokens.count(), kCost * width, [&](int64_t i) {
    float* row = hidden + i * width;
    const auto at = static_cast<size_t>(i);
    if (!tokens.live(i)) {
      std::fill(row, row + width, 0.0F);
      return;
    }
    source->read_rows(kEmbedding, tokens.ids[at], 1, row);
    if (!learned) return;
    std::vector<float> position(static_cast<size_t>(width));
    source->read_rows(kPositions, tokens.positions[at], 1, position.data());
    for (int64_t j = 0; j < width; ++j) {
      row[j] += position[static_cast<size_t>(j)];
    }
  });
}

void Transformer::Impl::write_logits(Pass& pass, const Tensor& delta,
                                     const std::vector<int64_t>& wanted,
                                     const Tensor& logits) const {
  const int64_t width = config.hidden_size, vocabulary = config.vocab_size;
  const NormParameters norm = final_norm->parameters();
  std::vector<int64_t> outputs;  // of a token that lives
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] >= 0) outputs.push_back(static_cast<int64_t>(i));
  }
  with_row_type(dtype, [&](auto type) {
    using T = decltype(type);
    const RowLoops<T>& loops = row_loops<T>();
    for (size_t first = 0; first < outputs.size(); first += kHeadRows) {
      const std::span<const int64_t> chunk = std::span(outputs).subspan(
          first, std::min<size_t>(kHeadRows, outputs.size() - first));
      const auto rows = static_cast<int64_t>(chunk.size());
      const Tensor normed = at::zeros({PackedLinear::padded_rows(rows), width},
                                      at::TensorOptions(dtype));
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t token =
            wanted[static_cast<size_t>(chunk[static_cast<size_t>(i)])];
        loops.add_norm(data_of<T>(normed) + i * width,
                       data_of<float>(pass.hidden) + token * width,
                       data_of<T>(delta) + token * width, norm, width);
      }
      const Tensor scores = head(normed);
      for_each_row(rows, vocabulary, [&](int64_t i) {
        loops.to_float(
            data_of<float>(logits) + chunk[static_cast<size_t>(i)] * vocabulary,
            data_of<T>(scores) + i * vocabulary, vocabulary);
      });
    }
  });
}

Tensor Transformer::Impl::run(const Tokens& tokens, LayerMemory& memory,
                              const ForwardOptions& options) const {
  check_tokens(tokens);
  const std::vector<int64_t> wanted = wanted_tokens(tokens, options.all_logits);
  // Made outside of inference mode, so that a caller may change it in place.
  const Tensor logits = at::zeros(
      {tokens.rows, options.all_logits ? tokens.per_row : 1, config.vocab_size},
      at::TensorOptions(at::kFloat));
  {
    const c10::InferenceMode inference;
    Pass pass(config, frequencies, tokens, memory, options.role, dtype);
    run_layers(pass, wanted, logits);
  }
  if (tokens.count() >= kTrimmedTokens) trim_heap();
  return logits;
}

void Transformer::Impl::run_layers(Pass& pass,
                                   const std::vector<int64_t>& wanted,
                                   const Tensor& logits) const {
  embed(pass);
  const int64_t tokens = pass.tokens.count();
  Tensor delta;  // what the block before adds to the residual stream
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    layer.mixer_norm.add_and_apply(pass.normed, pass.hidden, delta, tokens);
    delta = layer.mixer->run(pass, static_cast<int64_t>(i));
    layer.feed_forward_norm.add_and_apply(pass.normed, pass.hidden, delta,
                                          tokens);
    delta = layer.feed_forward.run(pass);
  }
  write_logits(pass, delta, wanted, logits);
}

Transformer::Transformer(ModelConfig config,
                         std::shared_ptr<const WeightSource> source,
                         const LoadOptions& options)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(source),
                                   options)) {}

Transformer::~Transformer() = default;

const ModelConfig& Transformer::config() const noexcept {
  return impl_->config;
}
at::ScalarType Transformer::dtype() const noexcept { return impl_->dtype; }
bool Transformer::row_exact(Role /*role*/) const noexcept {
  return impl_->row_exact;  // one arithmetic for both roles
}
bool Transformer::roles_agree() const noexcept { return true; }
size_t Transformer::weight_bytes() const noexcept {
  return impl_->weight_bytes;
}

CacheSpec Transformer::cache_spec(int64_t rows,
                                  std::optional<int64_t> capacity) const {
  CacheSpec spec;
  spec.rows = rows;
  spec.capacity = capacity;
  spec.dtype = impl_->dtype;
  for (const int64_t sliding : impl_->sliding) {
    spec.layers.emplace_back(AttentionLayer{impl_->config.kv_heads,
                                            impl_->config.head_dim, sliding});
  }
  return spec;
}

Tensor Transformer::forward(const Tensor& ids, Step& step,
                            const ForwardOptions& options) const {
  const Tensor checked = impl_->checked_ids(ids);
  TORCH_CHECK_VALUE(ids.size(0) == step.rows() && ids.size(1) == step.tokens(),
                    "[Transformer::forward] ids must be [", step.rows(), ", ",
                    step.tokens(), "] like the step but got ", ids.sizes(),
                    "; open the step for these rows and tokens.");
  const Tensor positions = step.positions().contiguous();
  const Tensor limits = step.limits().contiguous();
  StepMemory memory(step);
  return impl_->run({ids.size(0), ids.size(1), values_of(checked),
                     values_of(positions), values_of(limits)},
                    memory, options);
}

Tensor Transformer::forward(const Tensor& ids,
                            const ForwardOptions& options) const {
  const Tensor checked = impl_->checked_ids(ids);
  const Tensor positions = at::arange(ids.size(1), at::TensorOptions(at::kLong))
                               .expand({ids.size(0), ids.size(1)})
                               .contiguous();
  const Tensor limits = positions.add(1);
  NoMemory memory(limits, impl_->sliding);
  return impl_->run({ids.size(0), ids.size(1), values_of(checked),
                     values_of(positions), values_of(limits)},
                    memory, options);
}

}  // namespace kvcache::model
