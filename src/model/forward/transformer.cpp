// src/model/forward/transformer.cpp - a decoder's arguments and promises; the
// arithmetic is a Decoder's.
#include "kvcache/model/transformer.h"

#include <ATen/ops/arange.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "src/model/forward/decoder.h"
#include "src/model/forward/devices.h"
#include "src/model/forward/forward_options.h"

namespace kvcache::model {
namespace {

LayerSpec layer_spec(const ModelConfig& config, LayerType type) {
  if (type != LayerType::kLinear) {
    return AttentionLayer{
        config.kv_heads, config.head_dim,
        type == LayerType::kSliding ? config.sliding_window.value_or(0) : 0};
  }
  const LinearAttentionConfig& linear = *config.linear_attention;
  return RecurrentLayer{
      linear.conv_channels(),
      linear.conv_kernel - 1,
      {linear.value_heads, linear.key_head_dim, linear.value_head_dim}};
}

// The forward that `options` ask for; the automatic one is the device's.
ForwardKind chosen_kind(const LoadOptions& options) {
  if (options.forward == ForwardKind::kAuto) {
    return options.device.is_cpu() ? ForwardKind::kPackedCpu
                                   : ForwardKind::kOps;
  }
  TORCH_CHECK_VALUE(
      options.forward == ForwardKind::kOps || options.device.is_cpu(),
      "[Transformer] the packed forward must be on the CPU but the device is ",
      options.device, "; choose ForwardKind::kOps or kAuto.");
  return options.forward;
}

// How weights are kept; the automatic choice is load_model()'s.
WeightPacking chosen_packing(const LoadOptions& options, ForwardKind kind) {
  const auto packing = options.packing.value_or(WeightPacking::kNone);
  if (packing == WeightPacking::kNone) return packing;
  TORCH_CHECK_VALUE(
      kind == ForwardKind::kPackedCpu,
      "[Transformer] packed weights must run on the CPU but the device is ",
      options.device,
      " and the forward is LibTorch's operators; choose "
      "WeightPacking::kNone.");
  return packing;
}

// Index of the first value outside of [0, end), or -1.
int64_t first_outside(const Tensor& numbers, int64_t end) {
  const Tensor dense = numbers.contiguous();
  const auto* values = dense.const_data_ptr<int64_t>();
  const auto* last = values + dense.numel();
  const auto* found = std::find_if(
      values, last, [&](int64_t value) { return value < 0 || value >= end; });
  return found == last ? -1 : found - values;
}

// Dead tokens may have any id. Where the limits lie on a device they are
// waited for only if an id is suspicious.
void check_ids(const Tokens& tokens, int64_t vocab_size) {
  if (first_outside(tokens.ids, vocab_size) < 0) return;
  const Tensor live =
      tokens.ids.masked_fill(tokens.limits.cpu().eq(0), 0).contiguous();
  const int64_t i = first_outside(live, vocab_size);
  if (i < 0) return;
  const int64_t per_row = live.size(1);
  TORCH_CHECK_INDEX(false, "[Transformer::forward] ids must be in [0, ",
                    vocab_size, ") but token ", i % per_row, " of row ",
                    i / per_row, " is ", live.const_data_ptr<int64_t>()[i],
                    "; use the model's own tokenizer.");
}

void check_positions(const Tensor& positions, int64_t context) {
  const int64_t i = first_outside(positions, context);
  if (i < 0) return;
  const Tensor dense = positions.contiguous();
  const int64_t per_row = dense.size(1);
  TORCH_CHECK_VALUE(
      false,
      "[Transformer::forward] positions must be below the model's context of ",
      context, " tokens but token ", i % per_row, " of row ", i / per_row,
      " is at ", dense.const_data_ptr<int64_t>()[i],
      "; prefill the cropped window.");
}

}  // namespace

struct Transformer::Impl {
  Impl(ModelConfig of, std::shared_ptr<const WeightSource> source,
       const LoadOptions& options);

  bool is_packed() const { return packing != WeightPacking::kNone; }
  void check_ids_shape(const Tensor& ids) const;
  Tensor run(const Tokens& tokens, LayerMemory& memory,
             const ForwardOptions& options, const Beside* beside) const;

  ModelConfig config;
  at::Device device;
  ForwardKind kind;
  WeightPacking packing;
  at::ScalarType dtype;
  std::unique_ptr<Decoder> decoder;
};

struct Transformer::Beside {
  std::shared_ptr<const DecoderAdapters> adapters;
  std::vector<AdapterInfo> infos;
};

namespace {

AdapterInfo info_of(const Adapter& adapter, int64_t layers) {
  AdapterInfo info{adapter.name, adapter.digest, layers};
  for (const AdapterModule& module : adapter.modules) {
    info.first_layer = std::min(info.first_layer, layer_of(module));
  }
  return info;
}

// False where it is known that no row has one.
bool may_adapt(const ForwardOptions& options) {
  const Tensor& chosen = options.adapters;
  if (!chosen.defined()) return false;
  return !chosen.is_cpu() || chosen.max().item<int64_t>() >= 0;
}

}  // namespace

Transformer::Impl::Impl(ModelConfig of,
                        std::shared_ptr<const WeightSource> source,
                        const LoadOptions& options)
    : config(std::move(of)),
      device(usable_device(options.device)),
      kind(chosen_kind(options)),
      packing(chosen_packing(options, kind)),
      dtype(options.dtype.value_or(is_packed() ? at::kBFloat16 : at::kFloat)) {
  TORCH_CHECK_VALUE(source != nullptr,
                    "[Transformer] weights must be given but are null.");
  config.validate();
  check_tensors(config, *source);
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16,
                    "[Transformer] dtype must be float32 or bfloat16 but got ",
                    dtype, "; choose one of them.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !config.output_gate || !config.fused_qkv, "[Transformer] ", config.source,
      " must have the matrices of q, k and v apart but has one of them and "
      "gates; use a model without gates.");
  const c10::InferenceMode inference;
  const DecoderParts parts{config, source, dtype, packing, device, options};
  decoder = kind == ForwardKind::kOps ? make_ops_decoder(parts)
                                      : make_packed_decoder(parts);
  source->release_pages();
  if (options.progress) options.progress(1.0);
}

void Transformer::Impl::check_ids_shape(const Tensor& ids) const {
  const std::string device_text =
      device.is_cpu() ? "the CPU" : c10::str("the CPU or ", device);
  TORCH_CHECK_VALUE(
      ids.defined() && ids.dim() == 2 && ids.scalar_type() == at::kLong &&
          (ids.is_cpu() || ids.device() == device) && ids.numel() > 0,
      "[Transformer::forward] ids must be a non-empty [B, T] of int64 on ",
      device_text, " but got ",
      ids.defined() ? c10::str(ids.sizes(), " of ", ids.scalar_type(), " on ",
                               ids.device())
                    : std::string("an undefined tensor"),
      "; pass one row of token ids per sequence.");
}

Tensor Transformer::Impl::run(const Tokens& tokens, LayerMemory& memory,
                              const ForwardOptions& options,
                              const Beside* beside) const {
  const ForwardOptions checked =
      checked_options(options, tokens.ids, config, device,
                      beside ? std::ssize(beside->infos) : 0);
  if (tokens.ids.is_cpu() && !checked.hidden.defined()) {
    check_ids(tokens, config.vocab_size);
  }
  if (tokens.positions.is_cpu()) {
    check_positions(tokens.positions, config.context_length);
  }
  return decoder->run(
      {tokens.ids.to(device), tokens.positions.to(device),
       tokens.limits.to(device),
       beside && may_adapt(options) ? beside->adapters.get() : nullptr},
      memory, checked);
}

Transformer::Transformer(ModelConfig config,
                         std::shared_ptr<const WeightSource> source,
                         const LoadOptions& options)
    : impl_(std::make_shared<const Impl>(std::move(config), std::move(source),
                                         options)) {}

Transformer::Transformer(std::shared_ptr<const Impl> impl,
                         std::shared_ptr<const Beside> beside)
    : impl_(std::move(impl)), beside_(std::move(beside)) {}

Transformer::~Transformer() = default;

std::shared_ptr<const Transformer> Transformer::with_adapters(
    const std::vector<Adapter>& adapters) const {
  check_adapters("Transformer::with_adapters", adapters, impl_->config);
  auto beside = std::make_shared<Beside>();
  const c10::InferenceMode inference;
  if (!adapters.empty()) beside->adapters = impl_->decoder->prepare(adapters);
  for (const Adapter& adapter : adapters) {
    beside->infos.push_back(info_of(adapter, impl_->config.layers));
  }
  return std::shared_ptr<const Transformer>(
      new Transformer(impl_, std::move(beside)));
}

std::span<const AdapterInfo> Transformer::adapters() const noexcept {
  if (!beside_) return {};
  return beside_->infos;
}

const ModelConfig& Transformer::config() const noexcept {
  return impl_->config;
}
at::ScalarType Transformer::dtype() const noexcept { return impl_->dtype; }
WeightPacking Transformer::packing() const noexcept { return impl_->packing; }
at::Device Transformer::device() const noexcept { return impl_->device; }
ForwardKind Transformer::forward_kind() const noexcept { return impl_->kind; }
bool Transformer::row_exact(Role /*role*/) const noexcept {
  return impl_->decoder->row_exact();
}
bool Transformer::roles_agree() const noexcept {
  return impl_->decoder->roles_agree();
}
size_t Transformer::weight_bytes() const noexcept {
  return impl_->decoder->weight_bytes();
}

CacheSpec Transformer::cache_spec(int64_t rows,
                                  std::optional<int64_t> capacity) const {
  return cache_spec(rows, capacity, 0, impl_->config.layers);
}

CacheSpec Transformer::cache_spec(int64_t rows, std::optional<int64_t> capacity,
                                  int64_t first, int64_t last) const {
  const int64_t layers = impl_->config.layers;
  TORCH_CHECK_VALUE(
      first >= 0 && first < last && last <= layers,
      "[Transformer::cache_spec] layers must be a range within [0, ", layers,
      ") that is not empty but got [", first, ", ", last,
      "); count them from 0.");
  CacheSpec spec;
  spec.rows = rows;
  spec.capacity = capacity;
  spec.dtype = impl_->dtype;
  if (impl_->is_packed()) spec.conv_dtype = at::kFloat;
  spec.device = impl_->device;
  spec.first_layer = first;
  for (int64_t layer = first; layer < last; ++layer) {
    spec.layers.push_back(layer_spec(
        impl_->config, impl_->config.layer_types[static_cast<size_t>(layer)]));
  }
  return spec;
}

Tensor Transformer::forward(const Tensor& ids, Step& step,
                            const ForwardOptions& options) const {
  impl_->check_ids_shape(ids);
  TORCH_CHECK_VALUE(ids.size(0) == step.rows() && ids.size(1) == step.tokens(),
                    "[Transformer::forward] ids must be [", step.rows(), ", ",
                    step.tokens(), "] like the step but got ", ids.sizes(),
                    "; open the step for these rows and tokens.");
  const Tokens tokens{ids, step.positions(), step.limits()};
  const at::Device numbers = tokens.positions.device();
  TORCH_CHECK_VALUE(numbers.is_cpu() || numbers == impl_->device,
                    "[Transformer::forward] the step must be of a cache on ",
                    impl_->device, " but its numbers are on ", numbers,
                    "; make the cache from cache_spec().");
  StepMemory memory(step);
  return impl_->run(tokens, memory, options, beside_.get());
}

Tensor Transformer::forward(const Tensor& ids,
                            const ForwardOptions& options) const {
  impl_->check_ids_shape(ids);
  TORCH_CHECK_VALUE(
      ids.size(1) <= impl_->config.context_length,
      "[Transformer::forward] positions must be below the model's context of ",
      impl_->config.context_length, " tokens but token ",
      impl_->config.context_length, " of row 0 is at ",
      impl_->config.context_length, "; prefill the cropped window.");
  const Tensor positions =
      at::arange(ids.size(1),
                 at::TensorOptions(at::kLong).device(impl_->device))
          .expand({ids.size(0), ids.size(1)});
  const Tensor limits = positions.add(1);
  NoMemory memory(limits, cache_spec(ids.size(0), {}));
  return impl_->run({ids, positions, limits}, memory, options, beside_.get());
}

}  // namespace kvcache::model
