// text_output.h - sampled ids to text that may be shown.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "kvcache/model/stop_strings.h"
#include "kvcache/model/stream_decoder.h"

namespace kvcache::model {

// Decoding, stop strings and the text hook of one generation. Without a
// tokenizer it does nothing. An id that the tokenizer lacks gives no text:
// models pad their vocabularies, and a padding id may be sampled.
class TextOutput {
 public:
  using Hook = std::function<void(std::string_view)>;

  TextOutput(const TokenizerPtr& tokenizer, std::span<const int64_t> prompt,
             const std::vector<std::string>& stop, const Hook& hook);

  // Returns, after showing it, the text that `id` made certain.
  std::string push(int64_t id);
  bool stopped() const;
  // Shows what was held back.
  void finish();
  // The same while an exception is on its way: swallows another one, and does
  // not call a hook that has thrown.
  void finish_after_error() noexcept;
  std::string take_text() { return std::move(text_); }

 private:
  void show(std::string_view text);

  int64_t known_ids_ = 0;  // of the tokenizer
  std::optional<StreamDecoder> decoder_;
  std::optional<StopStrings> stops_;
  const Hook& hook_;
  bool hook_failed_ = false;
  bool finished_ = false;
  std::string text_;
};

}  // namespace kvcache::model
