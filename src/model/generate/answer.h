// answer.h - one text in the making, token by token.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "kvcache/model/generate.h"
#include "text_output.h"

namespace kvcache::model {

using Clock = std::chrono::steady_clock;

inline double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start)
      .count();
}

// Throws, naming `function`, unless `options` are ones that `model` can meet.
// Lengths are room_for_new()'s business.
void check_generate_options(const char* function, const LanguageModel& model,
                            const GenerateOptions& options);

// What becomes of a prompt, whoever computes its logits: sampling, records,
// text, hooks, and when it is over. Keeps references to all it is given.
//
// Errors: whatever a hook throws, and logits that are not finite. The result
// then holds what there was before.
class Answer {
 public:
  // `sequence` is the prompt, and grows by every token; `new_tokens` at most.
  Answer(const LanguageModel& model, std::vector<int64_t>& sequence,
         const GenerateOptions& options, const GenerateHooks& hooks,
         int64_t new_tokens);

  // Samples, records and shows one token; true if it is the last one.
  bool take(std::span<const float> logits);
  // The same of a token that was sampled elsewhere.
  bool take(std::span<const float> logits, int64_t sampled);
  // Tokens that may still come.
  int64_t left() const {
    return new_tokens_ - static_cast<int64_t>(result_.tokens.size());
  }
  Sampler& sampler() noexcept { return sampler_; }
  void cancel() { result_.finish_reason = FinishReason::kCancelled; }

  // Timings, and what the memory held: for whoever computes.
  GenerateResult& result() noexcept { return result_; }

  // Shows what was held back; the result is complete then.
  GenerateResult finish();
  // The same while an exception is on its way: throws nothing.
  GenerateResult finish_after_error() noexcept;

 private:
  bool is_end(int64_t id) const;
  bool show(std::span<const float> logits, int64_t id);
  void record(int64_t id, std::span<const float> logits, GeneratedToken& token);

  std::vector<int64_t>& sequence_;
  const GenerateOptions& options_;
  const GenerateHooks& hooks_;
  int64_t new_tokens_;
  Sampler sampler_;
  std::vector<int64_t> ends_;
  TextOutput output_;
  GenerateResult result_;
};

}  // namespace kvcache::model
