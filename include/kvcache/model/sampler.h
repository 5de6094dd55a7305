// kvcache/model/sampler.h - the next token out of a row of logits.
//
// V vocabulary. Order of the filters, as in Hugging Face transformers:
// repetition penalty, temperature, top-k, top-p, min-p; each works on what the
// one before it has left, and the best token always stays.
// Source: transformers/generation/logits_process.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace kvcache::model {

struct SamplingOptions {
  double temperature = 0;  // 0: the arg-max, of equal ones the lowest id
  std::optional<int64_t> top_k = {};  // 0, or more than V: all of them
  std::optional<double> top_p = {};   // in [0, 1]; 0: the best one
  std::optional<double> min_p = {};   // in [0, 1], of the best one's chance
  // Logits of tokens seen before are divided by it, negative ones multiplied.
  std::optional<double> repetition_penalty = {};  // above 0; 1: none
  std::optional<uint64_t> seed = {};              // empty: a random one
};

// Throws, naming the option and its value, unless all are legal.
void check_sampling(const SamplingOptions& options);

// One generation's choices: the same seed and logits give the same tokens on
// every platform. Not thread-safe.
//
// Errors: NaN or infinite logits throw and draw nothing.
// Cost: one pass over V at temperature 0; a heap of V for top-k and top-p.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options = {});

  uint64_t seed() const noexcept { return seed_; }

  // `logits` [V]. `history`: the tokens before, for the repetition penalty.
  int64_t sample(std::span<const float> logits,
                 std::span<const int64_t> history = {});
  // The numbers in [0, 1) that the next draws would use, for draws elsewhere.
  std::vector<double> draw_uniforms(int64_t count);

 private:
  struct Candidate {
    float logit = 0;
    int64_t id = 0;
    double weight = 0;  // chance before it is made to add up to 1
  };

  std::span<const float> penalise(std::span<const float> logits,
                                  std::span<const int64_t> history);
  void weigh(std::span<const float> logits, size_t best);
  void keep_top_k();
  void keep_top_p();
  void keep_min_p();
  int64_t draw();
  double uniform();

  SamplingOptions options_;
  uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<float> penalised_;       // [V]
  std::vector<Candidate> candidates_;  // reused from token to token
};

// Throws unless all of `logits` are finite.
void check_logits(std::span<const float> logits);

// float32 log-softmax of raw logits [V].
at::Tensor log_probs(std::span<const float> logits);

// The `count` best of log_probs() [V], best first, of equal ones the lowest id.
std::vector<std::pair<int64_t, float>> top_log_probs(
    const at::Tensor& log_probs, int64_t count);

}  // namespace kvcache::model
