#include "row_states.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "storage.h"

namespace kvcache {
namespace {

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

// Row `from_row` of `from` to row `to_row` of `to`; both [rows, width], dense.
void copy_row(const Tensor& to, int64_t to_row, const Tensor& from,
              int64_t from_row) {
  if (to.device().is_cpu() && from.device().is_cpu()) {
    const size_t bytes = static_cast<size_t>(to.size(1)) * to.element_size();
    std::memcpy(static_cast<char*>(to.data_ptr()) + to_row * bytes,
                static_cast<const char*>(from.data_ptr()) + from_row * bytes,
                bytes);
    return;
  }
  to.narrow(0, to_row, 1).copy_(from.narrow(0, from_row, 1));
}

// A layer's part of rows [first, first + rows) of `flat`.
Tensor part(const Tensor& flat, int64_t first, int64_t rows, int64_t offset,
            const std::vector<int64_t>& shape) {
  std::vector<int64_t> sizes{rows}, strides(shape.size() + 1, 1);
  sizes.insert(sizes.end(), shape.begin(), shape.end());
  for (size_t i = shape.size(); i-- > 1;) {
    strides[i] = strides[i + 1] * shape[i];
  }
  strides[0] = flat.size(1);
  return flat.as_strided(sizes, strides, first * flat.size(1) + offset);
}

}  // namespace

RowStates::RowStates(const CacheSpec& spec, bool may_swap)
    : conv_dtype_(spec.conv_dtype.value_or(spec.dtype)),
      device_(spec.device),
      may_swap_(may_swap) {
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* recurrent = std::get_if<RecurrentLayer>(&layer)) {
      layers_.push_back({*recurrent, conv_width_, state_width_});
      conv_width_ += recurrent->conv_channels * recurrent->conv_taps;
      if (!recurrent->state_shape.empty()) {
        state_width_ += product(recurrent->state_shape);
      }
    }
  }
  allocate(spec.rows);
}

void RowStates::allocate(int64_t rows) {
  for (int half = 0; half < 2; ++half) {
    if (conv_width_ > 0) {
      conv_[half] = new_zeros({rows, conv_width_}, conv_dtype_, device_);
    }
    if (state_width_ > 0) {
      state_[half] = new_zeros({rows, state_width_}, at::kFloat, device_);
    }
  }
}

void RowStates::fill(StepData& step) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  step.states.resize(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    StateView& view = step.states[i];
    if (layer.spec.conv_channels * layer.spec.conv_taps > 0) {
      const std::vector<int64_t> shape{layer.spec.conv_channels,
                                       layer.spec.conv_taps};
      view.conv =
          part(conv_[0], step.first_row, step.rows, layer.conv_offset, shape);
      view.next_conv =
          part(conv_[1], step.first_row, step.rows, layer.conv_offset, shape);
    }
    if (!layer.spec.state_shape.empty()) {
      view.state = part(state_[0], step.first_row, step.rows,
                        layer.state_offset, layer.spec.state_shape);
      view.next_state = part(state_[1], step.first_row, step.rows,
                             layer.state_offset, layer.spec.state_shape);
    }
  }
}

bool RowStates::commit(const StepData& step, bool by_ops) {
  if (empty()) {
    return false;
  }
  const int64_t all = conv_[0].defined() ? conv_[0].size(0) : state_[0].size(0);
  const bool every_row =
      step.rows == all && std::all_of(step.count.begin(), step.count.end(),
                                      [](int64_t n) { return n > 0; });
  if (may_swap_ && every_row) {  // an idle row's next state is garbage
    std::swap(conv_[0], conv_[1]);
    std::swap(state_[0], state_[1]);
    return true;
  }
  at::NoGradGuard no_grad;
  if (by_ops) {
    const Tensor takes = step.taken.gt(0).unsqueeze(1);
    std::vector<std::pair<Tensor, Tensor>> moves;
    for (Tensor* half : {conv_, state_}) {
      if (half[0].defined()) {
        const Tensor now = half[0].narrow(0, step.first_row, step.rows);
        const Tensor next = half[1].narrow(0, step.first_row, step.rows);
        moves.emplace_back(now, at::where(takes, next, now));
      }
    }
    for (const auto& [now, next] : moves) {
      now.copy_(next);
    }
    return false;
  }
  const auto* taken = step.taken.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < step.rows; ++row) {
    if (taken[row] == 0) {
      continue;
    }
    for (Tensor* half : {conv_, state_}) {
      if (half[0].defined()) {
        copy_row(half[0], step.first_row + row, half[1], step.first_row + row);
      }
    }
  }
  return false;
}

void RowStates::clear(int64_t row) noexcept {
  at::NoGradGuard no_grad;
  for (const Tensor* flat : {&conv_[0], &state_[0]}) {
    if (flat->defined()) {
      if (device_.is_cpu()) {
        const size_t bytes =
            static_cast<size_t>(flat->size(1)) * flat->element_size();
        std::memset(static_cast<char*>(flat->data_ptr()) + row * bytes, 0,
                    bytes);
      } else {
        flat->narrow(0, row, 1).zero_();
      }
    }
  }
}

std::shared_ptr<const RestorePoint> RowStates::snapshot(
    int64_t row, int64_t position) const {
  at::NoGradGuard no_grad;
  auto point = std::make_shared<RestorePoint>();
  point->position = position;
  if (conv_[0].defined()) {
    point->conv = new_empty({1, conv_width_}, conv_dtype_, device_);
    copy_row(point->conv, 0, conv_[0], row);
  }
  if (state_[0].defined()) {
    point->state = new_empty({1, state_width_}, at::kFloat, device_);
    copy_row(point->state, 0, state_[0], row);
  }
  return point;
}

bool RowStates::holds(const RestorePoint& point) const {
  const auto same = [](const Tensor& flat, const Tensor& t) {
    return flat.defined()
               ? t.defined() && t.dim() == 2 && t.size(0) == 1 &&
                     t.size(1) == flat.size(1) &&
                     t.scalar_type() == flat.scalar_type() && t.is_contiguous()
               : !t.defined();
  };
  return same(conv_[0], point.conv) && same(state_[0], point.state);
}

std::string RowStates::point_text() const {
  const auto text = [](const Tensor& flat) {
    return flat.defined() ? "[1, " + std::to_string(flat.size(1)) + "] " +
                                dtype_text(flat.scalar_type())
                          : std::string("an undefined tensor");
  };
  return text(conv_[0]) + " and " + text(state_[0]);
}

void RowStates::load(int64_t row, const RestorePoint& point) noexcept {
  at::NoGradGuard no_grad;
  if (conv_[0].defined()) {
    copy_row(conv_[0], row, point.conv, 0);
  }
  if (state_[0].defined()) {
    copy_row(state_[0], row, point.state, 0);
  }
}

RowStates RowStates::reordered(std::span<const int64_t> rows) const {
  at::NoGradGuard no_grad;
  RowStates result;
  result.layers_ = layers_;
  result.conv_width_ = conv_width_;
  result.state_width_ = state_width_;
  result.conv_dtype_ = conv_dtype_;
  result.device_ = device_;
  result.may_swap_ = may_swap_;
  result.allocate(static_cast<int64_t>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (conv_[0].defined()) {
      copy_row(result.conv_[0], static_cast<int64_t>(i), conv_[0], rows[i]);
    }
    if (state_[0].defined()) {
      copy_row(result.state_[0], static_cast<int64_t>(i), state_[0], rows[i]);
    }
  }
  return result;
}

RowStates RowStates::copy() const {
  const Tensor& any = conv_[0].defined() ? conv_[0] : state_[0];
  std::vector<int64_t> rows(static_cast<size_t>(any.size(0)));
  std::iota(rows.begin(), rows.end(), 0);
  return reordered(rows);
}

void RowStates::copy_from(const RowStates& from) noexcept {
  at::NoGradGuard no_grad;
  const int64_t rows = conv_[0].defined()
                           ? conv_[0].size(0)
                           : (state_[0].defined() ? state_[0].size(0) : 0);
  for (int64_t row = 0; row < rows; ++row) {
    if (conv_[0].defined()) {
      copy_row(conv_[0], row, from.conv_[0], row);
    }
    if (state_[0].defined()) {
      copy_row(state_[0], row, from.state_[0], row);
    }
  }
}

void RowStates::add_addresses(std::vector<const void*>& to) const {
  for (const Tensor* t : {&conv_[0], &conv_[1], &state_[0], &state_[1]}) {
    to.push_back(t->defined() ? t->const_data_ptr() : nullptr);
  }
}

void RowStates::add_memory(MemoryReport& report, int64_t live_rows) const {
  const auto add = [&](MemoryUse& use, const Tensor* halves) {
    if (halves[0].defined()) {
      use.reserved +=
          halves[0].storage().nbytes() + halves[1].storage().nbytes();
      use.used += static_cast<size_t>(live_rows * halves[0].size(1)) *
                  halves[0].element_size();
    }
    use.capacity = use.reserved;
  };
  add(report.conv, conv_);
  add(report.recurrent, state_);
}

}  // namespace kvcache
