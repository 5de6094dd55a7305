// stream_decoder.cpp - token ids to text, one at a time.

#include "kvcache/model/stream_decoder.h"

#include <c10/util/Exception.h>

#include <utility>

#include "utf8.h"

namespace kvcache::model {

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string text;
  size_t at = 0;
  while (at < pending_.size()) {
    const Utf8Step step = utf8_step(pending_, at);
    if (step.truncated) break;
    text += step.valid ? std::string_view(pending_).substr(at, step.length)
                       : kReplacement;
    at += step.length;
  }
  pending_.erase(0, at);
  return text;
}

std::string Utf8Stream::finish() {
  return replace_invalid_utf8(std::exchange(pending_, {}));
}

StreamDecoder::StreamDecoder(TokenizerPtr tokenizer,
                             std::span<const int64_t> prompt,
                             StreamOptions options)
    : tokenizer_(std::move(tokenizer)), options_(options) {
  TORCH_CHECK_VALUE(tokenizer_ != nullptr,
                    "[StreamDecoder] tokenizer must not be null; pass what "
                    "load_tokenizer() returned.");
  for (const int64_t id : prompt) {
    at_start_ &=
        tokenizer_->is_control(id) || tokenizer_->token_bytes(id).empty();
  }
}

std::string StreamDecoder::push(int64_t id) {
  const bool control = tokenizer_->is_control(id);
  if (control && options_.skip_special) return {};
  std::string_view bytes = tokenizer_->token_bytes(id);
  if (!control && !bytes.empty() && std::exchange(at_start_, false) &&
      tokenizer_->strips_leading_space() && bytes.front() == ' ') {
    bytes.remove_prefix(1);
  }
  return utf8_.push(bytes);
}

std::string StreamDecoder::finish() { return utf8_.finish(); }

}  // namespace kvcache::model
