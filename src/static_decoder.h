// What GraphDecoder and SlotGraphDecoder share: static inputs and outputs, and
// the graphs over them.
#pragma once

#include "kvcache/graph_decoder.h"

namespace kvcache {

class StaticDecoder {
 public:
  // `name` is the public class, for messages.
  StaticDecoder(const char* name, GraphModel model, WindowCache& cache,
                GraphDecoderOptions options);

  Tensor prefill(const Tensor& ids, const GraphPrefillOptions& options);
  // `count` [B] of 0 and 1: rows that take their token.
  Tensor step(const Tensor& tokens, std::span<const int64_t> count);
  DecodedTokens decode(const Tensor& tokens, int64_t steps,
                       std::span<const int64_t> count);
  Tensor logits() const;
  double capture(std::span<const int64_t> windows);

  WindowCache& cache() const noexcept { return cache_; }
  const GraphStatistics& statistics() const noexcept;
  const GraphStatistics& decode_statistics() const noexcept;

 private:
  void check_tokens(const Tensor& tokens) const;
  void check_room(std::span<const int64_t> count, int64_t steps) const;
  Tensor plain_step(const Tensor& tokens, std::span<const int64_t> count);
  DecodedTokens plain_decode(int64_t steps, std::span<const int64_t> count);
  void logits_step(Step& step) const;
  void token_step(Step& step, int64_t repeat) const;
  Tensor prefill_steps(const Tensor& ids, const GraphPrefillOptions& options);

  const char* name_;
  GraphModel model_;
  WindowCache& cache_;
  GraphDecoderOptions options_;
  Tensor tokens_;        // [B, 1] int64, what the next step feeds
  Tensor logits_;        // [B, 1, V] float32
  Tensor ids_;           // [N, B] int64, what decode() sampled
  Tensor scores_;        // [N, B, V] float32, out of which
  Tensor finished_;      // [B] bool
  Tensor ends_;          // [end tokens] int64; undefined: none
  int64_t decoded_ = 0;  // steps of the last decode()
  std::unique_ptr<StepGraph> logits_graph_, token_graph_;
};

}  // namespace kvcache
