// encode_chat.cpp - the ids of a rendered conversation.

#include <algorithm>

#include "kvcache/model/chat_template.h"

namespace kvcache::model {

std::vector<int64_t> encode_chat(const Tokenizer& tokenizer,
                                 std::span<const TextPart> parts) {
  std::vector<int64_t> ids = tokenizer.encode(parts);
  const SpecialIds& special = tokenizer.special_ids();
  const bool wanted = special.add_bos && special.bos;
  if (wanted && (ids.empty() || ids.front() != *special.bos)) {
    ids.insert(ids.begin(), *special.bos);
  }
  return ids;
}

}  // namespace kvcache::model
