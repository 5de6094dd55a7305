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
  Role role = Role::kPrefill;        // picks the kernel; the bits are the same
};

// softmax(q k^T * scale) v over the keys that `view` shows to each query.
// `q` is [B, Hq, T, D] in the view's dtype, any strides with a dense last
// dimension, as K and V; query head h reads key/value head h / (Hq / H). Over
// KvFormat::kInt8 it is float32 or bfloat16. Returns [B, Hq, T, D], a
// transposed view of dense [B, T, Hq, D]; a query that sees nothing gets 0. No
// gradient flows through it.
//
// Row-exact on the CPU: partial results over fixed blocks of keys, counted from
// position 0 of the row, sinks in a block of their own before them, merged in a
// fixed order. The bits of a query depend on its own q and visible keys only:
// not on threads, neighbours, padding, storage order, ring, capacity, or how
// many queries come along; and on the CPU level (KVCACHE_CPU_LEVEL: portable,
// avx2, avx_vnni, avx512, avx512_bf16, amx; default the highest that the
// machine has). Cells that no query sees may hold NaN.
//
// float32 and bfloat16; accumulates in float32. With avx512_bf16, weights of a
// bfloat16 call are rounded to bfloat16. Over KvFormat::kInt8, on the CPU,
// parts of a query and weights times scales are rounded to 2^-16 of the largest
// of the query, or of the block.
//
// On other devices, where float16 will do as well, ATen ops come close to it.
// They wait for nothing, send nothing and take their shapes from the view's, so
// a CUDA graph can hold the call. They read every cell below `window` (of a
// ring: all), so a graph needs one window for each range of lengths; on CUDA
// with one query a row, no ring or sinks, 16-bit values and storage in the
// order of positions, `window` 0 or all cells reads live keys only, and one
// graph serves all lengths. Cells that no query of the row sees may hold NaN.
// Limits are not checked.
//
// Errors: TypeError for other dtypes, NotImplementedError for other storage
// formats, ValueError for shapes and, on the CPU, for limits beyond the cells.
// Cost on the CPU: one allocation, the result; scratch is kept per thread.
Tensor attend(const Tensor& q, const KvView& view,
              const AttendOptions& options = {});

}  // namespace kvcache
