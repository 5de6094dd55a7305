// kvcache/types.h - what caches, forwards and kernels pass to each other.
//
// B rows, T tokens of a step, S cells, H key/value heads, D head size, C conv
// channels, Kc = conv kernel - 1. A position is the index of a live token in
// its row; a cell is where a position is stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace kvcache {

using at::Tensor;

// A layer that keeps keys and values of every token.
struct AttentionLayer {
  int64_t heads = 0;     // H, key/value heads
  int64_t head_dim = 0;  // D
  int64_t sliding = 0;   // sees only its last `sliding` keys; 0: all of them
  int64_t sinks = 0;     // with sliding: sees the first `sinks` keys as well
  bool operator==(const AttentionLayer&) const = default;
};

// A layer that keeps a state of fixed size: recurrent, convolution, or both.
struct RecurrentLayer {
  int64_t conv_channels = 0;  // C; 0: no convolution
  int64_t conv_taps = 0;      // Kc, inputs kept
  std::vector<int64_t> state_shape =
      {};  // of one row; empty: no recurrent state
  bool operator==(const RecurrentLayer&) const = default;
};

using LayerSpec = std::variant<AttentionLayer, RecurrentLayer>;

// How K and V are stored. kInt8: one signed byte a value and one float32 scale
// for each token and head, value = code * scale, max |code| 127; nothing spans
// tokens, so what is stored does not depend on how tokens came in. In-place
// kinds on the CPU, float32 or bfloat16 outside.
enum class KvFormat : uint8_t { kPlain, kInt8 };

// What a cache is made for. Layers are numbered from `first_layer`, so that a
// cache over the upper part of a model is called with the model's own numbers.
struct CacheSpec {
  int64_t rows = 1;  // B
  std::optional<int64_t> capacity =
      {};  // most tokens a row holds; empty: no bound
  std::optional<int64_t> max_step =
      {};  // largest T, for kinds with static shapes
  at::ScalarType dtype = at::kBFloat16;   // of K and V, as update() takes them
  KvFormat kv_format = KvFormat::kPlain;  // as they are kept
  std::optional<at::ScalarType> conv_dtype =
      {};  // of conv inputs; empty: dtype
  at::Device device = at::kCPU;
  int64_t first_layer = 0;
  std::vector<LayerSpec> layers = {};
};

// The tokens of a step. Of row b, [skip, skip + count) are live; the rest is
// padding: not stored, not seen, and even NaN there changes no live result.
struct StepSpec {
  int64_t tokens = 1;                   // T, padding included
  std::span<const int64_t> skip = {};   // [rows] padding on the left; empty: 0
  std::span<const int64_t> count = {};  // [rows]; empty: T - skip. 0: row idle
  int64_t first_row = 0;  // the step is about [first_row, first_row + rows)
  std::optional<int64_t> rows = {};  // empty: to the last row
  // Keep the recurrent states after each token too, for truncate() into this
  // step, until a row's next change. Recorded steps do not.
  bool state_window = false;
};

// What attention reads. Query (b, t) sees positions [max(0, n - sliding), n),
// n = limits[b, t] (sliding 0: from 0), and [0, min(sinks, n)). n = 0 sees
// nothing and gives 0. Position p lies in cell p; with a ring, from `sinks` on,
// in cell sinks + (p - sinks) % ring. Through `blocks` if paged.
struct KvView {
  Tensor k, v;  // [B, H, S, D], any strides with dense D; kInt8: int8 codes
  Tensor k_scale, v_scale;  // kInt8: [B, H, S, 1] float32; else undefined
  Tensor blocks;            // [B, n] int32; undefined: not paged
  Tensor limits;            // [B, T] int64: keys seen
  Tensor cells;             // [B, T] int64: where the new token goes; dead: -1
  Tensor mask;              // [B, 1, T, window] bool, if a kernel needs one
  int64_t window = 0;       // every visible cell is below it; fixed in a graph
  int64_t sliding = 0;
  int64_t sinks = 0;     // first positions that stay visible beside `sliding`
  int64_t ring = 0;      // cells that positions from `sinks` on take in turn
  bool uniform = false;  // equal lengths, nothing dead: plain causal will do
  KvFormat format = KvFormat::kPlain;
};

// One recurrent layer: read `state`, write `next_state`. What idle rows leave
// in next_* is ignored. Each row is dense; rows may be apart.
struct StateView {
  Tensor conv, next_conv;    // [B, C, Kc], raw inputs, newest last
  Tensor state, next_state;  // [B, ...] as in the LayerSpec, float32
};

// One recurrent layer after each token of the step; what stands at dead tokens
// is ignored. Each state is dense.
struct StateWindow {
  Tensor state;  // [B, T, ...] float32; undefined: the layer has none
  // [B, C, Kc + T], as Step::extend_conv() gives it; undefined: none.
  Tensor conv;
};

// What a truncation could keep, from best to worst. Of several rows, the worst.
enum class TruncationReason : uint8_t {
  kNoChange,      // the target was not below the length
  kExact,         // kept exactly what was asked for
  kRestorePoint,  // recurrent state: back to the newest restore point
  kEvicted        // a point was newer, but a sliding window no longer holds it
};

struct Truncation {
  TruncationReason reason = TruncationReason::kNoChange;
  std::vector<int64_t> replay =
      {};  // [B] tokens to feed again from lengths() on
};

// The recurrent and convolution state of one row after `position` tokens.
// Immutable and shared: forks and reordered rows hold the same one.
struct RestorePoint {
  int64_t position = 0;
  Tensor conv;   // [1, C * Kc of all layers]; undefined: none
  Tensor state;  // [1, states of all layers] float32; undefined: none
};
using RestorePoints = std::vector<std::shared_ptr<const RestorePoint>>;

// K and V of one attention layer as plain tensors.
struct KvTensors {
  Tensor k, v;
};

// K and V of positions [first, first + tokens) of one row. Immutable and shared
// between the checkpoints of texts that begin alike.
struct KvBlock {
  int64_t first = 0;
  int64_t tokens = 0;
  // Per attention layer [H, tokens, D]; in kInt8 [H, tokens, R] int8, of which
  // R - 4 are codes and padding and the last 4 a float32 scale.
  std::vector<KvTensors> kv = {};
};
using KvBlocks = std::vector<std::shared_ptr<const KvBlock>>;

// One row after `length` tokens, in no cache kind: K/V of [0, length), its
// restore points, the last of them at the length if there are states. Shares
// nothing that a cache writes to.
struct Checkpoint {
  int64_t length = 0;
  int64_t first_layer = 0;
  std::vector<LayerSpec> layers = {};
  at::ScalarType dtype = at::kBFloat16;
  KvFormat format = KvFormat::kPlain;
  std::vector<KvTensors> kv = {};  // as in a block: [H, length, D or R]
  // Per attention layer, first position held of those behind the sinks. If it
  // is not 0: K/V of [0, min(sinks, first)), then of [first, length).
  std::vector<int64_t> first = {};
  RestorePoints points = {};  // ascending positions
  // In place of kv and first: K/V of [0, length), in ascending order.
  KvBlocks blocks = {};
  size_t bytes() const;  // of unique storages
};

// How checkpoint() cuts K/V into blocks.
struct BlockOptions {
  // Of a text that begins with the same `same` tokens: its blocks that lie
  // within them are taken over, not copied.
  const Checkpoint* shared = nullptr;
  int64_t same = 0;
  // Tokens; blocks end at multiples of it, the last one at the length.
  int64_t block = 64;
  // Tokens to keep, at most; with states, up to the newest restore point there.
  // Empty: all.
  std::optional<int64_t> length = {};
};

// Bytes of one part of a cache, each storage counted once.
struct MemoryUse {
  size_t used = 0;                      // hold live tokens or states
  size_t reserved = 0;                  // allocated now
  std::optional<size_t> capacity = {};  // when full; empty: no bound
};

struct MemoryReport {
  MemoryUse k, v, scales, conv, recurrent, restore_points, graphs;
  MemoryUse total() const;
};

// What a forward is for. Kernels are chosen by role, never by the row count.
// Batched decode and the verification of drafts are decode.
enum class Role : uint8_t { kPrefill, kDecode };

}  // namespace kvcache
