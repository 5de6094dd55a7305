// kvcache/model/language_model.h - what generation asks of a model.
//
// Transformer is one. A forward of your own that derives from this gets
// generate(), score(), beam search and sessions over any cache.
// B rows, T tokens of a step, V vocabulary.
#pragma once

#include <optional>
#include <span>

#include "kvcache/cache.h"
#include "kvcache/model/adapter.h"

namespace kvcache::model {

// Behind `all_logits` is what Transformer does; another model may refuse it.
struct ForwardOptions {
  Role role = Role::kPrefill;
  bool all_logits = false;  // else of each row's last live token only
  // [B, n] int64, n >= 1: outputs of these tokens of the step instead, counted
  // from its first, dead ones included; -1: 0 in that place.
  Tensor logit_positions = {};
  // [N] int64, N >= 1: logits of these tokens of the vocabulary alone, in this
  // order, instead of all V. With dense weights on the CPU they may differ from
  // those of all in the last bits.
  Tensor logit_ids = {};
  // Runs layers [first_layer, last_layer) alone, empty: to the last; the step
  // may be of a cache that has no others.
  int64_t first_layer = 0;
  std::optional<int64_t> last_layer = {};
  // [B, T, hidden_size] float32, what enters the first of these layers, in
  // place of embeddings; of `ids` only the shape counts then.
  Tensor hidden = {};
  // Gives what leaves the last of these layers, float32 [B, T, hidden_size],
  // or [B, n, hidden_size] with logit_positions, instead of logits. So it is in
  // any case where layers follow.
  bool return_hidden = false;
  // [B] int64: the adapter that each row runs with, counted in adapters(); -1:
  // none. Undefined: none of any row.
  Tensor adapters = {};
  // [B] int64: positions from which on it does; those before are the model's
  // own. Undefined: 0.
  Tensor adapters_from = {};
};

// Immutable: safe to share between threads, each with a cache of its own.
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  virtual int64_t vocab_size() const noexcept = 0;
  virtual int64_t context_length() const noexcept = 0;  // tokens
  // Every token that ends a text, as far as the model's own files say.
  virtual std::span<const int64_t> end_tokens() const noexcept = 0;
  // What a cache for this model must be made for.
  virtual CacheSpec cache_spec(int64_t rows,
                               std::optional<int64_t> capacity) const = 0;
  // What a row may run with, beside the model's own weights.
  virtual std::span<const AdapterInfo> adapters() const noexcept { return {}; }
  // Throws, naming the layer, if a cache was not made for this model.
  virtual void check_cache(const CacheSpec& spec) const = 0;

  // A row's bits depend on nothing but its own tokens, however many come at a
  // time and whatever comes along. Then a text can be taken up at any token;
  // where it is false, at canonical chunks only.
  virtual bool row_exact(Role) const noexcept { return false; }
  // Prefilled tokens have the bits of decoded ones.
  virtual bool roles_agree() const noexcept { return false; }

  // `ids` [B, T] int64, as the step's rows and tokens; ids of dead tokens are
  // not read. Returns float32 logits [B, 1, V], or [B, T, V] with all_logits;
  // 0 for dead tokens and idle rows. Does not commit.
  virtual Tensor forward(const Tensor& ids, Step& step,
                         const ForwardOptions& options) const = 0;
  // The oracle: no memory at all, positions from 0, every key recomputed.
  virtual Tensor forward(const Tensor& ids,
                         const ForwardOptions& options) const = 0;
};

}  // namespace kvcache::model
