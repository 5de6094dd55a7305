// What a forward and its owner call on an open step.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cache_impl.h"
#include "conv_inputs.h"
#include "kvcache/cache.h"
#include "storage.h"

namespace kvcache {

size_t Cache::Impl::local(const char* where, int64_t layer) const {
  const auto count = static_cast<int64_t>(spec.layers.size());
  TORCH_CHECK_INDEX(
      layer >= spec.first_layer && layer < spec.first_layer + count, "[", where,
      "] layer must be in [", spec.first_layer, ", ", spec.first_layer + count,
      ") but got ", layer, "; this cache holds no other layers.");
  return static_cast<size_t>(layer - spec.first_layer);
}

const AttentionLayer& Cache::Impl::attention(const char* where,
                                             int64_t layer) const {
  const auto* found =
      std::get_if<AttentionLayer>(&spec.layers[local(where, layer)]);
  TORCH_CHECK_VALUE(found != nullptr, "[", where, "] layer ", layer,
                    " must be an attention layer but is a recurrent one; only "
                    "attention layers keep K and V.");
  return *found;
}

const RecurrentLayer& Cache::Impl::recurrent(const char* where,
                                             int64_t layer) const {
  const auto* found =
      std::get_if<RecurrentLayer>(&spec.layers[local(where, layer)]);
  TORCH_CHECK_VALUE(found != nullptr, "[", where, "] layer ", layer,
                    " must be a recurrent layer but is an attention one; only "
                    "recurrent layers carry a state.");
  return *found;
}

Step Cache::begin_step(const StepSpec& spec) {
  begin_host(spec, 1, {});
  begin_device();
  impl_->step.open = true;
  return Step(*this);
}

Step::Step(Step&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)) {}

Step& Step::operator=(Step&& other) noexcept {
  if (this != &other) {
    Step old(std::move(*this));  // abandons what was open here
    cache_ = std::exchange(other.cache_, nullptr);
  }
  return *this;
}

Step::~Step() {
  if (cache_ != nullptr) {
    StepData& step = cache_->impl_->step;
    cache_->do_abandon(step);
    step.open = false;
  }
}

StepData& Step::data() const {
  TORCH_CHECK(cache_ != nullptr,
              "[Step] the step must be open but it was committed or moved "
              "from; call Cache::begin_step() for a new one.");
  return cache_->impl_->step;
}

int64_t Step::rows() const { return data().rows; }
int64_t Step::tokens() const { return data().tokens; }
const Tensor& Step::positions() const { return data().positions; }
const Tensor& Step::limits() const { return data().limits; }
bool Step::live(int64_t row, int64_t token) const {
  const StepData& step = data();
  TORCH_CHECK(!step.recorded,
              "[Step::live] a recorded step must not ask the host but did; "
              "read limits(), which is 0 for a dead token.");
  return row >= 0 && row < step.rows && token >= step.skip[row] &&
         token < step.skip[row] + step.count[row];
}

const KvView& Step::reserve(int64_t layer) {
  StepData& step = data();
  Cache::Impl& impl = *cache_->impl_;
  impl.attention("Step::reserve", layer);
  const size_t local = impl.local("Step::reserve", layer);
  TORCH_CHECK(!step.done[local], "[Step::reserve] layer ", layer,
              " must be written once a step but is written again; commit() "
              "ends a step.");
  const size_t index = impl.index[local];
  cache_->do_reserve(step, static_cast<int64_t>(index));
  step.done[local] = true;
  return step.views[index];
}

const KvView& Step::update(int64_t layer, const Tensor& k, const Tensor& v) {
  StepData& step = data();
  Cache::Impl& impl = *cache_->impl_;
  const AttentionLayer& attention = impl.attention("Step::update", layer);
  for (const auto& [name, t] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    const bool shape =
        t->defined() && t->dim() == 4 && t->size(0) == step.rows &&
        t->size(1) == attention.heads && t->size(2) == step.tokens &&
        t->size(3) == attention.head_dim;
    TORCH_CHECK_VALUE(shape && t->device() == impl.spec.device,
                      "[Step::update] layer ", layer, ": ", name, " must be [",
                      step.rows, ", ", attention.heads, ", ", step.tokens, ", ",
                      attention.head_dim, "] ", dtype_text(impl.spec.dtype),
                      " on ", impl.spec.device, " but got ", tensor_text(*t),
                      "; pass the step's keys and values.");
    TORCH_CHECK_TYPE(t->scalar_type() == impl.spec.dtype,
                     "[Step::update] layer ", layer, ": cache holds ",
                     dtype_text(impl.spec.dtype), ", got ",
                     dtype_text(t->scalar_type()), " in ", name,
                     "; convert it or set CacheSpec::dtype.");
  }
  const KvView& view = reserve(layer);
  at::NoGradGuard no_grad;
  const size_t local = impl.local("Step::update", layer);
  const auto index = static_cast<int64_t>(impl.index[local]);
  step.done[local] = false;  // a write that throws leaves the layer out
  // Kinds copy memory, where the sign of a lazily negated tensor is not.
  cache_->do_write(step, index, k.is_neg() ? k.resolve_neg() : k,
                   v.is_neg() ? v.resolve_neg() : v);
  step.done[local] = true;
  return view;
}

const StateView& Step::state(int64_t layer) {
  StepData& step = data();
  const Cache::Impl& impl = *cache_->impl_;
  impl.recurrent("Step::state", layer);
  const size_t local = impl.local("Step::state", layer);
  TORCH_CHECK(!step.done[local], "[Step::state] layer ", layer,
              " must be asked for once a step but is asked for again; keep "
              "the reference.");
  step.done[local] = true;
  return step.states[impl.index[local]];
}

Tensor Step::extend_conv(int64_t layer, const Tensor& x) {
  StepData& step = data();
  const Cache::Impl& impl = *cache_->impl_;
  const RecurrentLayer& spec = impl.recurrent("Step::extend_conv", layer);
  const size_t local = impl.local("Step::extend_conv", layer);
  const at::ScalarType dtype = impl.spec.conv_dtype.value_or(impl.spec.dtype);
  TORCH_CHECK_VALUE(
      spec.conv_channels * spec.conv_taps > 0, "[Step::extend_conv] layer ",
      layer, " must have a convolution but its RecurrentLayer has ",
      spec.conv_channels, " channels and ", spec.conv_taps, " taps.");
  TORCH_CHECK(!step.conv_done[local], "[Step::extend_conv] layer ", layer,
              " must be extended once a step but is extended again; keep the "
              "result.");
  TORCH_CHECK_VALUE(
      x.defined() && x.dim() == 3 && x.size(0) == step.rows &&
          x.size(1) == spec.conv_channels && x.size(2) == step.tokens &&
          x.scalar_type() == dtype && x.device() == impl.spec.device,
      "[Step::extend_conv] layer ", layer, ": x must be [", step.rows, ", ",
      spec.conv_channels, ", ", step.tokens, "] ", dtype_text(dtype), " on ",
      impl.spec.device, " but got ", tensor_text(x),
      "; pass the step's convolution inputs.");
  const StateView& view = step.states[impl.index[local]];
  Tensor out = (impl.numbers.by_ops() ? extend_inputs_by_ops : extend_inputs)(
      step, view, x, impl.numbers.skip());
  if (!step.windows.empty()) {
    at::NoGradGuard no_grad;
    step.windows[impl.index[local]].conv.copy_(out);
  }
  step.conv_done[local] = true;
  if (spec.state_shape.empty()) {
    step.done[local] = true;
    step.window_done[impl.index[local]] = true;
  }
  return out;
}

const StateWindow* Step::state_window(int64_t layer) {
  StepData& step = data();
  const Cache::Impl& impl = *cache_->impl_;
  impl.recurrent("Step::state_window", layer);
  const size_t index = impl.index[impl.local("Step::state_window", layer)];
  if (step.windows.empty()) {
    return nullptr;
  }
  step.window_done[index] = true;
  return &step.windows[index];
}

void Step::check_complete() const {
  const StepData& step = data();
  for (size_t i = 0; i < step.done.size(); ++i) {
    TORCH_CHECK(step.done[i],
                "[Step::commit] every layer must be written but layer ",
                cache_->impl_->spec.first_layer + static_cast<int64_t>(i),
                " was left out; write it, or drop the step.");
  }
}

void Step::commit() {
  StepData& step = data();
  TORCH_CHECK(!step.recorded,
              "[Step::commit] the owner of a recorded step commits it but the "
              "work did; leave it open.");
  check_complete();
  cache_->commit_device();
  cache_->commit_host(1);
  step.open = false;
  cache_ = nullptr;
}

}  // namespace kvcache
