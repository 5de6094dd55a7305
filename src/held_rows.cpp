#include "held_rows.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "storage.h"

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

// `from` [H, n - begin, D], positions [begin, n) of a row that ends at `end`,
// into its cells; in a ring, those that are not overwritten before the end.
void put_positions(const Tensor& from, int64_t begin, int64_t end,
                   const Tensor& cells, const CellLayout& layout) {
  const int64_t n = begin + from.size(1);
  const int64_t plain = layout.ring == 0 ? n : std::min(layout.sinks, n);
  if (plain > begin) {
    cells.narrow(1, begin, plain - begin)
        .copy_(from.narrow(1, 0, plain - begin));
  }
  const int64_t turning = std::max({begin, plain, end - layout.ring});
  if (layout.ring > 0 && n > turning) {
    Tensor(cells).index_copy_(
        1, ring_cells(layout, turning, n, cells.device()),
        from.narrow(1, turning - begin, n - turning).to(cells.device()));
  }
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
  if (const int64_t front = std::min(kept, n); front > 0) {
    put_positions(held.narrow(1, 0, front), 0, n, cells, layout);
  }
  if (n > first) {
    put_positions(held.narrow(1, kept, n - first), first, n, cells, layout);
  }
}

void put_row(const Checkpoint& from, size_t index, int64_t n, int64_t sinks,
             const KvTensors& cells, const CellLayout& layout) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (auto part : {&KvTensors::k, &KvTensors::v}) {
    const Tensor& to = cells.*part;
    for (const auto& block : from.blocks) {
      if (block->first >= n) break;
      const int64_t count = std::min(block->tokens, n - block->first);
      put_positions((block->kv[index].*part).narrow(1, 0, count), block->first,
                    n, to, layout);
    }
    if (from.blocks.empty() && n > 0) {
      const HeldRows held{sinks, from.first[index], from.length};
      held.put(from.kv[index].*part, n, to, layout);
    }
  }
}

std::shared_ptr<const KvBlock> take_block(const std::vector<KvTensors>& rows,
                                          int64_t first, int64_t tokens) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto block = std::make_shared<KvBlock>();
  block->first = first;
  block->tokens = tokens;
  int64_t values = 0;
  for (const KvTensors& row : rows) {
    values += 2 * row.k.size(0) * tokens * row.k.size(2);
  }
  if (values == 0) {
    return block;
  }
  const Tensor all =
      new_empty({values}, rows[0].k.scalar_type(), rows[0].k.device());
  int64_t offset = 0;
  const auto copied = [&](const Tensor& cells) {
    const int64_t count = cells.size(0) * tokens * cells.size(2);
    // In the order of the cells, so that it is one plain copy.
    const bool by_position = cells.stride(1) > cells.stride(0);
    const Tensor flat = all.narrow(0, offset, count);
    const Tensor to =
        by_position
            ? flat.view({tokens, cells.size(0), cells.size(2)}).transpose(0, 1)
            : flat.view({cells.size(0), tokens, cells.size(2)});
    offset += count;
    Tensor(to).copy_(cells.narrow(1, first, tokens));
    return to;
  };
  for (const KvTensors& row : rows) {
    // In braces: from left to right.
    block->kv.push_back(KvTensors{copied(row.k), copied(row.v)});
  }
  return block;
}

}  // namespace kvcache
