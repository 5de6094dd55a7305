// kvcache/model/generate.h - tokens and text out of a model, over any cache.
//
// One sequence at a time. Prefill is cut at absolute multiples of a chunk, so
// that a run which continues from a cache makes the calls of one that does not.
// Nothing is printed: text, tokens and progress go to hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/model/language_model.h"
#include "kvcache/model/sampler.h"
#include "kvcache/model/tokenizer.h"
#include "kvcache/reuse_report.h"
#include "kvcache/speculation.h"

namespace kvcache::model {

class GraphRunner;  // kvcache/model/graph_model.h
class PrefixCache;  // kvcache/model/prefix_cache.h
struct Reuse;

// Tokens of one prefill step, counted from position 0.
inline constexpr int64_t kCanonicalChunk = 256;
// New tokens when nobody says how many.
inline constexpr int64_t kDefaultNewTokens = 256;

// Guesses the next tokens from the text itself: what followed the last time
// that it said the same. Several are then checked in one step, which reads the
// weights once. The tokens stay those of plain decoding wherever the model is
// row-exact; only their cost changes.
struct PromptLookup {
  int64_t drafts = 0;                   // at most, per step; 0: off
  int64_t longest = 3;                  // tokens that must be the same, at most
  int64_t shortest = 1;                 // and at least
  SpeculationOptions speculation = {};  // of a model with recurrent states
};

struct GenerateOptions {
  // At least 1. Empty: kDefaultNewTokens, or as many as fit.
  std::optional<int64_t> max_new_tokens = {};
  SamplingOptions sampling = {};
  // Null: no text and no stop strings.
  TokenizerPtr tokenizer = {};
  std::vector<std::string> stop = {};     // none of it is ever shown
  std::vector<int64_t> stop_tokens = {};  // beside all declared end tokens
  bool ignore_eos = false;                // go on after every end token
  std::optional<int64_t> context = {};    // tokens; empty: the model's
  int64_t chunk = kCanonicalChunk;
  // Decodes by its recorded steps, over the cache that it was made for, in the
  // place of plain ones. Prefill stays as it is. A Batcher has its own.
  GraphRunner* graphs = nullptr;
  // Needs a cache, and goes without recorded steps. A Batcher ignores it.
  PromptLookup lookup = {};
  // Goes on from what earlier texts left there, and leaves its own. Its chunk
  // must be the one above.
  std::shared_ptr<PrefixCache> prefix = {};
  Namespace space = {};  // of texts that may share
  // One of the model's adapters, by name; empty: none. It sets the adapter of
  // `space`.
  std::string adapter = {};
  int64_t adapter_from = 0;  // tokens before this one are the model's own
  std::vector<int64_t> marks = {};  // ends of turns in the prompt, for it
  // Also report log-probabilities: of each token, and of the n best beside it.
  std::optional<int64_t> log_probs = {};
};

// A token and the log-probability that the raw logits gave it.
using ScoredToken = std::pair<int64_t, float>;

struct GeneratedToken {
  int64_t id = 0;
  std::string_view text = {};  // what it made certain; may be empty
  std::optional<float> log_prob = {};
  std::span<const ScoredToken> best = {};  // best first
};

// All optional. One that throws ends the generation: its exception is passed
// on, and the cache holds every token that was fed.
struct GenerateHooks {
  std::function<void(std::string_view text)> on_text = {};
  std::function<void(const GeneratedToken& token)> on_token = {};
  std::function<void(int64_t done, int64_t total)> on_prefill = {};
  std::stop_token stop = {};  // asked before every step
};

enum class FinishReason : uint8_t {
  kStop,      // an end token or a stop string
  kLength,    // max_new_tokens, or the context is full
  kCancelled  // the stop token
};
std::string_view to_string(FinishReason reason) noexcept;

struct GenerateTimings {
  double prefill_ms = 0;
  double decode_ms = 0;
  int64_t prefill_tokens = 0;  // computed, not reused
  int64_t decode_steps = 0;    // new tokens but the first
  int64_t drafted = 0;         // tokens that were guessed
  int64_t accepted = 0;        // of them, right
  int64_t replays = 0;         // forwards that fed accepted tokens again
  double prefill_tokens_per_second() const noexcept;  // 0 if none
  double decode_tokens_per_second() const noexcept;
};

struct GenerateResult {
  std::vector<int64_t> tokens;   // every sampled one, a stopping one included
  std::string text;              // without end token and stop string
  std::vector<float> log_probs;  // of each of `tokens`
  std::vector<std::vector<ScoredToken>> best;  // of each of `tokens`
  FinishReason finish_reason = FinishReason::kLength;
  uint64_t seed = 0;                        // that the sampler used
  int64_t reused = 0;                       // tokens that the cache held before
  std::shared_ptr<const Reuse> reuse = {};  // with a prefix cache, else null
  int64_t cache_length = 0;  // sequence - 1: the last token is not yet fed
  GenerateTimings timings;
};

// Continues `tokens`, of which `cache` holds the first lengths()[0] already,
// computed with the same adapter; at least the last one is left to compute.
// `cache` has one row; null: every step recomputes everything, the oracle.
//
// End tokens are those of the model, of the tokenizer and `stop_tokens`: any of
// them ends the text.
// Errors: arguments are checked before any work. Whatever ends a generation,
// text that was held back is handed out, and the cache holds exactly the first
// lengths()[0] tokens of `tokens` and the new ones.
GenerateResult generate(const LanguageModel& model, Cache* cache,
                        std::span<const int64_t> tokens,
                        const GenerateOptions& options = {},
                        const GenerateHooks& hooks = {});

// How many new tokens generate() may make of these arguments and an unbounded
// cache. Throws as generate() would, without any work: for sizing a cache.
int64_t plan_new_tokens(const LanguageModel& model,
                        std::span<const int64_t> tokens,
                        const GenerateOptions& options = {});

// A cache and the tokens in it, kept in agreement over many generations. Not
// thread-safe.
class Conversation {
 public:
  // A null cache recomputes everything each time.
  Conversation(std::shared_ptr<const LanguageModel> model,
               std::unique_ptr<Cache> cache);

  // The text so far. Its last token may not be in the cache yet.
  std::span<const int64_t> tokens() const noexcept { return tokens_; }
  const Cache* cache() const noexcept { return cache_.get(); }

  // Continues `tokens`, a whole text. What it shares with the text so far, the
  // adapter included, is not computed again; the rest of the cache is
  // truncated.
  GenerateResult generate(std::span<const int64_t> tokens,
                          const GenerateOptions& options = {},
                          const GenerateHooks& hooks = {});
  // Continues the text so far followed by `more`.
  GenerateResult extend(std::span<const int64_t> more,
                        const GenerateOptions& options = {},
                        const GenerateHooks& hooks = {});
  void reset();

 private:
  std::shared_ptr<const LanguageModel> model_;
  std::unique_ptr<Cache> cache_;
  std::vector<int64_t> tokens_;
  std::string adapter_;  // that tokens_ ran with, and from where
  int64_t adapter_from_ = 0;
};

}  // namespace kvcache::model
