// feed.h - token ids through a model: checks, chunks, logits.
#pragma once

#include <functional>
#include <stop_token>

#include "adapter_choice.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

// Throws, naming `function`, unless every id is in the vocabulary.
void check_ids(const char* function, std::span<const int64_t> ids,
               int64_t vocab_size);

// Throws unless `cache` was made for `model` and has `rows` rows.
void check_model_cache(const char* function, const LanguageModel& model,
                       const Cache& cache, int64_t rows);

// The most tokens a text may have: the model's context or a smaller one.
int64_t effective_context(const char* function, const LanguageModel& model,
                          std::optional<int64_t> context, int64_t chunk);

// [1, T] int64.
Tensor ids_tensor(std::span<const int64_t> ids);

// Row `row` of the B * T rows of logits [B, T, V].
std::span<const float> logits_row(const Tensor& logits, int64_t row = 0);

// One step of `ids` [B, T] over rows [first_row, first_row + B) of `cache`,
// committed. `ids` may be on the CPU whatever the model's device is; logits
// come back to the CPU.
Tensor feed(const LanguageModel& model, Cache& cache, const Tensor& ids,
            const ForwardOptions& options, int64_t first_row = 0,
            bool state_window = false);

// No memory at all.
Tensor feed(const LanguageModel& model, const Tensor& ids,
            const ForwardOptions& options);

struct PrefillOptions {
  int64_t chunk = 1;
  std::stop_token stop = {};
  std::function<void(int64_t done, int64_t total)> progress = {};
  // Gets the logits of each step [B, n, V]; empty: only the last are made.
  std::function<void(const Tensor& logits)> all_logits = {};
  AdapterChoice adapter = {};  // of one row
};

// `ids` [B, T] over rows [0, B), of equal lengths, in steps that end at
// absolute multiples of the chunk. Returns the last logits [B, 1, V]; undefined
// if `stop` came first, or all logits were asked for.
Tensor prefill(const LanguageModel& model, Cache& cache, const Tensor& ids,
               const PrefillOptions& options);

}  // namespace kvcache::model
