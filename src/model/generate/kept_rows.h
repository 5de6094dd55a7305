// kept_rows.h - free rows of a batcher that still hold the text that ended in
// them, so that a request which begins alike goes on in place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/model/prefix_cache.h"

namespace kvcache::model {

// A request that looks for a row.
struct RowRequest {
  std::span<const int64_t> prompt;
  const Namespace& space;
  int64_t multiple;  // see PrefixCache::restore_multiple()
};

class KeptRows {
 public:
  // `cache` must outlive it.
  explicit KeptRows(Cache& cache)
      : cache_(cache), rows_(static_cast<size_t>(cache.spec().rows)) {}

  // The text in `row` is over, and stays: `tokens` as many as the row holds, of
  // which the first `prompt` were prefilled.
  void keep(int64_t row, std::span<const int64_t> tokens, int64_t prompt,
            const Namespace& space);

  // Of the rows in `free` (not empty) the one that holds most of the request,
  // if that is half of its text at least: less is better copied from a store
  // than taken from a text that may go on. Else an empty row, else the one that
  // was kept first. Null: the request shares nothing. The row is no longer
  // kept, and holds nothing that it does not share.
  int64_t take(std::span<const int64_t> free, const RowRequest* request);

 private:
  struct Text {
    std::vector<int64_t> tokens;
    int64_t prompt = 0;
    Namespace space;
    uint64_t age = 0;  // the least was kept first
  };

  const std::optional<Text>& at(int64_t row) const {
    return rows_[static_cast<size_t>(row)];
  }
  int64_t shared(int64_t row, const RowRequest& request) const;
  // What counts first, and last, of a row that shares so many tokens.
  std::pair<int64_t, int64_t> rank(int64_t row, int64_t tokens) const;
  void cut(int64_t row, int64_t length);

  Cache& cache_;
  std::vector<std::optional<Text>> rows_;  // [B]
  uint64_t kept_ = 0;
};

}  // namespace kvcache::model
