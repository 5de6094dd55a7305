// kvcache/model/session.h - prefill once, decode one token at a time.
//
// The smallest front end: tensors in, logits out, no sampling and no text.
// B rows of one batch that advance together, T tokens, V vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "kvcache/cache.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

struct SessionOptions {
  CacheKind kind = CacheKind::kConcat;  // any but kNone
  std::optional<int64_t> context = {};  // tokens; empty: the model's
  int64_t chunk = kCanonicalChunk;
};

// What a session keeps. Of an empty one: zeros, no dtype, and the text.
struct StorageReport {
  int64_t positions = 0;
  size_t logical_bytes = 0;  // of K and V of the live tokens
  size_t storage_bytes = 0;  // of the storages behind them, each once
  std::optional<at::ScalarType> dtype = {};
  std::string allocation;  // how the memory grows, for people
};

// One batch of texts of equal length. Not thread-safe.
//
// Errors: bad arguments, and a forward that throws, leave the session as it
// was.
class CacheSession {
 public:
  explicit CacheSession(std::shared_ptr<const LanguageModel> model,
                        const SessionOptions& options = {});

  int64_t length() const noexcept;  // tokens in the cache
  int64_t rows() const noexcept;    // B; 0 before the first prefill
  int64_t context() const noexcept { return context_; }
  const Cache* cache() const noexcept { return cache_.get(); }

  // Starts anew with `ids` [B, T] int64, 1 <= T <= context. Returns the logits
  // of the last position, [B, 1, V].
  Tensor prefill(const Tensor& ids);
  // One more token of each row, [B, 1]. Returns its logits [B, 1, V].
  Tensor decode(const Tensor& ids);
  // The remedy of a full context: prefills the last `keep` of `ids` [B, N] at
  // positions from 0, which is what the model gives for that window alone. With
  // `keep` = context (the default) the next decode is full again.
  Tensor recompute_window(const Tensor& ids, std::optional<int64_t> keep = {});

  StorageReport storage() const;

 private:
  void check_ids_tensor(const char* function, const Tensor& ids) const;

  std::shared_ptr<const LanguageModel> model_;
  SessionOptions options_;
  int64_t context_;
  std::unique_ptr<Cache> cache_;  // null before the first prefill
};

}  // namespace kvcache::model
