// kvcache/model/verify.h - a run that was taken up against one that never left.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

struct VerifyOptions {
  CacheKind kind = CacheKind::kPreallocated;  // any but kNone
  // Tokens after which the text is saved and taken up; empty: half of it, down
  // to a chunk where the model is not row-exact.
  std::optional<int64_t> split = {};
  int64_t chunk = 256;
  int64_t new_tokens = 16;   // greedy, on both sides
  std::string adapter = {};  // as in GenerateOptions
  int64_t adapter_from = 0;
  KvFormat kv_format = KvFormat::kPlain;  // of both caches
};

struct VerifyReport {
  int64_t split = 0;
  int64_t layers = 0;  // whose memory was compared
  int64_t steps = 0;   // whose logits were compared
  size_t bytes = 0;    // of the saved state
  // Empty: every bit is the same. Else the first thing that is not: "logits
  // after token 12", "layer 3: K of head 0 at position 7".
  std::string first_difference = {};
};

// Prefills `tokens` without a break, and again from a saved state; compares the
// memory of every layer, the logits, and those of each token decoded then.
VerifyReport verify_reuse(const LanguageModel& model,
                          std::span<const int64_t> tokens,
                          const VerifyOptions& options = {});

}  // namespace kvcache::model
