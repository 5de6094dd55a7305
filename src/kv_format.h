// How K and V of one token and head lie in memory: a record.
//
// kPlain: D numbers of the cache's dtype. kInt8: D codes, padding up to a
// multiple of 4 bytes, one float32 scale. A record moves as a whole, so every
// verb that copies cells copies scales with them, and no layer's head size asks
// for a group that divides it.
#pragma once

#include "kvcache/types.h"

namespace kvcache {

// "plain", "int8"
const char* format_text(KvFormat format);

// Size of the last dimension of stored K and V, and the type of its elements.
int64_t record_size(KvFormat format, int64_t head_dim);
at::ScalarType record_dtype(KvFormat format, at::ScalarType dtype);
// Bytes of a record without its scale, and of the scale.
int64_t value_bytes(KvFormat format, at::ScalarType dtype, int64_t head_dim);
int64_t scale_bytes(KvFormat format);

// Views of int8 records [.., R]: [.., D] int8 and [.., 1] float32.
Tensor codes_of(const Tensor& records, int64_t head_dim);
Tensor scales_of(const Tensor& records);

// A dense copy [.., R] of plain `values` [.., D], float32 or bfloat16 on the
// CPU, and one back. The way there and back and there again gives other scales:
// they are those of the rounded values.
Tensor quantised(const Tensor& values);
Tensor dequantised(const Tensor& records, int64_t head_dim,
                   at::ScalarType dtype);

}  // namespace kvcache
