#include "kvcache/graph_decoder.h"

#include "static_decoder.h"

namespace kvcache {

GraphDecoder::GraphDecoder(GraphModel model, WindowCache& cache,
                           GraphDecoderOptions options)
    : decoder_(std::make_unique<StaticDecoder>("GraphDecoder", std::move(model),
                                               cache, std::move(options))) {}
GraphDecoder::~GraphDecoder() = default;
GraphDecoder::GraphDecoder(GraphDecoder&&) noexcept = default;
GraphDecoder& GraphDecoder::operator=(GraphDecoder&&) noexcept = default;

Tensor GraphDecoder::prefill(const Tensor& ids,
                             const GraphPrefillOptions& options) {
  return decoder_->prefill(ids, options);
}

Tensor GraphDecoder::step(const Tensor& tokens) {
  const std::vector<int64_t> all(cache().lengths().size(), 1);
  return decoder_->step(tokens, all);
}

DecodedTokens GraphDecoder::decode(const Tensor& tokens, int64_t steps) {
  const std::vector<int64_t> all(cache().lengths().size(), 1);
  return decoder_->decode(tokens, steps, all);
}

Tensor GraphDecoder::logits() const { return decoder_->logits(); }

double GraphDecoder::capture(std::span<const int64_t> windows) {
  return decoder_->capture(windows);
}

const WindowCache& GraphDecoder::cache() const noexcept {
  return decoder_->cache();
}
const GraphStatistics& GraphDecoder::statistics() const noexcept {
  return decoder_->statistics();
}
const GraphStatistics& GraphDecoder::decode_statistics() const noexcept {
  return decoder_->decode_statistics();
}

}  // namespace kvcache
