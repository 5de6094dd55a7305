// generate.cpp - the loop: prefill, sample, show, feed.

#include "kvcache/model/generate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "adapter_choice.h"
#include "answer.h"
#include "drafts.h"
#include "feed.h"
#include "kvcache/model/graph_model.h"
#include "kvcache/model/prefix_cache.h"
#include "kvcache/speculation.h"
#include "room.h"

namespace kvcache::model {
namespace {

double per_second(int64_t count, double ms) {
  return ms > 0 ? 1000.0 * static_cast<double>(count) / ms : 0.0;
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
    adapter_ = choose_adapter("generate", model, options.adapter,
                              options.adapter_from);
    const int64_t new_tokens = room_of(model, cache, sequence, options);
    if (cache) {
      check_cache_state(model, *cache, static_cast<int64_t>(sequence.size()));
    }
    TORCH_CHECK_VALUE(
        !options.graphs || &options.graphs->decoder().cache() == cache,
        "[generate] graphs must be over the cache that is given but are over "
        "another one; make a GraphRunner for it.");
    if (options.graphs) {
      options.graphs->set_adapter(adapter_.index, adapter_.from);
    }
    const PromptLookup& lookup = options.lookup;
    TORCH_CHECK_VALUE(
        lookup.drafts == 0 ||
            (cache && !options.graphs && lookup.drafts > 0 &&
             lookup.shortest >= 1 && lookup.longest >= lookup.shortest),
        "[generate] drafts need a cache, no recorded steps and 1 <= shortest "
        "<= longest but got drafts=",
        lookup.drafts, " shortest=", lookup.shortest,
        " longest=", lookup.longest, "; 0 drafts turn them off.");
    TORCH_CHECK_VALUE(
        !options.prefix || cache,
        "[generate] a prefix cache needs a cache to fill; give one.");
    answer_.emplace(model, sequence, options, hooks, new_tokens);
    answer_->result().reused = cache ? cache->lengths()[0] : 0;
  }

  GenerateResult run() {
    try {
      loop();
    } catch (...) {
      answer_->finish_after_error();
      throw;
    }
    if (prefix_) prefix_->keep(sequence_);
    answer_->result().cache_length = cache_ ? cache_->lengths()[0] : 0;
    return answer_->finish();
  }

 private:
  GenerateTimings& timings() { return answer_->result().timings; }

  void loop() {
    const Tensor logits = timed_prefill();
    if (!logits.defined()) return answer_->cancel();
    bool over = answer_->take(logits_row(logits));
    if (prefix_) prefix_->arrive();
    while (!over) {
      if (hooks_.stop.stop_requested()) return answer_->cancel();
      over = many_fit() ? replay_many()
             : options_.lookup.drafts > 0
                 ? decode_with_drafts()
                 : answer_->take(logits_row(timed_decode()));
    }
  }

  // One step over the last token and guesses of what follows it.
  bool decode_with_drafts() {
    const int64_t fed = cache_->lengths()[0];
    int64_t most = std::min(options_.lookup.drafts, answer_->left() - 1);
    while (most > 0 && !cache_->fits(most + 1)) --most;
    const std::vector<int64_t> drafts =
        draft_tokens(sequence_, options_.lookup, most);
    if (drafts.empty()) return answer_->take(logits_row(timed_decode()));
    const auto start = Clock::now();
    std::vector<int64_t> ids = {sequence_.back()};
    ids.insert(ids.end(), drafts.begin(), drafts.end());
    Speculation speculation(*cache_, 0, options_.lookup.speculation);
    const Tensor logits = feed(
        model_, *cache_, ids_tensor(ids),
        with_adapter({.role = Role::kDecode, .all_logits = true}, adapter_),
        /*first_row=*/0, speculation.window(static_cast<int64_t>(ids.size())));
    timings().decode_ms += ms_since(start);
    timings().drafted += static_cast<int64_t>(drafts.size());
    int64_t right = 0;
    bool over = false;
    const auto keep = [&] { keep_drafts(speculation, fed, right + 1); };
    try {
      while (true) {
        ++timings().decode_steps;
        over = answer_->take(logits_row(logits, right));
        if (over || right == static_cast<int64_t>(drafts.size()) ||
            sequence_.back() != drafts[static_cast<size_t>(right)]) {
          break;
        }
        ++right;
      }
    } catch (...) {
      keep();
      throw;
    }
    timings().accepted += right;
    keep();
    return over;
  }

  // The first `tokens` of those from position `fed` on stay in the cache.
  void keep_drafts(Speculation& speculation, int64_t fed, int64_t tokens) {
    const auto start = Clock::now();
    const int64_t again = speculation.accept(tokens);
    if (again > 0) {
      const auto from = std::span<const int64_t>(sequence_).subspan(
          static_cast<size_t>(fed + tokens - again),
          static_cast<size_t>(again));
      feed(model_, *cache_, ids_tensor(from), adapted(Role::kDecode));
      ++timings().replays;
    }
    timings().decode_ms += ms_since(start);
  }

  ForwardOptions adapted(Role role) const {
    return with_adapter({.role = role}, adapter_);
  }

  bool many_fit() const {
    const int64_t steps =
        options_.graphs ? options_.graphs->steps_per_replay() : 1;
    return steps > 1 && answer_->left() >= steps && cache_->fits(steps);
  }

  // Tokens of one replay, up to the one that ends the text.
  bool replay_many() {
    GraphRunner& graphs = *options_.graphs;
    const auto start = Clock::now();
    bool over = false;
    try {
      graphs.sampling().set_row(0, options_.sampling, answer_->sampler(),
                                sequence_);
      const DecodedTokens made = graphs.decoder().decode(
          ids_tensor(std::span(sequence_).last(1)), graphs.steps_per_replay());
      const Tensor logits =
          graphs.decoder().logits().to(at::kCPU);  // [N, 1, V]
      timings().decode_ms += ms_since(start);
      timings().decode_steps += made.fed[0];
      const auto* ids = made.ids.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < made.fed[0] && !over; ++i) {
        over = answer_->take(logits_row(logits, i), ids[i]);
      }
    } catch (...) {
      forget_unseen();
      throw;
    }
    forget_unseen();
    return over;
  }

  // The cache holds what was shown, the last token not yet fed.
  void forget_unseen() {
    cache_->truncate(static_cast<int64_t>(sequence_.size()) - 1);
  }

  Tensor timed_prefill() {
    const auto start = Clock::now();
    Tensor logits = do_prefill();
    timings().prefill_ms = ms_since(start);
    return logits;
  }

  Tensor do_prefill() {
    const auto total = static_cast<int64_t>(sequence_.size());
    const auto prompt = std::span<const int64_t>(sequence_);
    if (!cache_) {
      if (hooks_.stop.stop_requested()) return {};
      Tensor logits = feed(model_, ids_tensor(prompt), adapted(Role::kPrefill));
      timings().prefill_tokens = total;
      if (hooks_.on_prefill) hooks_.on_prefill(total, total);
      return logits;
    }
    if (options_.prefix) return prefill_behind_prefix(prompt);
    const auto held = cache_->lengths()[0];
    Tensor logits = prefill(
        model_, *cache_, ids_tensor(prompt.subspan(static_cast<size_t>(held))),
        {.chunk = options_.chunk,
         .stop = hooks_.stop,
         .progress = hooks_.on_prefill,
         .adapter = adapter_});
    timings().prefill_tokens = cache_->lengths()[0] - held;
    return logits;
  }

  Tensor prefill_behind_prefix(std::span<const int64_t> prompt) {
    prefix_.emplace(*options_.prefix, *cache_, 0, prompt,
                    with_adapter(options_.space, model_, adapter_),
                    options_.marks, RestoreTime::kBehindFirstToken);
    answer_->result().reuse = std::make_shared<Reuse>(prefix_->reuse());
    answer_->result().reused = prefix_->held();
    const auto total = static_cast<int64_t>(prompt.size());
    Tensor logits = prefix_->logits();
    for (int64_t done = prefix_->held(); done < total;) {
      if (hooks_.stop.stop_requested()) return {};
      const int64_t end = prefix_->step_end(done);
      logits = feed(model_, *cache_,
                    ids_tensor(prompt.subspan(static_cast<size_t>(done),
                                              static_cast<size_t>(end - done))),
                    adapted(Role::kPrefill));
      timings().prefill_tokens += end - done;
      done = end;
      prefix_->prefilled(done, logits);
      if (hooks_.on_prefill) hooks_.on_prefill(done, total);
    }
    return logits;
  }

  Tensor timed_decode() {
    const auto start = Clock::now();
    Tensor logits = decode();
    timings().decode_ms += ms_since(start);
    ++timings().decode_steps;
    return logits;
  }

  Tensor decode() const {
    if (!cache_) {
      return feed(model_, ids_tensor(sequence_), adapted(Role::kPrefill));
    }
    const Tensor last = ids_tensor(std::span(sequence_).last(1));
    if (options_.graphs) {
      return options_.graphs->decoder().step(last).to(at::kCPU);
    }
    return feed(model_, *cache_, last, adapted(Role::kDecode));
  }

  const LanguageModel& model_;
  Cache* cache_;
  std::vector<int64_t>& sequence_;
  const GenerateOptions& options_;
  const GenerateHooks& hooks_;
  AdapterChoice adapter_;
  std::optional<Answer> answer_;
  std::optional<PrefixRun> prefix_;
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
  check_generate_options("generate", model, options);
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
  const auto choice = [&](const std::string& name, int64_t from) {
    return choose_adapter("Conversation", *model_, name, from);
  };
  const auto alike = choice(options.adapter, options.adapter_from)
                         .shared_with(choice(adapter_, adapter_from_));
  if (cache_) {
    const auto held =
        std::min({static_cast<size_t>(cache_->lengths()[0]), tokens_.size(),
                  sequence.size() - 1,
                  alike ? static_cast<size_t>(*alike) : tokens_.size()});
    const auto differs =
        std::mismatch(sequence.begin(),
                      sequence.begin() + static_cast<std::ptrdiff_t>(held),
                      tokens_.begin())
            .first;
    cache_->truncate(differs - sequence.begin());
  }
  adapter_ = options.adapter;
  adapter_from_ = options.adapter_from;
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
