// kvcache/model/score.h - how likely a model finds a given text.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

struct ScoreOptions {
  std::optional<int64_t> context = {};  // tokens; empty: the model's
  int64_t chunk = kCanonicalChunk;      // not looked at without a cache
  std::function<void(int64_t done, int64_t total)> progress = {};
  std::string adapter = {};  // as in GenerateOptions
  int64_t adapter_from = 0;
};

// The log-probability of each of `tokens` after the first, given those before
// it: float32 log-softmax of the raw logits. One token gives none.
// `cache` has one empty row, and holds all but the last token afterwards; null:
// one forward over everything.
std::vector<float> score(const LanguageModel& model, Cache* cache,
                         std::span<const int64_t> tokens,
                         const ScoreOptions& options = {});

// Throws as score() would, without any work: for sizing a cache.
void check_score(const LanguageModel& model, std::span<const int64_t> tokens,
                 const ScoreOptions& options = {});

}  // namespace kvcache::model
