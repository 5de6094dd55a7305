#include "state_windows.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "storage.h"

namespace kvcache {
namespace {

// Numbers of a row's inputs of one layer, or of all of them.
int64_t inputs_of(const RecurrentLayer& layer, int64_t tokens) {
  const int64_t channels = layer.conv_taps > 0 ? layer.conv_channels : 0;
  return channels * (layer.conv_taps + tokens);
}
int64_t all_inputs(const RowStates& states, int64_t tokens) {
  int64_t sum = 0;
  for (const RowStates::Layer& layer : states.layout()) {
    sum += inputs_of(layer.spec, tokens);
  }
  return sum;
}
int64_t all_states(const RowStates& states) {
  return states.state().defined() ? states.state().size(1) : 0;
}

void grow(Tensor& memory, int64_t numbers, const Tensor& like) {
  if (numbers > 0 && (!memory.defined() || memory.numel() < numbers)) {
    memory = new_empty({numbers}, like.scalar_type(), like.device());
  }
}

// [rows, T, ...], tokens `width` numbers apart.
Tensor state_view(const Tensor& memory, const StepData& step,
                  const RowStates::Layer& layer, int64_t width) {
  std::vector<int64_t> sizes = layer.spec.state_shape;
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * sizes[i];
  }
  sizes.insert(sizes.begin(), {step.rows, step.tokens});
  strides.insert(strides.begin(), {step.tokens * width, width});
  return memory.as_strided(sizes, strides, layer.state_offset);
}

// Kc columns of each channel, channels `stride` apart, side by side.
void copy_columns(const Tensor& to, int64_t to_first, const Tensor& from,
                  int64_t from_first, const RecurrentLayer& layer,
                  int64_t stride) {
  const int64_t taps = layer.conv_taps, channels = layer.conv_channels;
  if (!to.device().is_cpu()) {
    to.as_strided({channels, taps}, {taps, 1}, to_first)
        .copy_(from.as_strided({channels, taps}, {stride, 1}, from_first));
    return;
  }
  const size_t size = to.element_size();
  char* into = static_cast<char*>(to.data_ptr()) + to_first * size;
  const char* out_of =
      static_cast<const char*>(from.const_data_ptr()) + from_first * size;
  for (int64_t c = 0; c < channels; ++c) {
    std::memcpy(into + c * taps * size, out_of + c * stride * size,
                static_cast<size_t>(taps) * size);
  }
}

void copy_states(const Tensor& to, int64_t to_first, const Tensor& from,
                 int64_t from_first, int64_t count) {
  if (!to.device().is_cpu()) {
    to.as_strided({count}, {1}, to_first)
        .copy_(from.narrow(0, from_first, count));
    return;
  }
  std::memcpy(to.data_ptr<float>() + to_first,
              from.const_data_ptr<float>() + from_first,
              static_cast<size_t>(count) * sizeof(float));
}

}  // namespace

void StateWindows::fill(StepData& step, const RowStates& states) {
  step.windows.clear();
  if (!step.state_window || states.empty()) {
    return;
  }
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t width = all_states(states);
  const int64_t inputs = all_inputs(states, step.tokens);
  grow(memory_.state, step.rows * step.tokens * width, states.state());
  grow(memory_.conv, step.rows * inputs, states.conv());
  int64_t offset = 0;
  for (const RowStates::Layer& layer : states.layout()) {
    StateWindow window;
    if (!layer.spec.state_shape.empty()) {
      window.state = state_view(memory_.state, step, layer, width);
    }
    if (const int64_t own = inputs_of(layer.spec, step.tokens); own > 0) {
      const int64_t columns = layer.spec.conv_taps + step.tokens;
      window.conv = memory_.conv.as_strided(
          {step.rows, layer.spec.conv_channels, columns}, {inputs, columns, 1},
          offset);
      offset += own;
    }
    step.windows.push_back(std::move(window));
  }
}

void StateWindows::committed(const StepData& step) noexcept {
  const bool filled =
      !step.windows.empty() &&
      std::all_of(step.window_done.begin(), step.window_done.end(),
                  [](bool done) { return done; });
  for (int64_t i = 0; i < step.rows; ++i) {
    const auto of = static_cast<size_t>(i);
    if (step.count[of] > 0) {
      rows_[static_cast<size_t>(step.first_row + i)] =
          filled ? Row{step.start[of], step.count[of], i, step.skip[of]}
                 : Row{};
    }
  }
  if (filled) {
    kept_ = memory_;
    tokens_ = step.tokens;
  }
}

bool StateWindows::holds(int64_t row, int64_t length) const noexcept {
  const Row& of = rows_[static_cast<size_t>(row)];
  return length > of.start && length <= of.start + of.tokens;
}

void StateWindows::load(int64_t row, int64_t length,
                        const RowStates& states) const noexcept {
  at::NoGradGuard no_grad;
  const Row& of = rows_[static_cast<size_t>(row)];
  const int64_t columns = of.skip + length - of.start;  // of the step
  if (const int64_t width = all_states(states); width > 0) {
    copy_states(states.state(), row * width, kept_.state,
                (of.index * tokens_ + columns - 1) * width, width);
  }
  int64_t first = of.index * all_inputs(states, tokens_) + columns;
  for (const RowStates::Layer& layer : states.layout()) {
    if (const int64_t own = inputs_of(layer.spec, tokens_); own > 0) {
      copy_columns(states.conv(),
                   row * states.conv().size(1) + layer.conv_offset, kept_.conv,
                   first, layer.spec, layer.spec.conv_taps + tokens_);
      first += own;
    }
  }
}

void StateWindows::shorten(int64_t row, int64_t length) noexcept {
  Row& of = rows_[static_cast<size_t>(row)];
  of.tokens = std::min(of.tokens, std::max<int64_t>(length - of.start, 0));
}

void StateWindows::drop_all() noexcept {
  std::fill(rows_.begin(), rows_.end(), Row{});
  kept_ = {};
}

StateWindows StateWindows::reordered(std::span<const int64_t> rows) const {
  StateWindows result(*this);
  result.rows_.clear();
  for (const int64_t row : rows) {
    result.rows_.push_back(rows_[static_cast<size_t>(row)]);
  }
  return result;
}

bool StateWindows::ends_at(int64_t row, int64_t length) const noexcept {
  const Row& of = rows_[static_cast<size_t>(row)];
  return of.tokens == 0 || of.start + of.tokens == length;
}

void StateWindows::add_memory(MemoryUse& points,
                              const RowStates& states) const {
  StorageBytes bytes;
  for (const Memory* memory : {&memory_, &kept_}) {
    bytes.add(memory->state);
    bytes.add(memory->conv);
  }
  points.reserved += bytes.total();
  std::map<int64_t, int64_t> kept;  // of a row of the step, by any row of ours
  for (const Row& of : rows_) {
    kept[of.index] = std::max(kept[of.index], of.tokens);
  }
  for (const auto& [index, tokens] : kept) {
    if (tokens > 0) {
      points.used +=
          static_cast<size_t>(tokens * all_states(states)) * sizeof(float);
      points.used += static_cast<size_t>(all_inputs(states, tokens)) *
                     (kept_.conv.defined() ? kept_.conv.element_size() : 0);
    }
  }
}

}  // namespace kvcache
