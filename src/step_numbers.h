// Positions, limits and cells of a step, made where the kernels read them.
//
// The host decides what a step is; the device's lengths say where its tokens
// go. So a recorded step needs no number of the host, and a replay of it
// continues from wherever the rows are by then.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "kvcache/detail/step_data.h"

namespace kvcache {

class StepNumbers {
 public:
  // By ATen ops on any device but the CPU, where a plain loop is faster.
  StepNumbers(int64_t rows, at::Device device,
              const std::vector<CellLayout>& layouts);
  // For other rows or layouts, in the same way on the same device.
  StepNumbers like(int64_t rows, const std::vector<CellLayout>& layouts) const;

  // Host: lengths of all rows, skip and count of the step, if the device has
  // other ones.
  void upload(std::span<const int64_t> lengths, const StepData& step);
  // Host: buffers for the step's shape, into `step`.
  void shape(StepData& step);
  // Device: the numbers of the step. A row that is `finished` takes nothing.
  void fill(const StepData& step) const;
  // Device: lengths += taken.
  void advance(const StepData& step) const noexcept;
  // Host: the device may have other numbers than known; they are sent again.
  void forget() noexcept;
  // Host: what the device's lengths have become.
  void note_advance(const StepData& step, int64_t repeats) noexcept;
  std::vector<int64_t> read_lengths();  // waits for the device

  bool by_ops() const noexcept { return by_ops_; }
  const Tensor& skip() const noexcept { return skip_; }  // [rows of the step]
  int64_t uploads() const noexcept { return uploads_; }

  Tensor finished;  // [all rows] bool on the device; undefined: none is

 private:
  void send(const Tensor& to, std::span<const int64_t> values);
  void fill_by_loop(const StepData& step) const;
  void fill_by_ops(const StepData& step) const;
  Tensor rows_of(const Tensor& all, const StepData& step) const;

  std::vector<CellLayout> layouts_;
  at::Device device_;
  bool by_ops_;
  int64_t uploads_ = 0;
  std::vector<int64_t> known_lengths_, known_skip_, known_count_;
  int64_t known_first_ = 0;
  Tensor lengths_;                           // [all rows] int64
  Tensor all_skip_, all_count_, all_taken_;  // the same
  Tensor skip_, count_;                      // of the step's rows
  // Back positions, limits and cells of steps of up to so many tokens. Kept for
  // ever, as recorded steps use them: one for each power of two.
  std::map<int64_t, Tensor> buffers_;
  Tensor ramp_;  // 0, 1, ... on the device, of the step's buffer
  std::map<int64_t, Tensor> ramps_;
};

// For tests: caches made while it lives do on the CPU what they would do on
// another device.
class ForcedOps {
 public:
  ForcedOps();
  ~ForcedOps();
  ForcedOps(const ForcedOps&) = delete;
  ForcedOps& operator=(const ForcedOps&) = delete;
  static bool active() noexcept;
};

}  // namespace kvcache
