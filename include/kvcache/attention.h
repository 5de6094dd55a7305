// kvcache/attention.h - the attention of whatever a KvView describes.
//
// The only place, beside fused decodes, that knows kernels: a new storage kind
// changes no model. B rows, T queries, S cells, H key/value heads, Hq query
// heads (a multiple of H), D head size.
#pragma once

#include "kvcache/types.h"  // KvView, Tensor

namespace kvcache {

struct AttendOptions {
  std::optional<double> scale = {};  // of q . k; empty: 1 / sqrt(D)
  Role role = Role::kPrefill;  // picks the kernel; the bits are the same
};

// softmax(q k^T * scale) v over the keys that `view` shows to each query.
// `q` is [B, Hq, T, D] in the view's dtype, any strides with a dense last
// dimension; query head h reads key/value head h / (Hq / H). Returns
// [B, Hq, T, D], a transposed view of dense [B, T, Hq, D].
//
// Row-exact on the CPU: partial results over fixed blocks of keys, counted from
// position 0 of the row, merged in a fixed order. The bits of a query depend on
// its own q and visible keys only: not on threads, neighbours, padding, storage
// order, capacity, or how many queries come along.
// float32 and bfloat16; accumulates in float32. Throws for other dtypes.
Tensor attend(const Tensor& q, const KvView& view,
              const AttendOptions& options = {});

}  // namespace kvcache
