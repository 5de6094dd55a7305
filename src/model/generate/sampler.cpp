// sampler.cpp - filters over logits, and a draw that is the same everywhere.

#include "kvcache/model/sampler.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

namespace kvcache::model {
namespace {

void check_fraction(const char* name, std::optional<double> value) {
  TORCH_CHECK_VALUE(!value || (*value >= 0 && *value <= 1), "[Sampler] ", name,
                    " must be between 0 and 1 but got ", *value, ".");
}

// Better first; of equal logits the lower id.
template <typename Candidate>
bool better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// For std heaps, whose front is the greatest.
template <typename Candidate>
bool worse(const Candidate& a, const Candidate& b) {
  return better(b, a);
}

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

void check_sampling(const SamplingOptions& options) {
  TORCH_CHECK_VALUE(
      std::isfinite(options.temperature) && options.temperature >= 0,
      "[Sampler] temperature must be a number of at least 0 but got ",
      options.temperature, ".");
  TORCH_CHECK_VALUE(!options.top_k || *options.top_k >= 0,
                    "[Sampler] top_k must be at least 0 but got ",
                    *options.top_k, "; 0 keeps every token.");
  check_fraction("top_p", options.top_p);
  check_fraction("min_p", options.min_p);
  const auto& penalty = options.repetition_penalty;
  TORCH_CHECK_VALUE(!penalty || (std::isfinite(*penalty) && *penalty > 0),
                    "[Sampler] repetition_penalty must be above 0 but got ",
                    *penalty, "; 1 is no penalty.");
}

Sampler::Sampler(const SamplingOptions& options) : options_(options) {
  check_sampling(options);
  seed_ = options.seed ? *options.seed : random_seed();
  random_.seed(seed_);
}

int64_t Sampler::sample(std::span<const float> logits,
                        std::span<const int64_t> history) {
  check_logits(logits);
  const auto values = penalise(logits, history);
  // max_element answers the first of equal ones: the lowest id.
  const auto best = static_cast<size_t>(
      std::max_element(values.begin(), values.end()) - values.begin());
  if (options_.temperature == 0) return static_cast<int64_t>(best);
  weigh(values, best);
  keep_top_k();
  keep_top_p();
  keep_min_p();
  return draw();
}

std::span<const float> Sampler::penalise(std::span<const float> logits,
                                         std::span<const int64_t> history) {
  const double penalty = options_.repetition_penalty.value_or(1);
  if (penalty == 1) return logits;
  penalised_.assign(logits.begin(), logits.end());
  const std::unordered_set<int64_t> seen(history.begin(), history.end());
  for (const int64_t id : seen) {
    TORCH_CHECK_INDEX(id >= 0 && static_cast<size_t>(id) < logits.size(),
                      "[Sampler::sample] token ids must be in [0, ",
                      logits.size(), ") but the history holds ", id, ".");
    float& logit = penalised_[static_cast<size_t>(id)];
    const double value = logit > 0 ? logit / penalty : logit * penalty;
    // A penalty of 1e-300 must not turn a finite logit into an infinite one.
    constexpr double kLimit = std::numeric_limits<float>::max();
    logit = static_cast<float>(std::clamp(value, -kLimit, kLimit));
  }
  return penalised_;
}

void Sampler::weigh(std::span<const float> logits, size_t best) {
  const double highest = logits[best];
  candidates_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    // The difference first: a temperature of 1e-30 then gives 0 or -inf, whose
    // weights are 1 and 0, and never NaN.
    const double gap = logits[i] - highest;
    candidates_[i] = {
        .logit = logits[i],
        .id = static_cast<int64_t>(i),
        .weight = gap == 0 ? 1.0 : std::exp(gap / options_.temperature)};
  }
}

void Sampler::keep_top_k() {
  const auto k = static_cast<size_t>(options_.top_k.value_or(0));
  if (k == 0 || k >= candidates_.size()) return;
  const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(candidates_.begin(), end - 1, candidates_.end(),
                   better<Candidate>);
  candidates_.erase(end, candidates_.end());
}

// The best tokens whose chances add up to top_p, the one that gets there
// included.
void Sampler::keep_top_p() {
  const double p = options_.top_p.value_or(1);
  if (p >= 1) return;
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.weight;
  // Popped candidates gather behind `end`, the best at the very end.
  auto end = candidates_.end();
  std::make_heap(candidates_.begin(), end, worse<Candidate>);
  double sum = 0;
  do {
    std::pop_heap(candidates_.begin(), end, worse<Candidate>);
    --end;
    sum += end->weight;
  } while (end != candidates_.begin() && sum < p * total);
  candidates_.erase(candidates_.begin(), end);
}

void Sampler::keep_min_p() {
  const double p = options_.min_p.value_or(0);
  // The best token's weight is 1, so weights are chances relative to its own.
  std::erase_if(candidates_, [p](const Candidate& c) { return c.weight < p; });
}

// 53 bits: std::uniform_real_distribution differs between libraries.
double Sampler::uniform() {
  return static_cast<double>(random_() >> 11) * 0x1.0p-53;
}

std::vector<double> Sampler::draw_uniforms(int64_t count) {
  std::vector<double> drawn(static_cast<size_t>(count));
  for (double& number : drawn) number = uniform();
  return drawn;
}

int64_t Sampler::draw() {
  // The filters leave no fixed order; the draw must not depend on theirs.
  const auto by_id = [](const Candidate& a, const Candidate& b) {
    return a.id < b.id;
  };
  if (!std::is_sorted(candidates_.begin(), candidates_.end(), by_id)) {
    std::sort(candidates_.begin(), candidates_.end(), by_id);
  }
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.weight;
  const double target = uniform() * total;
  double sum = 0;
  int64_t chosen = 0;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight == 0) continue;
    chosen = candidate.id;  // rounding may leave the sum short of the target
    sum += candidate.weight;
    if (sum > target) break;
  }
  return chosen;
}

void check_logits(std::span<const float> logits) {
  TORCH_CHECK_VALUE(!logits.empty(), "[Sampler] logits must not be empty.");
  // The largest exponent of all, as one vector loop without an early exit.
  constexpr uint32_t kMagnitude = 0x7fffffff;
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t largest = 0;
  for (const float logit : logits) {
    largest = std::max(largest, std::bit_cast<uint32_t>(logit) & kMagnitude);
  }
  if (largest < kInfinity) return;
  const auto bad = std::find_if_not(logits.begin(), logits.end(),
                                    [](float x) { return std::isfinite(x); });
  TORCH_CHECK_VALUE(false, "[Sampler] logits must be finite but got ", *bad,
                    " for token ", bad - logits.begin(),
                    " (non-finite logits); check the weights, or try float32.");
}

at::Tensor log_probs(std::span<const float> logits) {
  at::Tensor row = at::empty({static_cast<int64_t>(logits.size())}, at::kFloat);
  std::memcpy(row.mutable_data_ptr<float>(), logits.data(),
              logits.size_bytes());
  return at::log_softmax(row, 0);
}

std::vector<std::pair<int64_t, float>> top_log_probs(
    const at::Tensor& log_probs, int64_t count) {
  const auto size = static_cast<size_t>(log_probs.numel());
  const float* values = log_probs.const_data_ptr<float>();
  std::vector<std::pair<int64_t, float>> all(size);
  for (size_t i = 0; i < size; ++i) {
    all[i] = {static_cast<int64_t>(i), values[i]};
  }
  const auto end = all.begin() + std::min(count, static_cast<int64_t>(size));
  std::partial_sort(
      all.begin(), end, all.end(), [](const auto& a, const auto& b) {
        return a.second != b.second ? a.second > b.second : a.first < b.first;
      });
  all.erase(end, all.end());
  return all;
}

}  // namespace kvcache::model
