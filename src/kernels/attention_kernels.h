// kernels/attention_kernels.h - what attend() asks of a CPU level.
//
// B rows, T queries, H key/value heads, D head size. A key/value head is read
// by a group of query heads; its queries are numbered t * group + g.
#pragma once

#include <cstdint>

namespace kvcache::kernels {

// Keys are cut into blocks of this many, counted from position 0 of the row.
// A query's result is a fold of one partial result per block, in ascending
// order, so this number is part of the arithmetic: another value, other bits.
constexpr int64_t kKeyBlock = 128;

// The sinks of a query are a block of their own, folded before all others; the
// others then hold positions from `sinks` on only. That block is never in a
// ring, so a ring and full storage are cut alike.
constexpr int64_t kSinkBlock = -1;

enum class Element : uint8_t { kFloat32, kBFloat16 };  // of q and the result

// A checked attend() call as plain numbers. Strides count elements.
struct AttentionCall {
  Element element = Element::kFloat32;
  const void* q = nullptr;  // [B, H * group, T, D]
  const void* k = nullptr;  // [B, H, cells, D]
  const void* v = nullptr;
  void* out = nullptr;              // [B, T, H * group, D], dense
  const int64_t* limits = nullptr;  // [B, T]
  int64_t q_row = 0, q_head = 0, q_token = 0;
  int64_t k_row = 0, k_head = 0, k_cell = 0;
  int64_t v_row = 0, v_head = 0, v_cell = 0;
  // K and V are int8 codes if these are set, else numbers like q.
  const float* k_scale = nullptr;  // [B, H, cells]
  const float* v_scale = nullptr;
  int64_t k_scale_row = 0, k_scale_head = 0, k_scale_cell = 0;
  int64_t v_scale_row = 0, v_scale_head = 0, v_scale_cell = 0;
  // Bytes of an element of K or V, and of a key that lie together.
  int64_t element_bytes = 0, key_bytes = 0;
  int64_t limits_row = 0, limits_token = 0;
  int64_t rows = 0, heads = 0, group = 0, tokens = 0, head_dim = 0;
  int64_t sliding = 0;  // 0: none
  int64_t sinks = 0;    // first positions that stay seen, at most kKeyBlock
  int64_t ring = 0;     // cells after those of the sinks; 0: none
  float scale = 0;      // of q . k, times log2(e): weights are powers of 2
};

// Queries [first, first + tokens) of one row and one key/value head.
struct QueryRange {
  int64_t row = 0, head = 0;
  int64_t first = 0, tokens = 0;
};

// `rows` times `bytes` bytes of memory, `step` bytes apart.
struct MemoryRows {
  const char* first = nullptr;
  int64_t rows = 0, step = 0, bytes = 0;
};

// What a thread reads soon, in this order. A hint.
struct MemoryAhead {
  MemoryRows now, then;
};

// The kernels of one CPU level. Each query gets the same bits from part() and
// fold() as from queries(). `scratch` is 64-byte aligned and belongs to the
// calling thread.
struct AttentionKernels {
  // Bytes of scratch for a range of `tokens` queries.
  int64_t (*scratch_bytes)(const AttentionCall& call, int64_t tokens);
  // Floats of the partial results of one query for one block.
  int64_t (*part_floats)(const AttentionCall& call);
  // Writes the partial result of `block` for each query of `range` that sees
  // a key of it, to parts + query * part_floats().
  void (*part)(const AttentionCall& call, const QueryRange& range,
               int64_t block, float* parts, const MemoryAhead& ahead,
               void* scratch);
  // Merges the partial results of all blocks and writes the output. Block
  // `first_block` + i of a query lies at parts + i * block_floats; with sinks
  // kSinkBlock lies at `parts` and the others one place further.
  void (*fold)(const AttentionCall& call, const QueryRange& range,
               int64_t first_block, int64_t block_floats, const float* parts,
               void* scratch);
  // Everything for `range`, block after block.
  void (*queries)(const AttentionCall& call, const QueryRange& range,
                  void* scratch);
};

// Which of them exist depends on the architecture that is compiled for.
const AttentionKernels& attention_portable();
const AttentionKernels& attention_avx2();
const AttentionKernels& attention_avx512();
const AttentionKernels& attention_avx512_bf16();
const AttentionKernels& attention_amx();

}  // namespace kvcache::kernels
