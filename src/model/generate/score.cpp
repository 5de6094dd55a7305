// score.cpp - how likely a model finds a given text.

#include "kvcache/model/score.h"

#include <c10/util/Exception.h>

#include "feed.h"

namespace kvcache::model {

void check_score(const LanguageModel& model, std::span<const int64_t> tokens,
                 const ScoreOptions& options) {
  const int64_t context =
      effective_context("score", model, options.context, options.chunk);
  const auto count = static_cast<int64_t>(tokens.size());
  TORCH_CHECK_VALUE(count > 0,
                    "[score] there must be at least one token but got none.");
  TORCH_CHECK_VALUE(count <= context, "[score] text of ", count,
                    " tokens is longer than the context of ", context,
                    " tokens; shorten it.");
  check_ids("score", tokens, model.vocab_size());
  choose_adapter("score", model, options.adapter, options.adapter_from);
}

namespace {

void check_cache(const LanguageModel& model, const Cache& cache,
                 int64_t count) {
  check_model_cache("score", model, cache, 1);
  TORCH_CHECK_VALUE(cache.lengths()[0] == 0,
                    "[score] the cache must be empty but holds ",
                    cache.lengths()[0], " tokens; reset() it.");
  TORCH_CHECK_VALUE(count - 1 <= cache.capacity(), "[score] text of ", count,
                    " tokens needs room for ", count - 1,
                    " but the cache's capacity is ", cache.capacity(), ".");
}

}  // namespace

std::vector<float> score(const LanguageModel& model, Cache* cache,
                         std::span<const int64_t> tokens,
                         const ScoreOptions& options) {
  check_score(model, tokens, options);
  if (cache) check_cache(model, *cache, static_cast<int64_t>(tokens.size()));
  std::vector<float> scores;
  scores.reserve(tokens.size() - 1);
  // One row at a time: a row's bits must not depend on how many there are.
  const auto take = [&](const Tensor& logits) {
    for (int64_t row = 0; row < logits.size(1); ++row) {
      const auto values = logits_row(logits, row);
      check_logits(values);
      const int64_t next = tokens[scores.size() + 1];
      scores.push_back(log_probs(values).const_data_ptr<float>()[next]);
    }
  };
  if (tokens.size() == 1) return scores;
  const Tensor ids = ids_tensor(tokens.first(tokens.size() - 1));
  const AdapterChoice adapter =
      choose_adapter("score", model, options.adapter, options.adapter_from);
  if (cache) {
    prefill(model, *cache, ids,
            {.chunk = options.chunk,
             .progress = options.progress,
             .all_logits = take,
             .adapter = adapter});
  } else {
    take(feed(model, ids, with_adapter({.all_logits = true}, adapter)));
    if (options.progress) options.progress(ids.size(1), ids.size(1));
  }
  return scores;
}

}  // namespace kvcache::model
