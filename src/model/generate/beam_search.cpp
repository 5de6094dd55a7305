// beam_search.cpp - the most likely continuations of a text.

#include "kvcache/model/beam_search.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "feed.h"
#include "room.h"

namespace kvcache::model {
namespace {

// Far above any use; below, products of it fit in 64 bits.
constexpr int64_t kMostBeams = 1 << 16;

// One more token on one open beam.
struct Candidate {
  double score = 0;  // sum of log-probabilities
  int64_t beam = 0;
  int64_t id = 0;
  bool ends = false;
};

bool better(const Candidate& a, const Candidate& b) {
  if (a.score != b.score) return a.score > b.score;
  return a.beam != b.beam ? a.beam < b.beam : a.id < b.id;
}

struct OpenBeam {
  std::vector<int64_t> tokens;
  double score = 0;
};

void check_arguments(const LanguageModel& model, const Cache* cache,
                     std::span<const int64_t> prompt,
                     const BeamOptions& options) {
  TORCH_CHECK_VALUE(options.beams >= 1 && options.beams <= kMostBeams,
                    "[beam_search] beams must be 1 to ", kMostBeams,
                    " but got ", options.beams, ".");
  TORCH_CHECK_VALUE(std::isfinite(options.length_penalty),
                    "[beam_search] length_penalty must be a number but got ",
                    options.length_penalty, ".");
  check_ids("beam_search", prompt, model.vocab_size());
  check_ids("beam_search", options.stop_tokens, model.vocab_size());
  if (!cache) return;
  check_model_cache("beam_search", model, *cache, options.beams);
  const auto lengths = cache->lengths();
  const auto used = std::find_if(lengths.begin(), lengths.end(),
                                 [](int64_t length) { return length > 0; });
  TORCH_CHECK_VALUE(
      used == lengths.end(), "[beam_search] the cache must be empty but row ",
      used - lengths.begin(), " holds ", *used, " tokens; reset() it.");
}

class Search {
 public:
  Search(const LanguageModel& model, Cache* cache,
         std::span<const int64_t> prompt, const BeamOptions& options)
      : model_(model),
        cache_(cache),
        prompt_(prompt),
        options_(options),
        ends_(options.stop_tokens) {
    check_arguments(model, cache, prompt, options);
    new_tokens_ =
        room_for_new("beam_search",
                     {.prompt = static_cast<int64_t>(prompt.size()),
                      .max_new_tokens = options.max_new_tokens,
                      .context = effective_context(
                          "beam_search", model, options.context, options.chunk),
                      .cache = cache});
    if (!options.ignore_eos) {
      const auto declared = model.end_tokens();
      ends_.insert(ends_.end(), declared.begin(), declared.end());
    }
    std::sort(ends_.begin(), ends_.end());
    ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
  }

  std::vector<Beam> run() {
    open_ = {OpenBeam{}};
    for (Tensor logits = first_logits(); logits.defined();
         logits = next_logits()) {
      ++made_;
      const std::vector<Candidate> candidates = best_candidates(logits);
      finish(candidates);
      const bool any_open = advance(candidates);
      if (!any_open || !worth_going_on()) return std::move(finished_);
    }
    return cancelled();
  }

 private:
  int64_t beams() const { return options_.beams; }

  double penalised(double score, int64_t tokens) const {
    return score /
           std::pow(static_cast<double>(tokens), options_.length_penalty);
  }

  Tensor first_logits() {
    const Tensor ids = ids_tensor(prompt_);
    if (options_.stop.stop_requested()) return {};
    if (!cache_) return feed(model_, ids, {});
    // Into row 0 alone; the first reorder copies it to the others.
    return prefill(model_, *cache_, ids,
                   {.chunk = options_.chunk, .stop = options_.stop});
  }

  // Of the open beams, whose rows are in place; idle rows repeat the last one.
  Tensor next_logits() {
    if (options_.stop.stop_requested()) return {};
    if (cache_) {
      std::vector<int64_t> last;
      for (int64_t row = 0; row < beams(); ++row) {
        const size_t beam =
            std::min(static_cast<size_t>(row), open_.size() - 1);
        last.push_back(open_[beam].tokens.back());
      }
      return feed(model_, *cache_, ids_tensor(last).view({beams(), 1}),
                  {.role = Role::kDecode});
    }
    std::vector<int64_t> all;
    for (const OpenBeam& beam : open_) {
      all.insert(all.end(), prompt_.begin(), prompt_.end());
      all.insert(all.end(), beam.tokens.begin(), beam.tokens.end());
    }
    const auto rows = static_cast<int64_t>(open_.size());
    return feed(model_, ids_tensor(all).view({rows, -1}), {});
  }

  // Enough that `beams` can go on even if every better one ends.
  std::vector<Candidate> best_candidates(const Tensor& logits) const {
    const int64_t keep =
        beams() * std::max<int64_t>(2, 1 + static_cast<int64_t>(ends_.size()));
    std::vector<Candidate> all;
    for (size_t i = 0; i < open_.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      const auto values = logits_row(logits, row);
      check_logits(values);
      for (const auto& [id, score] : top_log_probs(log_probs(values), keep)) {
        all.push_back(
            {.score = open_[i].score + score,
             .beam = row,
             .id = id,
             .ends = std::binary_search(ends_.begin(), ends_.end(), id)});
      }
    }
    std::sort(all.begin(), all.end(), better);
    all.resize(std::min(all.size(), static_cast<size_t>(keep)));
    return all;
  }

  std::vector<int64_t> extended(const Candidate& candidate) const {
    auto tokens = open_[static_cast<size_t>(candidate.beam)].tokens;
    tokens.push_back(candidate.id);
    return tokens;
  }

  // Only the `beams` best candidates may become results; the others are there
  // to keep the search alive.
  void finish(std::span<const Candidate> candidates) {
    const bool last = made_ == new_tokens_;
    const size_t top =
        std::min(candidates.size(), static_cast<size_t>(beams()));
    for (const Candidate& candidate : candidates.first(top)) {
      if (!candidate.ends && !last) continue;
      finished_.push_back({.tokens = extended(candidate),
                           .score = penalised(candidate.score, made_),
                           .finish_reason = candidate.ends
                                                ? FinishReason::kStop
                                                : FinishReason::kLength});
    }
    std::stable_sort(
        finished_.begin(), finished_.end(),
        [](const Beam& a, const Beam& b) { return a.score > b.score; });
    if (finished_.size() > static_cast<size_t>(beams())) {
      finished_.resize(static_cast<size_t>(beams()));
    }
  }

  // Makes the best candidates that go on the open beams; false if none does.
  bool advance(std::span<const Candidate> candidates) {
    if (made_ == new_tokens_) return false;
    std::vector<OpenBeam> next;
    std::vector<int64_t> rows;
    for (const Candidate& candidate : candidates) {
      if (candidate.ends || next.size() == static_cast<size_t>(beams())) {
        continue;
      }
      next.push_back({.tokens = extended(candidate), .score = candidate.score});
      rows.push_back(candidate.beam);
    }
    if (next.empty()) return false;
    open_ = std::move(next);
    rows.resize(static_cast<size_t>(beams()), rows.back());
    if (cache_) cache_->reorder(rows);
    return true;
  }

  bool worth_going_on() const {
    if (finished_.size() < static_cast<size_t>(beams())) return true;
    if (options_.early_stop == EarlyStop::kAlways) return false;
    // With a positive penalty longer texts score better, so the best a beam can
    // reach is judged at the full length.
    const bool full =
        options_.early_stop == EarlyStop::kNever && options_.length_penalty > 0;
    const double best =
        penalised(open_.front().score, full ? new_tokens_ : made_);
    return best > finished_.back().score;
  }

  std::vector<Beam> cancelled() {
    std::vector<Beam> beams;
    if (made_ == 0) return beams;
    for (OpenBeam& beam : open_) {
      beams.push_back({.tokens = std::move(beam.tokens),
                       .score = penalised(beam.score, made_),
                       .finish_reason = FinishReason::kCancelled});
    }
    return beams;
  }

  const LanguageModel& model_;
  Cache* cache_;
  std::span<const int64_t> prompt_;
  const BeamOptions& options_;
  std::vector<int64_t> ends_;  // ascending, no duplicates
  int64_t new_tokens_ = 0;
  int64_t made_ = 0;            // new tokens of every open beam
  std::vector<OpenBeam> open_;  // best first
  std::vector<Beam> finished_;  // best first, at most `beams`
};

}  // namespace

std::vector<Beam> beam_search(const LanguageModel& model, Cache* cache,
                              std::span<const int64_t> prompt,
                              const BeamOptions& options) {
  return Search(model, cache, prompt, options).run();
}

}  // namespace kvcache::model
