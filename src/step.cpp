// A step from begin to commit, and the default hooks of a kind.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cache_impl.h"
#include "kvcache/cache.h"
#include "storage.h"

namespace kvcache {
namespace {

// Positions, limits and cells of a step are addressable: 3 x 8 bytes each.
constexpr int64_t kMostNumbers = std::numeric_limits<int64_t>::max() / 24;

// Spans of the spec over the step's rows, defaults filled in; all checked.
void read_spec(const StepSpec& spec, int64_t all_rows, StepData& step) {
  TORCH_CHECK_VALUE(spec.tokens >= 1,
                    "[Cache::begin_step] tokens must be >= 1 but got ",
                    spec.tokens, "; a step has at least one token.");
  const int64_t left =  // rows from first_row on
      spec.first_row >= 0 && spec.first_row < all_rows
          ? all_rows - spec.first_row
          : 0;
  const int64_t rows = spec.rows.value_or(left);
  TORCH_CHECK_VALUE(rows >= 1 && rows <= left,
                    "[Cache::begin_step] rows must lie in [0, ", all_rows,
                    ") but got ", rows, " from row ", spec.first_row,
                    "; fix first_row and rows.");
  TORCH_CHECK_VALUE(
      spec.tokens <= kMostNumbers / rows,
      "[Cache::begin_step] tokens must be <= ", kMostNumbers / rows, " for ",
      rows, " rows but got ", spec.tokens, "; padding counts too.");
  for (const auto& [name, list] :
       {std::pair{"skip", spec.skip}, std::pair{"count", spec.count}}) {
    TORCH_CHECK_VALUE(list.empty() || static_cast<int64_t>(list.size()) == rows,
                      "[Cache::begin_step] ", name,
                      " must have one entry per row, ", rows, ", but got ",
                      list.size(), "; leave it empty for the default.");
  }
  step.tokens = spec.tokens;
  step.first_row = spec.first_row;
  step.rows = rows;
  step.skip.resize(static_cast<size_t>(rows));
  step.count.resize(static_cast<size_t>(rows));
  step.start.resize(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t skip = spec.skip.empty() ? 0 : spec.skip[row];
    const int64_t room =
        skip >= 0 && skip <= spec.tokens ? spec.tokens - skip : -1;
    const int64_t count = spec.count.empty() ? room : spec.count[row];
    TORCH_CHECK_VALUE(count >= 0 && count <= room, "[Cache::begin_step] row ",
                      spec.first_row + row, ": skip + count must be within ",
                      spec.tokens, " tokens but got ", skip, " + ", count,
                      "; the live range lies inside the step.");
    step.skip[row] = skip;
    step.count[row] = count;
  }
}

// Where each token stands; what it sees; where it goes.
void fill_numbers(StepData& step) {
  auto* position = step.positions.data_ptr<int64_t>();
  auto* limit = step.limits.data_ptr<int64_t>();
  auto* cell = step.cells.data_ptr<int64_t>();
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t skip = step.skip[row], end = skip + step.count[row];
    for (int64_t t = 0; t < step.tokens; ++t, ++position, ++limit, ++cell) {
      const bool live = t >= skip && t < end;
      const int64_t p = step.start[row] + t - skip;
      *position = live ? p : 0;
      *limit = live ? p + 1 : 0;
      *cell = live ? p : -1;
    }
  }
}

}  // namespace

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
  Impl& impl = *impl_;
  impl.check_idle("begin_step");
  StepData& step = impl.step;
  read_spec(spec, impl.spec.rows, step);
  step.longest = 0;
  step.uniform = true;
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t length = impl.lengths[step.first_row + row];
    const int64_t count = step.count[row];
    TORCH_CHECK(count <= capacity() - length, "[Cache::begin_step] row ",
                step.first_row + row, " would need slots [", length, ", ",
                length + count, ") but capacity is ", capacity(),
                "; truncate() first or raise CacheSpec::capacity.");
    step.start[row] = length;
    step.longest = std::max(step.longest, length + count);
    step.uniform =
        step.uniform && count == step.tokens && length == step.start[0];
  }
  step.window = do_window(step.longest);
  std::fill(step.done.begin(), step.done.end(), false);
  std::fill(step.conv_done.begin(), step.conv_done.end(), false);
  do_begin_host(step);

  // Device half: numbers and views. Shapes of the last step are kept.
  const std::vector<int64_t>& key = impl.buffer_key;
  step.reshaped = key.size() != 4 || key[0] != step.rows ||
                  key[1] != step.tokens || key[2] != step.first_row ||
                  key[3] != static_cast<int64_t>(impl.epoch);
  if (step.reshaped) {
    impl.buffer_key.clear();  // if anything below throws
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    const int64_t size = step.rows * step.tokens;
    if (!impl.numbers.defined() || impl.numbers.size(1) < size) {
      impl.numbers = new_empty({3, size}, at::kLong, at::kCPU);
    }
    int64_t which = 0;
    for (Tensor* t : {&step.positions, &step.limits, &step.cells}) {
      *t = impl.numbers.select(0, which++)
               .narrow(0, 0, size)
               .view({step.rows, step.tokens});
    }
    impl.states.fill(step);
    for (KvView& view : step.views) {
      view.limits = step.limits;
      view.cells = step.cells;
    }
  }
  fill_numbers(step);
  do_begin_device(step);
  for (KvView& view : step.views) {
    view.window = step.window;
    view.uniform = step.uniform;
  }
  if (step.reshaped) {
    impl.buffer_key = {step.rows, step.tokens, step.first_row,
                       static_cast<int64_t>(impl.epoch)};
  }
  step.open = true;
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
  step.done[local] = false;  // a write that throws leaves the layer out
  // Kinds copy memory, where the sign of a lazily negated tensor is not.
  cache_->do_write(step, view, k.is_neg() ? k.resolve_neg() : k,
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
  const int64_t taps = spec.conv_taps;
  const Tensor out =
      new_zeros({step.rows, spec.conv_channels, taps + step.tokens}, dtype,
                impl.spec.device);
  at::NoGradGuard no_grad;
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t skip = step.skip[row], count = step.count[row];
    const Tensor row_out = out.select(0, row);
    row_out.narrow(1, skip, taps).copy_(view.conv.select(0, row));
    row_out.narrow(1, skip + taps, count)
        .copy_(x.select(0, row).narrow(1, skip, count));
    view.next_conv.select(0, row).copy_(row_out.narrow(1, skip + count, taps));
  }
  step.conv_done[local] = true;
  if (spec.state_shape.empty()) {
    step.done[local] = true;
  }
  return out;
}

void Step::commit() {
  StepData& step = data();
  Cache::Impl& impl = *cache_->impl_;
  for (size_t i = 0; i < step.done.size(); ++i) {
    TORCH_CHECK(step.done[i],
                "[Step::commit] every layer must be written but layer ",
                impl.spec.first_layer + static_cast<int64_t>(i),
                " was left out; write it, or drop the step.");
  }
  // Nothing below throws: states, then the kind, then the lengths.
  const bool moved = impl.states.commit(step);
  cache_->do_commit(step);
  for (int64_t row = 0; row < step.rows; ++row) {
    impl.lengths[step.first_row + row] += step.count[row];
  }
  if (moved) {
    cache_->raise_epoch();
  }
  step.open = false;
  cache_ = nullptr;
}

int64_t Cache::do_window(int64_t longest) const { return longest; }
void Cache::do_begin_host(StepData&) {}
void Cache::do_reserve(StepData&, int64_t) {}
void Cache::do_commit(StepData&) noexcept {}
void Cache::do_abandon(StepData&) noexcept {}
void Cache::do_shrunk() {}
bool Cache::do_holds(int64_t, int64_t) const { return true; }
void Cache::do_validate(std::vector<std::string>&) const {}

}  // namespace kvcache
