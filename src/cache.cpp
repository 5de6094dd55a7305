// The verbs between steps: arguments are checked here, once, for every kind.
#include "kvcache/cache.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "cache_impl.h"
#include "storage.h"

namespace kvcache {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

void check_layer(size_t number, const LayerSpec& layer) {
  if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
    TORCH_CHECK_VALUE(
        attention->heads >= 1 && attention->head_dim >= 1 &&
            attention->sliding >= 0,
        "[Cache::Cache] layer ", number,
        " must have heads >= 1, head_dim >= 1 and sliding >= 0 but got ",
        attention->heads, ", ", attention->head_dim, " and ",
        attention->sliding, "; fix its AttentionLayer.");
    TORCH_CHECK_VALUE(
        attention->sinks == 0 ||
            (attention->sinks > 0 && attention->sliding > 0),
        "[Cache::Cache] layer ", number,
        " must have sinks >= 0, and sinks only beside sliding, but got ",
        attention->sinks, " and sliding ", attention->sliding,
        "; without sliding every key is seen.");
    return;
  }
  const auto& recurrent = std::get<RecurrentLayer>(layer);
  const bool sizes =
      std::all_of(recurrent.state_shape.begin(), recurrent.state_shape.end(),
                  [](int64_t n) { return n >= 1; });
  TORCH_CHECK_VALUE(
      recurrent.conv_channels >= 0 && recurrent.conv_taps >= 0 && sizes,
      "[Cache::Cache] layer ", number,
      " must have conv_channels >= 0, conv_taps >= 0 and a "
      "positive state_shape but got ",
      recurrent.conv_channels, ", ", recurrent.conv_taps, " and ",
      at::IntArrayRef(recurrent.state_shape), "; fix its RecurrentLayer.");
  TORCH_CHECK_VALUE((recurrent.conv_channels > 0 && recurrent.conv_taps > 0) ||
                        !recurrent.state_shape.empty(),
                    "[Cache::Cache] layer ", number,
                    " must keep a convolution or a state but got ",
                    recurrent.conv_channels, " channels, ", recurrent.conv_taps,
                    " taps and an empty state_shape; fix its RecurrentLayer.");
}

// Beyond, sums of products of codes would not fit into 32 bits with enough of
// the query's own.
constexpr int64_t kMostInt8HeadDim = 4096;

void check_format(const CacheSpec& spec) {
  if (spec.kv_format == KvFormat::kPlain) {
    return;
  }
  TORCH_CHECK_TYPE(spec.dtype == at::kFloat || spec.dtype == at::kBFloat16,
                   "[Cache::Cache] dtype must be float32 or bfloat16 for int8 "
                   "K/V but got ",
                   dtype_text(spec.dtype), "; set CacheSpec::dtype.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.device.is_cpu(),
      "[Cache::Cache] int8 K/V must be on the CPU but the device is ",
      spec.device, "; leave CacheSpec::kv_format plain there.");
  for (const LayerSpec& layer : spec.layers) {
    const auto* attention = std::get_if<AttentionLayer>(&layer);
    TORCH_CHECK_VALUE(
        attention == nullptr || attention->head_dim <= kMostInt8HeadDim,
        "[Cache::Cache] head_dim must be at most ", kMostInt8HeadDim,
        " for int8 K/V but got ", attention->head_dim,
        "; leave CacheSpec::kv_format plain.");
  }
}

CacheSpec checked(CacheSpec spec) {
  TORCH_CHECK_VALUE(spec.rows >= 1, "[Cache::Cache] rows must be >= 1 but got ",
                    spec.rows, "; set CacheSpec::rows.");
  TORCH_CHECK_VALUE(!spec.layers.empty(),
                    "[Cache::Cache] layers must be >= 1 but got 0; fill "
                    "CacheSpec::layers.");
  TORCH_CHECK_VALUE(!spec.capacity || *spec.capacity >= 1,
                    "[Cache::Cache] capacity must be >= 1 but got ",
                    spec.capacity.value_or(1), "; set CacheSpec::capacity.");
  TORCH_CHECK_VALUE(!spec.max_step || *spec.max_step >= 1,
                    "[Cache::Cache] max_step must be >= 1 but got ",
                    spec.max_step.value_or(1), "; set CacheSpec::max_step.");
  TORCH_CHECK_VALUE(spec.first_layer >= 0,
                    "[Cache::Cache] first_layer must be >= 0 but got ",
                    spec.first_layer, "; set CacheSpec::first_layer.");
  TORCH_CHECK_VALUE(at::isFloatingType(spec.dtype),
                    "[Cache::Cache] dtype must be a floating type but got ",
                    dtype_text(spec.dtype), "; set CacheSpec::dtype.");
  const at::ScalarType conv_dtype = spec.conv_dtype.value_or(spec.dtype);
  TORCH_CHECK_VALUE(
      at::isFloatingType(conv_dtype),
      "[Cache::Cache] conv_dtype must be a floating type but got ",
      dtype_text(conv_dtype), "; set CacheSpec::conv_dtype.");
  TORCH_CHECK_VALUE(c10::impl::hasDeviceGuardImpl(spec.device.type()),
                    "[Cache::Cache] device must be one that this program "
                    "links but got ",
                    spec.device, "; link LibTorch's half for it, or use cpu.");
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    check_layer(static_cast<size_t>(spec.first_layer) + i, spec.layers[i]);
  }
  check_format(spec);
  bytes_needed(spec, 1);  // throws if sizes multiply beyond 63 bits
  return spec;
}

void worsen(TruncationReason& reason, TruncationReason other) {
  reason = std::max(reason, other);
}

}  // namespace

Cache::Impl::Impl(CacheSpec given, bool may_swap)
    : spec(checked(std::move(given))),
      lengths(static_cast<size_t>(spec.rows), 0),
      points(static_cast<size_t>(spec.rows)),
      states(spec, may_swap),
      windows(spec.rows),
      numbers(spec.rows, spec.device, {CellLayout{}}) {
  size_t recurrent = 0;
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
      index.push_back(attention_layers.size());
      attention_layers.push_back(*attention);
    } else {
      index.push_back(recurrent++);
    }
  }
  const size_t attends = attention_layers.size();
  oldest.assign(lengths.size(), std::vector<int64_t>(attends, 0));
  layouts = {CellLayout{}};
  layout_of.assign(attends, 0);
  step.views.resize(attends);
  step.done.resize(spec.layers.size());
  step.conv_done.resize(spec.layers.size());
  step.window_done.resize(recurrent);
}

void Cache::Impl::check_idle(const char* verb) const {
  TORCH_CHECK(!step.open, "[Cache::", verb, "] no step may be open but one of ",
              step.tokens, " tokens is; commit() or destroy it first.");
  check_read_back(verb);
}

void Cache::Impl::check_read_back(const char* verb) const {
  TORCH_CHECK(!pending, "[Cache::", verb,
              "] lengths must be known but a replayed graph has not been read "
              "back; read its tokens first.");
}

void Cache::Impl::check_row(const char* verb, int64_t row) const {
  TORCH_CHECK_INDEX(row >= 0 && row < spec.rows, "[Cache::", verb,
                    "] row must be in [0, ", spec.rows, ") but got ", row,
                    "; use a row of this cache.");
}

bool Cache::Impl::keeps(const std::vector<int64_t>& first,
                        int64_t length) const {
  for (size_t i = 0; length > 0 && i < attention_layers.size(); ++i) {
    // The next query, at position `length`, sees `sliding` keys with its own.
    const int64_t sliding = attention_layers[i].sliding;
    const int64_t seen =
        sliding > 0 ? std::max<int64_t>(0, length - sliding + 1) : 0;
    if (first[i] > seen) {
      return false;
    }
  }
  return true;
}

void Cache::Impl::clear_row(int64_t row) noexcept {
  lengths[row] = 0;
  points[row].clear();
  std::fill(oldest[row].begin(), oldest[row].end(), 0);
  states.clear(row);
  windows.drop(row);
}

Cache::Impl::Cut Cache::Impl::find_cut(int64_t row, int64_t target) const {
  const auto of = static_cast<size_t>(row);
  const auto holds = [&](int64_t n) { return keeps(oldest[of], n); };
  const bool in_window = windows.holds(row, target);
  if (in_window && holds(target)) {
    return {target, nullptr, TruncationReason::kExact, true};
  }
  Cut cut = find_cut(points[of], target, holds);
  if (in_window) {  // its keys are gone
    cut.reason = TruncationReason::kEvicted;
  }
  return cut;
}

void Cache::Impl::set_state(int64_t row, const RestorePoint* point) noexcept {
  if (point != nullptr) {
    states.load(row, *point);
  } else {
    states.clear(row);
  }
}

Cache::Cache(CacheSpec spec, States states)
    : impl_(std::make_unique<Impl>(std::move(spec), states == States::kSwap)) {}

Cache::~Cache() = default;

const CacheSpec& Cache::spec() const noexcept { return impl_->spec; }
std::span<const int64_t> Cache::lengths() const {
  TORCH_CHECK(!impl_->pending && !(impl_->step.open && impl_->step.recorded),
              "[Cache::lengths] lengths must be known to the host but ",
              impl_->pending
                  ? "a replay has not been read back; read its "
                    "tokens first."
                  : "this step is recorded; use the step's tensors.");
  return impl_->lengths;
}
int64_t Cache::capacity() const noexcept {
  return impl_->spec.capacity.value_or(kUnbounded);
}
uint64_t Cache::address_epoch() const noexcept { return impl_->epoch; }
void Cache::raise_epoch() noexcept {
  ++impl_->epoch;
  StepData& step = impl_->step;
  if (!step.open) {  // what is left of the last step keeps old memory alive
    std::fill(step.views.begin(), step.views.end(), KvView{});
    std::fill(step.states.begin(), step.states.end(), StateView{});
    step.windows.clear();
    step.positions = step.limits = step.taken = Tensor();
    step.cells.clear();
  }
}
void Cache::check_idle(const char* verb) const { impl_->check_idle(verb); }
int64_t Cache::most_live() const noexcept { return impl_->most_live; }

bool Cache::fits(int64_t tokens) const {
  impl_->check_read_back("fits");
  TORCH_CHECK_VALUE(tokens >= 0, "[Cache::fits] tokens must be >= 0 but got ",
                    tokens, "; ask for the tokens of a step.");
  return std::all_of(
      impl_->lengths.begin(), impl_->lengths.end(),
      [&](int64_t length) { return tokens <= capacity() - length; });
}

Truncation Cache::truncate(std::span<const int64_t> targets) {
  Impl& impl = *impl_;
  impl.check_idle("truncate");
  TORCH_CHECK_VALUE(targets.size() == impl.lengths.size(),
                    "[Cache::truncate] lengths must have one entry per row, ",
                    impl.lengths.size(), ", but got ", targets.size(),
                    "; pass a length for every row.");
  for (size_t row = 0; row < targets.size(); ++row) {
    TORCH_CHECK_VALUE(targets[row] >= 0, "[Cache::truncate] the length of row ",
                      row, " must be >= 0 but got ", targets[row],
                      "; use drop_last() to count from the end.");
  }
  Truncation result{.replay = std::vector<int64_t>(targets.size(), 0)};
  bool shrunk = false;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] >= impl.lengths[row]) {
      continue;
    }
    const auto r = static_cast<int64_t>(row);
    RestorePoints& points = impl.points[row];
    const Impl::Cut cut = impl.find_cut(r, targets[row]);
    worsen(result.reason, cut.reason);
    result.replay[row] = targets[row] - cut.length;
    std::erase_if(points, [&](const auto& point) {
      return point->position > cut.length;
    });
    if (cut.in_window) {
      impl.windows.load(r, cut.length, impl.states);
    } else {
      impl.set_state(r, cut.point.get());
    }
    impl.windows.shorten(r, cut.length);
    impl.lengths[row] = cut.length;
    if (cut.length == 0) {
      impl.clear_row(r);
    }
    if (cut.in_window) {
      do_cut_in_window(r, impl.windows.start(r));
    }
    shrunk = true;
  }
  if (shrunk) {
    do_shrunk();
  }
  return result;
}

Truncation Cache::truncate(int64_t length) {
  return truncate(std::vector<int64_t>(impl_->lengths.size(), length));
}

Truncation Cache::drop_last(int64_t tokens) {
  impl_->check_idle("drop_last");
  TORCH_CHECK_VALUE(tokens >= 0,
                    "[Cache::drop_last] tokens must be >= 0 but got ", tokens,
                    "; use truncate() to give a length.");
  std::vector<int64_t> targets(impl_->lengths);
  for (int64_t& target : targets) {
    target = std::max<int64_t>(0, target - tokens);
  }
  return truncate(targets);
}

void Cache::reset() {
  impl_->check_idle("reset");
  for (int64_t row = 0; row < impl_->spec.rows; ++row) {
    impl_->clear_row(row);
  }
  do_shrunk();
}

void Cache::reset(int64_t row) {
  impl_->check_idle("reset");
  impl_->check_row("reset", row);
  impl_->clear_row(row);
  do_shrunk();
}

void Cache::reorder(std::span<const int64_t> rows) {
  Impl& impl = *impl_;
  impl.check_idle("reorder");
  TORCH_CHECK_VALUE(!rows.empty(),
                    "[Cache::reorder] rows must name at least one row but got "
                    "none; reset() empties a cache.");
  for (const int64_t row : rows) {
    impl.check_row("reorder", row);
  }
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<int64_t> lengths;
  std::vector<RestorePoints> points;
  std::vector<std::vector<int64_t>> oldest;
  for (const int64_t row : rows) {
    oldest.push_back(impl.oldest[row]);
    lengths.push_back(impl.lengths[row]);
    points.push_back(impl.points[row]);
  }
  RowStates states = impl.states.reordered(rows);
  StateWindows windows = impl.windows.reordered(rows);
  StepNumbers numbers = impl.numbers.like(count, impl.layouts);
  do_reorder(rows);  // the last thing that can fail
  const bool resized = count != impl.spec.rows;
  if (resized) {
    impl.states = std::move(states);
    impl.spec.rows = count;
    impl.numbers = std::move(numbers);
    raise_epoch();
  } else {
    impl.states.copy_from(states);
  }
  impl.windows = std::move(windows);
  impl.lengths = std::move(lengths);
  impl.points = std::move(points);
  impl.oldest = std::move(oldest);
}

void Cache::repeat_rows(int64_t times) {
  impl_->check_idle("repeat_rows");
  constexpr int64_t kMostRows = int64_t{1} << 24;
  TORCH_CHECK_VALUE(times >= 1 && times <= kMostRows / impl_->spec.rows,
                    "[Cache::repeat_rows] times must be in [1, ",
                    kMostRows / impl_->spec.rows, "] but got ", times,
                    "; every row is kept at least once.");
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < impl_->spec.rows; ++row) {
    rows.insert(rows.end(), static_cast<size_t>(times), row);
  }
  reorder(rows);
}

}  // namespace kvcache
