// kvcache/model/beam_search.h - the most likely continuations of a text.
//
// b beams advance together as b rows of one cache, which reorder() rearranges.
// Results equal Hugging Face transformers' beam search.
// Source: transformers/generation/utils.py, _beam_search.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

// When a search ends that has b finished texts already.
enum class EarlyStop : uint8_t {
  kHeuristic,  // when no open beam is likely to beat the worst of them
  kAlways,     // at once
  kNever       // when no open beam can beat the worst of them
};

struct BeamOptions {
  int64_t beams = 4;                           // b, 1 to 65536
  std::optional<int64_t> max_new_tokens = {};  // as in GenerateOptions
  double length_penalty = 1;  // scores are divided by new tokens ^ this
  EarlyStop early_stop = EarlyStop::kHeuristic;
  std::vector<int64_t> stop_tokens = {};  // beside the model's end tokens
  bool ignore_eos = false;                // no end token ends a beam
  std::optional<int64_t> context = {};
  int64_t chunk = kCanonicalChunk;
  std::stop_token stop = {};  // asked before every step
};

struct Beam {
  std::vector<int64_t> tokens;  // new ones, an end token included
  double score = 0;             // sum of log-probabilities, length penalty in
  FinishReason finish_reason = FinishReason::kLength;
};

// Continues `prompt` by up to `beams` texts, best first. `cache` has `beams`
// empty rows, and holds the beams that were open last; null: every step
// recomputes everything. Fewer than `beams` come back only if the vocabulary
// holds no more. After a cancellation the open beams are what comes back.
std::vector<Beam> beam_search(const LanguageModel& model, Cache* cache,
                              std::span<const int64_t> prompt,
                              const BeamOptions& options = {});

}  // namespace kvcache::model
