// tokenizer_json_fuzz.cpp - any bytes as a tokenizer.json, and a text for it.
//
// The text follows a line "----". What loads must encode and decode it, and
// streaming must give what decoding all at once gives.

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvcache/model/stream_decoder.h"
#include "kvcache/model/tokenizer.h"

namespace {

using namespace kvcache::model;

// A pattern may take a while for each byte.
constexpr size_t kMaxText = 200;
constexpr std::string_view kSeparator = "\n----\n";

void check(bool condition) {
  if (!condition) std::abort();
}

void use(const TokenizerPtr& tokenizer, std::string_view text) {
  for (const bool special : {false, true}) {
    const auto ids =
        tokenizer->encode(text, {.special = special, .add_bos = true});
    StreamDecoder decoder(tokenizer);
    std::string streamed;
    size_t controls = 0;
    for (const int64_t id : ids) {
      check(id >= 0 && id < tokenizer->vocab_size());
      streamed += decoder.push(id);
      controls += tokenizer->is_control(id) ? 1 : 0;
    }
    streamed += decoder.finish();
    check(streamed == tokenizer->decode_text(ids, {.skip_special = true}));
    // Plain text gives no control token, apart from the begin token.
    check(special || controls <= 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(input.find(kSeparator), input.size());
  std::string_view text = input.substr(cut);
  text.remove_prefix(std::min(kSeparator.size(), text.size()));
  try {
    const TokenizerPtr tokenizer = make_json_tokenizer(input.substr(0, cut));
    use(tokenizer, text.substr(0, kMaxText));
  } catch (const c10::Error&) {
  }
  return 0;
}
