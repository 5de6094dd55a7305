// kvcache/model/stream_decoder.h - token ids to text, one at a time.
//
// A character may be spread over several tokens. Every piece handed out is
// valid UTF-8 and ends between characters; all pieces together are what
// Tokenizer::decode_text gives for all ids at once.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

// Cuts a stream of bytes between characters. Bytes that cannot become valid
// UTF-8 turn into U+FFFD as soon as that is certain.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);
  std::string finish();  // the tail; ready for a new stream afterwards

 private:
  std::string pending_;  // the start of a character, at most 3 bytes
};

struct StreamOptions {
  bool skip_special = true;  // control tokens give no text
};

// One generation's text. Not thread-safe.
//
// Errors: an id out of range throws and changes nothing.
class StreamDecoder {
 public:
  // `prompt`: the ids before the stream. They give no text, but decide whether
  // the stream begins a text.
  explicit StreamDecoder(TokenizerPtr tokenizer,
                         std::span<const int64_t> prompt = {},
                         StreamOptions options = {});

  // The text that `id` completes; empty while a character is unfinished.
  std::string push(int64_t id);
  // What is left: U+FFFD for an unfinished character. Call once, at the end.
  std::string finish();

 private:
  TokenizerPtr tokenizer_;
  StreamOptions options_;
  bool at_start_ = true;  // no text yet, so a leading space may be dropped
  Utf8Stream utf8_;
};

}  // namespace kvcache::model
