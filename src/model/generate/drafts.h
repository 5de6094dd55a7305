// drafts.h - the next tokens, guessed from the text itself.
#pragma once

#include <span>
#include <vector>

#include "kvcache/model/generate.h"

namespace kvcache::model {

// At most `most` tokens that followed the latest earlier place where the last
// tokens of `text` stood, as many as possible of them the same; none if there
// is no such place. Source: prompt lookup decoding (Saxena, 2023).
// O(text length * longest).
std::vector<int64_t> draft_tokens(std::span<const int64_t> text,
                                  const PromptLookup& lookup, int64_t most);

}  // namespace kvcache::model
