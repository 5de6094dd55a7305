// kvcache/slot_graph_decoder.h - one replay for all slots of a SlotCache.
//
// The batch is always all slots. Requests are admitted, prefilled (a step over
// one row) and released between replays; graphs stay valid.
#pragma once

#include "kvcache/graph_decoder.h"
#include "kvcache/slot_cache.h"

namespace kvcache {

// Over `slots`, which must outlive it. Not thread-safe. Another kind of cache
// than a SlotCache does not compile.
class SlotGraphDecoder {
 public:
  SlotGraphDecoder(GraphModel model, SlotCache& slots,
                   GraphDecoderOptions options = {});
  ~SlotGraphDecoder();
  SlotGraphDecoder(SlotGraphDecoder&&) noexcept;
  SlotGraphDecoder& operator=(SlotGraphDecoder&&) noexcept;

  // `tokens` [n_slots, 1] int64 -> logits [n_slots, 1, V], a static buffer that
  // the next step overwrites; rows of slots that took no part are 0. `active`
  // [n_slots] says which slots take their token; empty: the taken ones. A full
  // active slot is refused before anything is written: release it first.
  Tensor step(const Tensor& tokens, std::span<const uint8_t> active = {});
  // As GraphDecoder::decode(), for the active slots; `ids` of others repeat.
  DecodedTokens decode(const Tensor& tokens, int64_t steps,
                       std::span<const uint8_t> active = {});
  Tensor logits() const;  // of the last decode(): [steps, n_slots, V]

  // As GraphDecoder::capture(); safe between any two steps.
  double capture(std::span<const int64_t> windows = {});

  const SlotCache& slots() const noexcept;
  const GraphStatistics& statistics() const noexcept;
  const GraphStatistics& decode_statistics() const noexcept;

 private:
  std::unique_ptr<StaticDecoder> decoder_;
};

}  // namespace kvcache
