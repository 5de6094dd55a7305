#include "held_rows.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace kvcache {
namespace {

// The cells of positions [begin, end) in a ring, as an index.
Tensor ring_cells(const CellLayout& layout, int64_t begin, int64_t end,
                  at::Device device) {
  std::vector<int64_t> cells;
  for (int64_t p = begin; p < end; ++p) {
    cells.push_back(layout.sinks + (p - layout.sinks) % layout.ring);
  }
  return at::tensor(cells, at::TensorOptions(at::kLong)).to(device);
}

}  // namespace

Tensor HeldRows::take(const Tensor& cells, const CellLayout& layout) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t kept = std::min(sinks, first);
  if (layout.ring == 0) {
    if (kept == 0) {
      return cells.narrow(1, first, length - first)
          .clone(at::MemoryFormat::Contiguous);
    }
    return at::cat(
        {cells.narrow(1, 0, kept), cells.narrow(1, first, length - first)}, 1);
  }
  const int64_t still = std::min(layout.sinks, length);  // not in the ring
  const int64_t begin = std::max(first, still);
  const Tensor turning =
      cells.index_select(1, ring_cells(layout, begin, length, cells.device()));
  // Either [0, kept) or, as nothing was lost, [0, still).
  const int64_t front = first > still ? kept : still;
  return at::cat({cells.narrow(1, 0, front), turning}, 1);
}

void HeldRows::put(const Tensor& held, int64_t n, const Tensor& cells,
                   const CellLayout& layout) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t kept = std::min(sinks, first);
  const auto source = [&](int64_t begin, int64_t end) {  // not across the gap
    return held.narrow(1, begin < kept ? begin : kept + begin - first,
                       end - begin);
  };
  if (layout.ring == 0) {
    if (const int64_t front = std::min(kept, n); front > 0) {
      cells.narrow(1, 0, front).copy_(source(0, front));
    }
    if (n > first) {
      cells.narrow(1, first, n - first).copy_(source(first, n));
    }
    return;
  }
  const int64_t front = std::min(layout.sinks, n);
  // Without a gap: if fewer are kept, the rest follows them.
  cells.narrow(1, 0, front).copy_(held.narrow(1, 0, front));
  const int64_t begin = std::max({first, front, n - layout.ring});
  if (n > begin) {
    Tensor(cells).index_copy_(1, ring_cells(layout, begin, n, cells.device()),
                              source(begin, n).to(cells.device()));
  }
}

}  // namespace kvcache
