// stream_decoder_fuzz.cpp - any bytes as a stream of tokens and as stop
// strings.
//
// Cut anywhere, a stream must give what the whole gives: as UTF-8, through a
// tokenizer, and up to a stop string.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/model/stop_strings.h"
#include "kvcache/model/stream_decoder.h"
#include "kvcache/model/tokenizer.h"

namespace {

using namespace kvcache::model;

void check(bool condition) {
  if (!condition) std::abort();
}

bool is_utf8(std::string_view text) {
  return replace_invalid_utf8(text) == text;
}

// Takes the input apart: a number, then bytes of a length it says.
class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  size_t number(size_t below) {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return byte % below;
  }
  std::string bytes(size_t most) {
    const size_t size = std::min(number(most + 1), rest_.size());
    std::string taken(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return taken;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

void check_utf8(const std::vector<std::string>& pieces) {
  Utf8Stream stream;
  std::string whole, streamed;
  for (const std::string& piece : pieces) {
    whole += piece;
    const std::string shown = stream.push(piece);
    check(is_utf8(shown));
    streamed += shown;
  }
  check(streamed + stream.finish() == replace_invalid_utf8(whole));
}

void check_stops(const std::vector<std::string>& stops,
                 const std::vector<std::string>& pieces) {
  StopStrings filter(stops);
  std::string whole, shown;
  for (const std::string& piece : pieces) {
    whole += piece;
    shown += filter.push(piece);
  }
  shown += filter.finish();
  size_t end = whole.size();
  for (const std::string& stop : stops) end = std::min(end, whole.find(stop));
  check(shown == whole.substr(0, end));
  check(filter.stopped() == (end < whole.size()));
}

// Every byte, some pairs of bytes, and control tokens.
const TokenizerPtr& byte_tokenizer() {
  static const TokenizerPtr tokenizer = [] {
    GgufVocabulary from{.source = "fuzz", .model = "gpt2", .pre = "gpt-2"};
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) ||
                             (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const uint32_t c = printable ? byte : next++;
      from.tokens.push_back(
          c < 0x80 ? std::string(1, static_cast<char>(c))
                   : std::string{static_cast<char>(0xC0 | c >> 6),
                                 static_cast<char>(0x80 | (c & 0x3F))});
    }
    for (size_t i = 0xC2; i < 0xF4; ++i) {
      const std::string left = from.tokens[i];
      const std::string right = from.tokens[0x80 + i % 64];
      from.merges.push_back(left + " " + right);
      from.tokens.push_back(left + right);
    }
    from.types.assign(from.tokens.size(), 1);
    from.tokens.push_back("<|end|>");
    from.types.push_back(3);
    from.eos_id = static_cast<int64_t>(from.tokens.size()) - 1;
    return make_tokenizer(from);
  }();
  return tokenizer;
}

void check_tokens(const std::vector<std::string>& pieces) {
  const TokenizerPtr& tokenizer = byte_tokenizer();
  std::string whole;
  for (const std::string& piece : pieces) whole += piece;
  check(tokenizer->decode(tokenizer->encode(whole)) == whole);
  std::vector<int64_t> ids;
  for (const char byte : whole) {
    const auto value = static_cast<int64_t>(static_cast<uint8_t>(byte));
    ids.push_back((value * 7 + 3) % tokenizer->vocab_size());
  }
  StreamDecoder decoder(tokenizer);
  std::string streamed;
  for (const int64_t id : ids) {
    const std::string piece = decoder.push(id);
    check(is_utf8(piece));
    streamed += piece;
  }
  streamed += decoder.finish();
  check(streamed == tokenizer->decode_text(ids, {.skip_special = true}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::vector<std::string> stops;
  for (size_t count = input.number(4); stops.size() < count;) {
    std::string stop = input.bytes(6);
    if (stop.empty()) stop = "x";
    stops.push_back(stop);
  }
  std::vector<std::string> pieces;
  while (!input.empty()) pieces.push_back(input.bytes(7));
  check_utf8(pieces);
  check_stops(stops, pieces);
  check_tokens(pieces);
  return 0;
}
