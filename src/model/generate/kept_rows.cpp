// kept_rows.cpp - which row a request goes on in.
#include "kept_rows.h"

#include <algorithm>
#include <limits>

namespace kvcache::model {

void KeptRows::keep(int64_t row, std::span<const int64_t> tokens,
                    int64_t prompt, const Namespace& space) {
  rows_[static_cast<size_t>(row)] =
      Text{{tokens.begin(), tokens.end()}, prompt, space, kept_++};
}

// Tokens of the row that the request may go on from. Its last one is computed
// in any case, for its logits.
int64_t KeptRows::shared(int64_t row, const RowRequest& request) const {
  const auto& text = at(row);
  if (!text || text->space != request.space) return 0;
  const auto most = std::min(text->tokens.size(), request.prompt.size() - 1);
  const auto same = static_cast<int64_t>(
      std::mismatch(text->tokens.begin(),
                    text->tokens.begin() + static_cast<int64_t>(most),
                    request.prompt.begin())
          .first -
      text->tokens.begin());
  if (request.multiple == 1) return same;
  const int64_t prefilled = std::min(same, text->prompt);
  return prefilled - prefilled % request.multiple;
}

std::pair<int64_t, int64_t> KeptRows::rank(int64_t row, int64_t tokens) const {
  const auto& text = at(row);
  if (!text) return {0, 1};
  const bool goes_on = 2 * tokens >= std::ssize(text->tokens);
  return {goes_on ? tokens : 0, -static_cast<int64_t>(text->age)};
}

int64_t KeptRows::take(std::span<const int64_t> free,
                       const RowRequest* request) {
  const auto tokens_of = [&](int64_t row) {
    return request == nullptr ? 0 : shared(row, *request);
  };
  int64_t best = free.front(), tokens = tokens_of(best);
  for (const int64_t row : free.subspan(1)) {
    const int64_t here = tokens_of(row);
    if (rank(row, here) <= rank(best, tokens)) continue;
    best = row;
    tokens = here;
  }
  cut(best, tokens);
  rows_[static_cast<size_t>(best)].reset();
  return best;
}

// States go back to a restore point at or before the length.
void KeptRows::cut(int64_t row, int64_t length) {
  if (length == 0) {
    cache_.reset(row);
    return;
  }
  std::vector<int64_t> lengths(rows_.size(),
                               std::numeric_limits<int64_t>::max());
  lengths[static_cast<size_t>(row)] = length;
  cache_.truncate(lengths);
}

}  // namespace kvcache::model
