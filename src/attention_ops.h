// attention_ops.h - attention by ATen ops alone, for devices without kernels of
// ours.
//
// Nothing here waits for the device, reads a value from it or sends one to it,
// and shapes follow from shapes and plain numbers: a call can be captured in a
// CUDA graph, and its replay sees the limits of that moment.
#pragma once

#include <string_view>

#include "kvcache/attention.h"

namespace kvcache {

enum class AttentionOps : uint8_t {
  kMasked,  // any device: products with every cell of the window, and a mask
  kVarlen   // CUDA, one query a row: the op that takes lengths on the device,
            // so that one graph serves all lengths
};

// attend() of arguments that it has checked; q and K may be NaN where nothing
// is seen, and so may V where no query of the row sees.
Tensor attend_by_ops(const Tensor& q, const KvView& view,
                     const AttendOptions& options, AttentionOps method);

// Why kVarlen does not serve a call, or nothing if it does.
std::string_view varlen_refusal(const Tensor& q, const KvView& view);
inline bool varlen_serves(const Tensor& q, const KvView& view) {
  return varlen_refusal(q, view).empty();
}

// K or V as kVarlen reads it: cell c of row b is element b * cells_between_rows
// + c of packed_cells, [n, H, D] in the same memory. For one row, or rows a
// whole number of cells apart.
Tensor packed_cells(const Tensor& x);
int64_t cells_between_rows(const Tensor& x);

}  // namespace kvcache
