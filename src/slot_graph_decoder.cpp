#include "kvcache/slot_graph_decoder.h"

#include <c10/util/Exception.h>

#include "static_decoder.h"

namespace kvcache {
namespace {

// 1 for each slot that takes its token.
std::vector<int64_t> counts(const SlotCache& slots,
                            std::span<const uint8_t> active) {
  const int64_t rows = slots.spec().rows;
  TORCH_CHECK_VALUE(
      active.empty() || static_cast<int64_t>(active.size()) == rows,
      "[SlotGraphDecoder::step] active must have one entry for each of ", rows,
      " slots but got ", active.size(), "; leave it empty for all taken ones.");
  std::vector<int64_t> count(static_cast<size_t>(rows), 0);
  for (int64_t slot = 0; slot < rows; ++slot) {
    const auto i = static_cast<size_t>(slot);
    const bool takes = active.empty() ? slots.taken(slot) : active[i] != 0;
    TORCH_CHECK_VALUE(!takes || slots.taken(slot),
                      "[SlotGraphDecoder::step] slot ", slot,
                      " must be taken to be active but is free; acquire() it.");
    count[i] = takes ? 1 : 0;
  }
  return count;
}

}  // namespace

SlotGraphDecoder::SlotGraphDecoder(GraphModel model, SlotCache& slots,
                                   GraphDecoderOptions options)
    : decoder_(std::make_unique<StaticDecoder>(
          "SlotGraphDecoder", std::move(model), slots, std::move(options))) {}
SlotGraphDecoder::~SlotGraphDecoder() = default;
SlotGraphDecoder::SlotGraphDecoder(SlotGraphDecoder&&) noexcept = default;
SlotGraphDecoder& SlotGraphDecoder::operator=(SlotGraphDecoder&&) noexcept =
    default;

Tensor SlotGraphDecoder::step(const Tensor& tokens,
                              std::span<const uint8_t> active) {
  return decoder_->step(tokens, counts(slots(), active));
}

DecodedTokens SlotGraphDecoder::decode(const Tensor& tokens, int64_t steps,
                                       std::span<const uint8_t> active) {
  return decoder_->decode(tokens, steps, counts(slots(), active));
}

Tensor SlotGraphDecoder::logits() const { return decoder_->logits(); }

double SlotGraphDecoder::capture(std::span<const int64_t> windows) {
  return decoder_->capture(windows);
}

const SlotCache& SlotGraphDecoder::slots() const noexcept {
  return static_cast<const SlotCache&>(decoder_->cache());
}
const GraphStatistics& SlotGraphDecoder::statistics() const noexcept {
  return decoder_->statistics();
}
const GraphStatistics& SlotGraphDecoder::decode_statistics() const noexcept {
  return decoder_->decode_statistics();
}

}  // namespace kvcache
