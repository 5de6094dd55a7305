// answer.cpp - one text in the making, token by token.

#include "answer.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "adapter_choice.h"
#include "feed.h"

namespace kvcache::model {
namespace {

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

}  // namespace

void check_generate_options(const char* function, const LanguageModel& model,
                            const GenerateOptions& options) {
  check_sampling(options.sampling);
  TORCH_CHECK_VALUE(!options.log_probs || *options.log_probs >= 0, "[",
                    function, "] log_probs must be at least 0 but got ",
                    *options.log_probs, ".");
  TORCH_CHECK_VALUE(options.stop.empty() || options.tokenizer, "[", function,
                    "] stop strings need a tokenizer but there is none; end "
                    "at token ids (stop_tokens) instead.");
  check_ids(function, options.stop_tokens, model.vocab_size());
  choose_adapter(function, model, options.adapter, options.adapter_from);
}

Answer::Answer(const LanguageModel& model, std::vector<int64_t>& sequence,
               const GenerateOptions& options, const GenerateHooks& hooks,
               int64_t new_tokens)
    : sequence_(sequence),
      options_(options),
      hooks_(hooks),
      new_tokens_(new_tokens),
      sampler_(options.sampling),
      ends_(all_end_tokens(model, options)),
      output_(options.tokenizer, sequence, options.stop, hooks.on_text) {
  result_.seed = sampler_.seed();
}

bool Answer::is_end(int64_t id) const {
  return std::find(ends_.begin(), ends_.end(), id) != ends_.end();
}

void Answer::record(int64_t id, std::span<const float> logits,
                    GeneratedToken& token) {
  std::vector<ScoredToken> best;
  if (options_.log_probs) {
    const Tensor scores = log_probs(logits);
    token.log_prob = scores.const_data_ptr<float>()[id];
    if (*options_.log_probs > 0) {
      best = top_log_probs(scores, *options_.log_probs);
    }
    result_.log_probs.push_back(*token.log_prob);
    result_.best.push_back(std::move(best));
    token.best = result_.best.back();
  }
  sequence_.push_back(id);
  result_.tokens.push_back(id);
}

bool Answer::take(std::span<const float> logits) {
  return show(logits, sampler_.sample(logits, sequence_));
}

bool Answer::take(std::span<const float> logits, int64_t sampled) {
  check_logits(logits);
  return show(logits, sampled);
}

bool Answer::show(std::span<const float> logits, int64_t id) {
  GeneratedToken token{.id = id};
  record(id, logits, token);
  const bool end = is_end(id);
  const std::string text = end ? std::string() : output_.push(id);
  token.text = text;
  if (hooks_.on_token) hooks_.on_token(token);
  if (end || output_.stopped()) {
    result_.finish_reason = FinishReason::kStop;
    return true;
  }
  result_.finish_reason = FinishReason::kLength;
  return static_cast<int64_t>(result_.tokens.size()) == new_tokens_;
}

GenerateResult Answer::finish() {
  output_.finish();
  // The tail that was held back may complete a stop string.
  if (output_.stopped()) result_.finish_reason = FinishReason::kStop;
  result_.text = output_.take_text();
  return std::move(result_);
}

GenerateResult Answer::finish_after_error() noexcept {
  output_.finish_after_error();
  result_.text = output_.take_text();
  return std::move(result_);
}

}  // namespace kvcache::model
