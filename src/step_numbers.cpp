#include "step_numbers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "storage.h"

namespace kvcache {
namespace {

int& forced_ops() noexcept {
  static thread_local int depth = 0;
  return depth;
}

int64_t cell_of(const CellLayout& layout, int64_t position) {
  return layout.ring == 0 || position < layout.sinks
             ? position
             : layout.sinks + (position - layout.sinks) % layout.ring;
}

}  // namespace

ForcedOps::ForcedOps() { ++forced_ops(); }
ForcedOps::~ForcedOps() { --forced_ops(); }
bool ForcedOps::active() noexcept { return forced_ops() > 0; }

StepNumbers::StepNumbers(int64_t rows, at::Device device,
                         const std::vector<CellLayout>& layouts)
    : layouts_(layouts),
      device_(device),
      by_ops_(!device.is_cpu() || ForcedOps::active()),
      known_lengths_(static_cast<size_t>(rows), 0) {
  const Tensor all = new_zeros({4, rows}, at::kLong, device);
  lengths_ = all.select(0, 0);
  all_skip_ = all.select(0, 1);
  all_count_ = all.select(0, 2);
  all_taken_ = all.select(0, 3);
}

StepNumbers StepNumbers::like(int64_t rows,
                              const std::vector<CellLayout>& layouts) const {
  StepNumbers other(rows, device_, layouts);
  other.by_ops_ = by_ops_;
  other.uploads_ = uploads_;
  return other;
}

Tensor StepNumbers::rows_of(const Tensor& all, const StepData& step) const {
  return all.narrow(0, step.first_row, step.rows);
}

void StepNumbers::send(const Tensor& to, std::span<const int64_t> values) {
  ++uploads_;
  if (device_.is_cpu()) {
    std::memcpy(to.data_ptr<int64_t>(), values.data(), values.size_bytes());
    return;
  }
  to.copy_(at::tensor(at::IntArrayRef(values.data(), values.size()),
                      at::TensorOptions(at::kLong)));
}

void StepNumbers::upload(std::span<const int64_t> lengths,
                         const StepData& step) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (!std::equal(lengths.begin(), lengths.end(), known_lengths_.begin(),
                  known_lengths_.end())) {
    send(lengths_, lengths);
    known_lengths_.assign(lengths.begin(), lengths.end());
  }
  const bool moved = known_first_ != step.first_row;
  known_first_ = step.first_row;
  if (moved || known_skip_ != step.skip) {
    send(rows_of(all_skip_, step), step.skip);
    known_skip_ = step.skip;
  }
  if (moved || known_count_ != step.count) {
    send(rows_of(all_count_, step), step.count);
    known_count_ = step.count;
  }
}

void StepNumbers::shape(StepData& step) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t size = step.rows * step.tokens;
  const auto kinds = static_cast<int64_t>(layouts_.size()) + 2;
  const auto room =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(size)));
  Tensor& buffer = buffers_[room];
  if (!buffer.defined()) {
    buffer = new_empty({kinds, room}, at::kLong, device_);
  }
  if (by_ops_) {
    ramp_ = ramps_[room];
    if (!ramp_.defined()) {
      ramp_ = at::arange(room, at::TensorOptions(at::kLong).device(device_));
      ramps_[room] = ramp_;
    }
  }
  int64_t which = 0;
  const auto next = [&] {
    return buffer.select(0, which++)
        .narrow(0, 0, size)
        .view({step.rows, step.tokens});
  };
  step.positions = next();
  step.limits = next();
  step.cells.resize(layouts_.size());
  for (Tensor& cells : step.cells) {
    cells = next();
  }
  step.taken = rows_of(all_taken_, step);
  skip_ = rows_of(all_skip_, step);
  count_ = rows_of(all_count_, step);
}

void StepNumbers::fill(const StepData& step) const {
  if (by_ops_) {
    fill_by_ops(step);
  } else {
    fill_by_loop(step);
  }
}

void StepNumbers::fill_by_loop(const StepData& step) const {
  auto* position = step.positions.data_ptr<int64_t>();
  auto* limit = step.limits.data_ptr<int64_t>();
  const auto* start = lengths_.data_ptr<int64_t>() + step.first_row;
  const auto* skip = skip_.data_ptr<int64_t>();
  const auto* count = count_.data_ptr<int64_t>();
  auto* taken = step.taken.data_ptr<int64_t>();
  const bool* ended =
      finished.defined() ? finished.data_ptr<bool>() + step.first_row : nullptr;
  for (int64_t row = 0; row < step.rows; ++row) {
    taken[row] = ended != nullptr && ended[row] ? 0 : count[row];
    const int64_t end = skip[row] + taken[row];
    for (int64_t t = 0; t < step.tokens; ++t, ++position, ++limit) {
      const bool live = t >= skip[row] && t < end;
      const int64_t p = start[row] + t - skip[row];
      *position = live ? p : 0;
      *limit = live ? p + 1 : 0;
    }
  }
  const auto* limits = step.limits.data_ptr<int64_t>();
  for (size_t i = 0; i < layouts_.size(); ++i) {
    auto* cell = step.cells[i].data_ptr<int64_t>();
    for (int64_t n = 0; n < step.rows * step.tokens; ++n) {
      cell[n] = limits[n] > 0 ? cell_of(layouts_[i], limits[n] - 1)
                              : layouts_[i].dead;
    }
  }
}

void StepNumbers::fill_by_ops(const StepData& step) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  step.taken.copy_(count_);
  if (finished.defined()) {
    step.taken.masked_fill_(rows_of(finished, step), 0);
  }
  const Tensor token = ramp_.narrow(0, 0, step.tokens)
                           .unsqueeze(0)              // [1, T]
                           .sub(skip_.unsqueeze(1));  // [rows, T]
  // masked_fill: where() with a number would copy it from the host.
  const Tensor dead = token.lt(0).logical_or(token.ge(step.taken.unsqueeze(1)));
  const Tensor p = token.add(rows_of(lengths_, step).unsqueeze(1));
  step.positions.copy_(p.masked_fill(dead, 0));
  step.limits.copy_(p.add(1).masked_fill_(dead, 0));
  for (size_t i = 0; i < layouts_.size(); ++i) {
    const CellLayout& layout = layouts_[i];
    Tensor cell = p;
    if (layout.ring > 0) {
      const Tensor turning = p.sub(layout.sinks);
      cell = at::where(turning.lt(0), p,
                       turning.remainder(layout.ring).add(layout.sinks));
    }
    step.cells[i].copy_(cell.masked_fill(dead, layout.dead));
  }
}

void StepNumbers::advance(const StepData& step) const noexcept {
  at::NoGradGuard no_grad;
  if (by_ops_) {
    rows_of(lengths_, step).add_(step.taken);
    return;
  }
  auto* length = lengths_.data_ptr<int64_t>() + step.first_row;
  const auto* taken = step.taken.data_ptr<int64_t>();
  for (int64_t row = 0; row < step.rows; ++row) {
    length[row] += taken[row];
  }
}

void StepNumbers::note_advance(const StepData& step, int64_t repeats) noexcept {
  for (int64_t row = 0; row < step.rows; ++row) {
    known_lengths_[step.first_row + row] += step.count[row] * repeats;
  }
}

std::vector<int64_t> StepNumbers::read_lengths() {
  const Tensor here = lengths_.to(at::kCPU);
  const auto* values = here.data_ptr<int64_t>();
  known_lengths_.assign(values, values + here.numel());
  return known_lengths_;
}

void StepNumbers::forget() noexcept {
  std::fill(known_lengths_.begin(), known_lengths_.end(), -1);
}

}  // namespace kvcache
