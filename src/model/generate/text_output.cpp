// text_output.cpp - sampled ids to text that may be shown.

#include "text_output.h"

#include <vector>

namespace kvcache::model {

TextOutput::TextOutput(const TokenizerPtr& tokenizer,
                       std::span<const int64_t> prompt,
                       const std::vector<std::string>& stop, const Hook& hook)
    : hook_(hook) {
  if (!tokenizer) return;
  known_ids_ = tokenizer->vocab_size();
  std::vector<int64_t> known(prompt.begin(), prompt.end());
  std::erase_if(known, [&](int64_t id) { return id >= known_ids_; });
  decoder_.emplace(tokenizer, known);
  stops_.emplace(stop);
}

std::string TextOutput::push(int64_t id) {
  if (!decoder_ || id >= known_ids_) return {};
  std::string text = stops_->push(decoder_->push(id));
  show(text);
  return text;
}

bool TextOutput::stopped() const { return stops_ && stops_->stopped(); }

void TextOutput::finish() {
  if (!decoder_ || finished_) return;
  finished_ = true;
  std::string text = stops_->push(decoder_->finish());
  text += stops_->finish();
  show(text);
}

void TextOutput::finish_after_error() noexcept {
  if (hook_failed_) return;
  try {
    finish();
  } catch (...) {  // the first exception says more
  }
}

void TextOutput::show(std::string_view text) {
  if (text.empty()) return;
  text_ += text;
  if (!hook_) return;
  hook_failed_ = true;  // until it returns
  hook_(text);
  hook_failed_ = false;
}

}  // namespace kvcache::model
