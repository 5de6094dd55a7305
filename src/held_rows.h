// The positions of a row that a Checkpoint holds, to and from cells.
#pragma once

#include "kvcache/detail/step_data.h"

namespace kvcache {

// Of a row of `length` tokens: [0, min(sinks, first)), then [first, length).
struct HeldRows {
  int64_t sinks = 0, first = 0, length = 0;

  // Out of `cells` [H, S, D], a dense copy [H, held, D].
  Tensor take(const Tensor& cells, const CellLayout& layout) const;
  // The first `n` positions of `held` into `cells`; of a ring the last ones
  // that it has room for.
  void put(const Tensor& held, int64_t n, const Tensor& cells,
           const CellLayout& layout) const;
};

// The first `n` positions of an attention layer of `from`, counted from 0, into
// the cells [H, S, D] of a row. `sinks`: of the layer.
void put_row(const Checkpoint& from, size_t index, int64_t n, int64_t sinks,
             const KvTensors& cells, const CellLayout& layout);

// A copy of positions [first, first + tokens) of a row whose positions are
// their own cells; `rows`: K and V of each attention layer [H, S, D]. One
// allocation.
std::shared_ptr<const KvBlock> take_block(const std::vector<KvTensors>& rows,
                                          int64_t first, int64_t tokens);

}  // namespace kvcache
