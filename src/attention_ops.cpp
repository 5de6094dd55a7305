// attention_ops.cpp - masked and varlen attention.

#include "attention_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace kvcache {
namespace {

// Cells [0, n) hold every visible key.
int64_t cells_read(const KvView& view) {
  if (view.ring > 0) return view.sinks + view.ring;
  return view.window > 0 ? view.window : view.k.size(2);
}

// Which position lies in each of the first `cells` cells, -1 for none: the
// newest of those that share it. [1, 1, cells], with a ring [B, 1, cells].
Tensor positions_of_cells(const KvView& view, int64_t cells) {
  const Tensor cell =
      at::arange(cells, view.limits.options()).view({1, 1, cells});
  if (view.ring == 0) return cell;
  // Places in the ring and positions in it both count from the sinks.
  const Tensor place = cell.narrow(2, 0, view.ring);
  const Tensor newest = view.limits.amax(1, true).sub(view.sinks + 1);
  const Tensor behind = newest.unsqueeze(2).sub(place);
  const Tensor turning =
      newest.unsqueeze(2).sub(at::remainder(behind, view.ring));
  const Tensor position =
      turning.add(view.sinks).masked_fill_(turning.lt(0), -1);
  const Tensor sinks = cell.narrow(2, 0, view.sinks);
  return at::cat({sinks.expand({position.size(0), 1, view.sinks}), position},
                 2);
}

// Which cells each query sees: [B, T, cells] bool.
Tensor visible_cells(const KvView& view, int64_t cells) {
  const Tensor position = positions_of_cells(view, cells);
  const Tensor limit = view.limits.unsqueeze(2);
  Tensor visible = position.lt(limit);
  if (view.ring > 0) visible.bitwise_and_(position.ge(0));
  if (view.sliding > 0) {
    Tensor kept = position.ge(limit.sub(view.sliding));
    if (view.sinks > 0) kept.bitwise_or_(position.lt(view.sinks));
    visible.bitwise_and_(kept);
  }
  return visible;
}

// Returns dense [B, Hq, T, D]. The queries of a group are rows of one product,
// so that no key or value is repeated.
Tensor masked(const Tensor& q, const KvView& view, double scale) {
  const int64_t B = q.size(0), Hq = q.size(1), T = q.size(2), D = q.size(3);
  const int64_t H = view.k.size(1), group = Hq / H;
  const int64_t cells = cells_read(view);
  const Tensor visible = visible_cells(view, cells);
  const Tensor hidden = visible.bitwise_not().view({B, 1, 1, T, cells});
  const Tensor keys =
      view.k.narrow(2, 0, cells)
          .to(at::kFloat, false, false, at::MemoryFormat::Contiguous);
  const Tensor queries =
      q.reshape({B, H, group * T, D}).to(at::kFloat).mul(scale);
  // A NaN of a hidden key ends in its own column.
  const Tensor scores = at::matmul(queries, keys.transpose(2, 3))
                            .view({B, H, group, T, cells})
                            .masked_fill_(hidden, -INFINITY);
  // A query that sees nothing has NaN for weights until here.
  const Tensor weights = at::softmax(scores, -1).masked_fill_(hidden, 0);
  // 0 times NaN is NaN: values that nobody sees must go.
  const Tensor unseen = visible.any(1).bitwise_not().view({B, 1, cells, 1});
  const Tensor values = view.v.narrow(2, 0, cells)
                            .clone(at::MemoryFormat::Contiguous)
                            .masked_fill_(unseen, 0);
  return at::matmul(weights.to(q.scalar_type()).view({B, H, group * T, cells}),
                    values)
      .view({B, Hq, T, D});
}

// Returns dense [B, Hq, 1, D]. The op is called without what LibTorch 2.11 has
// not. It takes the last key for the query's own, so a window on the left means
// what `sliding` means.
Tensor varlen(const Tensor& q, const KvView& view, double scale) {
  const int64_t B = q.size(0), S = view.k.size(2);
  const bool windowed = view.sliding > 0 && view.sliding < S;
  const int64_t left = windowed ? view.sliding - 1 : -1;  // -1: no window
  const int64_t right = windowed ? 0 : -1;
  const Tensor rows = at::arange(B + 1, view.limits.options().dtype(at::kInt));
  const Tensor limits = view.limits.select(1, 0);
  const Tensor out = std::get<0>(at::_flash_attention_forward(
      q.select(2, 0).contiguous(), packed_cells(view.k), packed_cells(view.v),
      /*cum_seq_q=*/rows, /*cum_seq_k=*/rows.mul(cells_between_rows(view.k)),
      /*max_q=*/1, /*max_k=*/S, /*dropout_p=*/0.0, /*is_causal=*/false,
      /*return_debug_mask=*/false, std::optional<double>(scale), left, right,
      /*seqused_k=*/limits.to(at::kInt).contiguous()));
  // Not where() with a number, which would be copied from the host.
  return out.masked_fill(limits.le(0).view({B, 1, 1}), 0).unsqueeze(2);
}

// The op loads 16 bytes at a time. Storages start at more than that.
bool aligned(const Tensor& x) {
  constexpr int64_t kBytes = 16;
  const int64_t elements = kBytes / static_cast<int64_t>(x.element_size());
  return x.storage_offset() % elements == 0 && x.stride(1) % elements == 0 &&
         x.stride(2) % elements == 0;
}

bool packable(const Tensor& x) {
  return x.stride(2) > 0 &&
         (x.size(0) == 1 || (x.stride(0) % x.stride(2) == 0 &&
                             x.stride(0) / x.stride(2) >= x.size(2)));
}

}  // namespace

Tensor attend_by_ops(const Tensor& q, const KvView& view,
                     const AttendOptions& options, AttentionOps method) {
  const at::NoGradGuard no_grad;
  const int64_t B = q.size(0), Hq = q.size(1), T = q.size(2), D = q.size(3);
  if (q.numel() == 0 || cells_read(view) == 0) {
    return at::zeros({B, T, Hq, D}, q.options()).transpose(1, 2);
  }
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  const Tensor out = method == AttentionOps::kVarlen ? varlen(q, view, scale)
                                                     : masked(q, view, scale);
  return out.transpose(1, 2).contiguous().transpose(1, 2);
}

std::string_view varlen_refusal(const Tensor& q, const KvView& view) {
  constexpr int64_t kLargestHead = 256;
  if (q.size(2) != 1) return "it takes one query a row";
  if (view.ring > 0) return "it reads no ring";
  if (view.sinks > 0) return "it knows no sinks";
  if (view.window > 0 && view.window < view.k.size(2)) {
    return "the window is smaller than the cells";
  }
  if (q.scalar_type() != at::kBFloat16 && q.scalar_type() != at::kHalf) {
    return "it takes bfloat16 and float16";
  }
  if (q.size(3) % 8 != 0 || q.size(3) > kLargestHead) {
    return "the head size must be a multiple of 8 and at most 256";
  }
  if (!packable(view.k) || !packable(view.v) ||
      cells_between_rows(view.k) != cells_between_rows(view.v)) {
    return "rows of K and V must be the same whole number of cells apart";
  }
  if (!aligned(view.k) || !aligned(view.v)) {
    return "K and V must be aligned to 16 bytes";
  }
  if (q.size(0) * cells_between_rows(view.k) >
      std::numeric_limits<int32_t>::max()) {
    return "the cells of all rows must be fewer than 2^31";
  }
  if (!q.is_cuda()) return "it needs a CUDA device";
  return {};
}

int64_t cells_between_rows(const Tensor& x) {
  return x.size(0) == 1 ? x.size(2) : x.stride(0) / x.stride(2);
}

Tensor packed_cells(const Tensor& x) {
  const int64_t count = (x.size(0) - 1) * cells_between_rows(x) + x.size(2);
  return x.as_strided({count, x.size(1), x.size(3)},
                      {x.stride(2), x.stride(1), x.stride(3)});
}

}  // namespace kvcache
