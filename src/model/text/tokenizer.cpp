// tokenizer.cpp - what every tokenizer does alike: options, checks, decoding.

#include "kvcache/model/tokenizer.h"

#include <c10/util/Exception.h>

namespace kvcache::model {

void Tokenizer::check_id(const char* function, int64_t id) const {
  TORCH_CHECK_INDEX(id >= 0 && id < vocab_size(), "[Tokenizer::", function,
                    "] token id must be in [0, ", vocab_size(), ") but got ",
                    id, "; take ids from a model with this vocabulary.");
}

std::vector<int64_t> Tokenizer::encode(std::string_view text,
                                       EncodeOptions options) const {
  const TextPart part{.text = std::string(text), .special = options.special};
  return encode(std::span(&part, 1), options);
}

std::vector<int64_t> Tokenizer::encode(std::span<const TextPart> parts,
                                       EncodeOptions options) const {
  std::string text;
  std::string special;
  bool any_special = false;
  for (const TextPart& part : parts) {
    text += part.text;
    special.append(part.text.size(), part.special ? 1 : 0);
    any_special |= part.special;
  }
  if (!any_special) special.clear();
  std::vector<int64_t> ids;
  if (options.add_bos && special_.add_bos && special_.bos) {
    ids.push_back(*special_.bos);
  }
  if (!text.empty()) do_encode(text, special, ids);
  if (options.add_eos && special_.add_eos && special_.eos) {
    ids.push_back(*special_.eos);
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int64_t> ids,
                              DecodeOptions options) const {
  std::string text;
  bool at_start = !options.continues && strips_leading_space();
  for (const int64_t id : ids) {
    const bool control = is_control(id);
    if (control && options.skip_special) continue;
    std::string_view bytes = token_bytes(id);
    if (!control && !bytes.empty() && at_start) {
      at_start = false;
      if (bytes.front() == ' ') bytes.remove_prefix(1);
    }
    text += bytes;
  }
  return text;
}

std::string Tokenizer::decode_text(std::span<const int64_t> ids,
                                   DecodeOptions options) const {
  return replace_invalid_utf8(decode(ids, options));
}

std::string_view Tokenizer::token_bytes(int64_t id) const {
  check_id("token_bytes", id);
  return do_token_bytes(id);
}

std::optional<int64_t> Tokenizer::id_of(std::string_view text) const {
  return do_id_of(text);
}

bool Tokenizer::is_control(int64_t id) const {
  check_id("is_control", id);
  return do_is_control(id);
}

}  // namespace kvcache::model
