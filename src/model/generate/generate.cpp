// generate.cpp - the loop: prefill, sample, show, feed.

#include "kvcache/model/generate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "feed.h"
#include "room.h"
#include "text_output.h"

namespace kvcache::model {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

double per_second(int64_t count, double ms) {
  return ms > 0 ? 1000.0 * static_cast<double>(count) / ms : 0.0;
}

std::vector<int64_t> all_end_tokens(const LanguageModel& model,
                                    const GenerateOptions& options) {
  std::vector<int64_t> ends = options.stop_tokens;
  if (options.ignore_eos) return ends;
  const auto declared = model.end_tokens();
  ends.insert(ends.end(), declared.begin(), declared.end());
  if (options.tokenizer) {
    const auto& more = options.tokenizer->special_ids().ends;
    ends.insert(ends.end(), more.begin(), more.end());
  }
  return ends;
}

void check_options(const LanguageModel& model, const GenerateOptions& options) {
  check_sampling(options.sampling);
  TORCH_CHECK_VALUE(!options.log_probs || *options.log_probs >= 0,
                    "[generate] log_probs must be at least 0 but got ",
                    *options.log_probs, ".");
  TORCH_CHECK_VALUE(options.stop.empty() || options.tokenizer,
                    "[generate] stop strings need a tokenizer but there is "
                    "none; end at token ids (stop_tokens) instead.");
  check_ids("generate", options.stop_tokens, model.vocab_size());
}

int64_t room_of(const LanguageModel& model, const Cache* cache,
                std::span<const int64_t> tokens,
                const GenerateOptions& options) {
  return room_for_new(
      "generate", {.prompt = static_cast<int64_t>(tokens.size()),
                   .max_new_tokens = options.max_new_tokens,
                   .context = effective_context("generate", model,
                                                options.context, options.chunk),
                   .cache = cache});
}

void check_cache_state(const LanguageModel& model, const Cache& cache,
                       int64_t tokens) {
  check_model_cache("generate", model, cache, 1);
  TORCH_CHECK_VALUE(cache.lengths()[0] < tokens,
                    "[generate] the cache already holds ", cache.lengths()[0],
                    " tokens of a text of ", tokens,
                    "; the last one must be left to compute, so truncate() "
                    "the cache.");
}

// One run over a sequence that grows.
class Generation {
 public:
  Generation(const LanguageModel& model, Cache* cache,
             std::vector<int64_t>& sequence, const GenerateOptions& options,
             const GenerateHooks& hooks)
      : model_(model),
        cache_(cache),
        sequence_(sequence),
        options_(options),
        hooks_(hooks) {
    plan_new_tokens(model, sequence, options);
    new_tokens_ = room_of(model, cache, sequence, options);
    if (cache) {
      check_cache_state(model, *cache, static_cast<int64_t>(sequence.size()));
    }
    sampler_.emplace(options.sampling);
    ends_ = all_end_tokens(model, options);
    output_.emplace(options.tokenizer, sequence, options.stop, hooks.on_text);
    result_.seed = sampler_->seed();
    result_.reused = cache ? cache->lengths()[0] : 0;
  }

  GenerateResult run() {
    try {
      loop();
    } catch (...) {
      output_->finish_after_error();
      throw;
    }
    output_->finish();
    // The tail that was held back may complete a stop string.
    if (output_->stopped()) result_.finish_reason = FinishReason::kStop;
    result_.text = output_->take_text();
    result_.cache_length = cache_ ? cache_->lengths()[0] : 0;
    return std::move(result_);
  }

 private:
  void loop() {
    Tensor logits = timed_prefill();
    while (logits.defined()) {
      if (take(logits)) {
        result_.finish_reason = FinishReason::kStop;
        return;
      }
      if (static_cast<int64_t>(result_.tokens.size()) == new_tokens_) {
        result_.finish_reason = FinishReason::kLength;
        return;
      }
      logits = timed_decode();
    }
    result_.finish_reason = FinishReason::kCancelled;
  }

  Tensor timed_prefill() {
    const auto start = Clock::now();
    Tensor logits = do_prefill();
    result_.timings.prefill_ms = ms_since(start);
    return logits;
  }

  Tensor do_prefill() {
    const auto total = static_cast<int64_t>(sequence_.size());
    const auto prompt = std::span<const int64_t>(sequence_);
    if (!cache_) {
      if (hooks_.stop.stop_requested()) return {};
      Tensor logits = feed(model_, ids_tensor(prompt), {});
      result_.timings.prefill_tokens = total;
      if (hooks_.on_prefill) hooks_.on_prefill(total, total);
      return logits;
    }
    const auto held = cache_->lengths()[0];
    Tensor logits = prefill(
        model_, *cache_, ids_tensor(prompt.subspan(static_cast<size_t>(held))),
        {.chunk = options_.chunk,
         .stop = hooks_.stop,
         .progress = hooks_.on_prefill});
    result_.timings.prefill_tokens = cache_->lengths()[0] - held;
    return logits;
  }

  Tensor timed_decode() {
    if (hooks_.stop.stop_requested()) return {};
    const auto start = Clock::now();
    Tensor logits =
        cache_ ? feed(model_, *cache_, ids_tensor(std::span(sequence_).last(1)),
                      {.role = Role::kDecode})
               : feed(model_, ids_tensor(sequence_), {});
    result_.timings.decode_ms += ms_since(start);
    ++result_.timings.decode_steps;
    return logits;
  }

  // Samples, records and shows one token; true if it ends the text.
  bool take(const Tensor& logits) {
    const auto values = logits_row(logits);
    const int64_t id = sampler_->sample(values, sequence_);
    GeneratedToken token{.id = id};
    std::vector<ScoredToken> best;
    if (options_.log_probs) {
      const Tensor scores = log_probs(values);
      token.log_prob = scores.const_data_ptr<float>()[id];
      if (*options_.log_probs > 0) {
        best = top_log_probs(scores, *options_.log_probs);
      }
    }
    sequence_.push_back(id);
    result_.tokens.push_back(id);
    if (token.log_prob) {
      result_.log_probs.push_back(*token.log_prob);
      result_.best.push_back(best);
    }
    const bool end = std::find(ends_.begin(), ends_.end(), id) != ends_.end();
    const std::string text = end ? std::string() : output_->push(id);
    token.text = text;
    token.best = best;
    if (hooks_.on_token) hooks_.on_token(token);
    return end || output_->stopped();
  }

  const LanguageModel& model_;
  Cache* cache_;
  std::vector<int64_t>& sequence_;
  const GenerateOptions& options_;
  const GenerateHooks& hooks_;
  int64_t new_tokens_ = 0;
  std::optional<Sampler> sampler_;
  std::vector<int64_t> ends_;
  std::optional<TextOutput> output_;
  GenerateResult result_;
};

}  // namespace

std::string_view to_string(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      break;
  }
  return "cancelled";
}

double GenerateTimings::prefill_tokens_per_second() const noexcept {
  return per_second(prefill_tokens, prefill_ms);
}

double GenerateTimings::decode_tokens_per_second() const noexcept {
  return per_second(decode_steps, decode_ms);
}

GenerateResult generate(const LanguageModel& model, Cache* cache,
                        std::span<const int64_t> tokens,
                        const GenerateOptions& options,
                        const GenerateHooks& hooks) {
  std::vector<int64_t> sequence(tokens.begin(), tokens.end());
  return Generation(model, cache, sequence, options, hooks).run();
}

int64_t plan_new_tokens(const LanguageModel& model,
                        std::span<const int64_t> tokens,
                        const GenerateOptions& options) {
  check_options(model, options);
  const int64_t room = room_of(model, nullptr, tokens, options);
  check_ids("generate", tokens, model.vocab_size());
  return room;
}

Conversation::Conversation(std::shared_ptr<const LanguageModel> model,
                           std::unique_ptr<Cache> cache)
    : model_(std::move(model)), cache_(std::move(cache)) {
  TORCH_CHECK_VALUE(model_, "[Conversation] the model must not be null.");
  if (!cache_) return;
  check_model_cache("Conversation", *model_, *cache_, 1);
  TORCH_CHECK_VALUE(cache_->lengths()[0] == 0,
                    "[Conversation] the cache must be empty but holds ",
                    cache_->lengths()[0], " tokens; reset() it.");
}

GenerateResult Conversation::generate(std::span<const int64_t> tokens,
                                      const GenerateOptions& options,
                                      const GenerateHooks& hooks) {
  std::vector<int64_t> sequence(tokens.begin(), tokens.end());
  // Checked before anything is forgotten.
  plan_new_tokens(*model_, sequence, options);
  room_of(*model_, cache_.get(), sequence, options);
  if (cache_) {
    const auto held = std::min({static_cast<size_t>(cache_->lengths()[0]),
                                tokens_.size(), sequence.size() - 1});
    const auto differs =
        std::mismatch(sequence.begin(),
                      sequence.begin() + static_cast<std::ptrdiff_t>(held),
                      tokens_.begin())
            .first;
    cache_->truncate(differs - sequence.begin());
  }
  std::vector<int64_t> before = std::exchange(tokens_, std::move(sequence));
  try {
    return Generation(*model_, cache_.get(), tokens_, options, hooks).run();
  } catch (...) {
    // What was not fed is forgotten, so that both still agree.
    if (cache_) {
      tokens_.resize(static_cast<size_t>(cache_->lengths()[0]));
    } else {
      tokens_ = std::move(before);
    }
    throw;
  }
}

GenerateResult Conversation::extend(std::span<const int64_t> more,
                                    const GenerateOptions& options,
                                    const GenerateHooks& hooks) {
  std::vector<int64_t> sequence = tokens_;
  sequence.insert(sequence.end(), more.begin(), more.end());
  return generate(sequence, options, hooks);
}

void Conversation::reset() {
  if (cache_) cache_->reset();
  tokens_.clear();
}

}  // namespace kvcache::model
