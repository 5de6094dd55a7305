// drafts.cpp - the next tokens, guessed from the text itself.

#include "drafts.h"

#include <algorithm>

namespace kvcache::model {

std::vector<int64_t> draft_tokens(std::span<const int64_t> text,
                                  const PromptLookup& lookup, int64_t most) {
  const auto size = static_cast<int64_t>(text.size());
  if (most <= 0) return {};
  for (int64_t same = std::min(lookup.longest, size - 1);
       same >= lookup.shortest; --same) {
    const auto tail = text.last(static_cast<size_t>(same));
    // From the latest on: what was said last is said again.
    for (int64_t at = size - same - 1; at >= 0; --at) {
      const auto place =
          text.subspan(static_cast<size_t>(at), static_cast<size_t>(same));
      if (!std::equal(place.begin(), place.end(), tail.begin())) continue;
      const auto next = text.subspan(static_cast<size_t>(at + same));
      const auto count =
          std::min<size_t>(next.size(), static_cast<size_t>(most));
      return {next.begin(), next.begin() + static_cast<std::ptrdiff_t>(count)};
    }
  }
  return {};
}

}  // namespace kvcache::model
