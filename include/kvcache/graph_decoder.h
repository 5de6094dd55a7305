// kvcache/graph_decoder.h - eager prefill, then one replay per decode step.
//
// B rows, V vocabulary. Graphs of one request serve the next ones.
#pragma once

#include "kvcache/step_graph.h"
#include "kvcache/window_cache.h"

namespace kvcache {

// What a decoder asks of a model: any forward over a Step.
struct GraphModel {
  struct Call {
    Role role = Role::kPrefill;
    bool all_logits = false;  // else of each row's last live token only
  };
  // `ids` [B, T] int64 -> float32 logits [B, 1, V], or [B, T, V] with
  // all_logits, on `device`. Does not commit the step.
  std::function<Tensor(const Tensor& ids, Step& step, const Call& call)>
      forward = {};
  int64_t context = 0;  // most tokens of a row
  int64_t vocab_size = 0;
  at::Device device = at::kCPU;
};

// The next token of each row, [B] int64, out of logits [B, V] inside of a
// recorded step: no number of the host, no synchronisation. Where `live` [B]
// bool is not set the answer does not count, and nothing may be remembered.
using GraphSampler = std::function<Tensor(const Tensor& logits,
                                          const Tensor& live, int64_t repeat)>;

struct GraphDecoderOptions {
  // Null: plain steps over the keys there are, no static window.
  std::shared_ptr<GraphBackend> backend = eager_graphs();
  std::optional<size_t> byte_budget = {};  // of all graphs
  // For decode(): most steps of one replay, and the tokens that end a row.
  int64_t steps_per_replay = 1;
  std::vector<int64_t> end_tokens = {};
  // Null: the arg-max, of equal ones the lowest id.
  GraphSampler sampler = {};
  std::vector<Tensor> sampler_inputs = {};  // that it reads; see StepGraph
};

struct GraphPrefillOptions {
  std::span<const int64_t> skip = {};  // [B] padding on the left; empty: none
  bool last_only = false;              // logits of the last position only
  std::optional<int64_t> chunk = {};   // columns of a step; empty: all at once
};

// What decode() made of each row, on the host.
struct DecodedTokens {
  Tensor ids = {};  // [steps, B] int64; behind a row's end the token repeats
  // Tokens that went into the cache: its first one and all but the last of ids.
  std::vector<int64_t> fed = {};  // [B]
};

class StaticDecoder;

// Over `cache`, which must outlive it, and whose rows are one batch. Works
// under any autograd mode. Not thread-safe.
class GraphDecoder {
 public:
  // Refuses a model on another device than the cache, and a cache that holds
  // more tokens than the model's context.
  GraphDecoder(GraphModel model, WindowCache& cache,
               GraphDecoderOptions options = {});
  ~GraphDecoder();
  GraphDecoder(GraphDecoder&&) noexcept;
  GraphDecoder& operator=(GraphDecoder&&) noexcept;

  // Empties the cache, then feeds `ids` [B, T] eagerly. Returns logits of all
  // positions [B, T, V], or of the last one [B, 1, V]. Another B, or more than
  // the capacity, is refused before anything is forgotten.
  Tensor prefill(const Tensor& ids, const GraphPrefillOptions& options = {});
  // `tokens` [B, 1] int64 -> logits [B, 1, V], a static buffer that the next
  // step overwrites: read it first. A full row is refused before anything runs.
  Tensor step(const Tensor& tokens);
  // Up to steps_per_replay steps of its own choosing in one replay: each row is
  // fed its token of `tokens` [B, 1], then what the sampler made of it, until
  // `steps` are done or it met an end token. All or nothing; without a backend
  // each step counts by itself.
  DecodedTokens decode(const Tensor& tokens, int64_t steps);
  // Of the last decode(): [steps, B, V] float32, static. Behind a row's end 0.
  Tensor logits() const;

  // Records ahead, so that no timed step pays for it: all buckets, or those
  // named. Skips those that are there. Returns the seconds it took.
  double capture(std::span<const int64_t> windows = {});

  const WindowCache& cache() const noexcept;
  const GraphStatistics& statistics() const noexcept;  // of step()
  const GraphStatistics& decode_statistics() const noexcept;

 private:
  std::unique_ptr<StaticDecoder> decoder_;
};

}  // namespace kvcache
