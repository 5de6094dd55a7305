#include "static_decoder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "storage.h"

namespace kvcache {

StaticDecoder::StaticDecoder(const char* name, GraphModel model,
                             WindowCache& cache, GraphDecoderOptions options)
    : name_(name),
      model_(std::move(model)),
      cache_(cache),
      options_(std::move(options)) {
  const CacheSpec& spec = cache.spec();
  TORCH_CHECK_VALUE(model_.forward && model_.vocab_size >= 1, "[", name,
                    "::", name,
                    "] the model must have a forward and a vocabulary; "
                    "fill GraphModel.");
  TORCH_CHECK_VALUE(model_.device == spec.device, "[", name, "::", name,
                    "] the model must be on the cache's device ", spec.device,
                    " but is on ", model_.device, "; move one of them.");
  TORCH_CHECK_VALUE(*spec.capacity <= model_.context, "[", name, "::", name,
                    "] the capacity must be <= ", model_.context,
                    ", the model's context, but is ", *spec.capacity,
                    "; lower CacheSpec::capacity.");
  TORCH_CHECK_VALUE(options_.steps_per_replay >= 1, "[", name, "::", name,
                    "] steps_per_replay must be >= 1 but got ",
                    options_.steps_per_replay, ".");
  const int64_t most = options_.steps_per_replay;
  tokens_ = new_zeros({spec.rows, 1}, at::kLong, spec.device);
  logits_ =
      new_zeros({spec.rows, 1, model_.vocab_size}, at::kFloat, spec.device);
  ids_ = new_zeros({most, spec.rows}, at::kLong, spec.device);
  finished_ = new_zeros({spec.rows}, at::kBool, spec.device);
  if (!options_.end_tokens.empty()) {
    ends_ = new_zeros({static_cast<int64_t>(options_.end_tokens.size())},
                      at::kLong, spec.device);
    ends_.copy_(at::tensor(options_.end_tokens, at::kLong));
  }
  if (options_.backend) {
    logits_graph_ = std::make_unique<StepGraph>(
        cache, [this](Step& step, int64_t) { logits_step(step); },
        StepGraphOptions{.backend = options_.backend,
                         .inputs = {tokens_, logits_},
                         .byte_budget = options_.byte_budget});
  }
}

void StaticDecoder::check_tokens(const Tensor& tokens) const {
  TORCH_CHECK(cache_.spec().rows == tokens_.size(0), "[", name_,
              "::step] the cache must have the ", tokens_.size(0),
              " rows that it had but has ", cache_.spec().rows,
              "; make a decoder for it.");
  TORCH_CHECK_VALUE(tokens.defined() && tokens.sizes() == tokens_.sizes() &&
                        tokens.scalar_type() == at::kLong,
                    "[", name_, "::step] tokens must be ", tokens_.sizes(),
                    " int64, one for each row, but got ", tensor_text(tokens),
                    "; a static step feeds one token per row.");
}

void StaticDecoder::check_room(std::span<const int64_t> count,
                               int64_t steps) const {
  for (size_t row = 0; row < count.size(); ++row) {
    const int64_t length = cache_.lengths()[row];
    TORCH_CHECK(count[row] == 0 || length + steps <= cache_.capacity(), "[",
                name_, "::step] row ", row, " is full: position ",
                length + steps, " > max_len ", cache_.capacity(),
                "; end it, or make the cache with a larger capacity.");
  }
}

Tensor StaticDecoder::prefill(const Tensor& ids,
                              const GraphPrefillOptions& options) {
  const CacheSpec& spec = cache_.spec();
  TORCH_CHECK_VALUE(ids.defined() && ids.dim() == 2 &&
                        ids.scalar_type() == at::kLong && ids.size(1) >= 1,
                    "[", name_,
                    "::prefill] ids must be a non-empty [B, T] of "
                    "int64 but got ",
                    tensor_text(ids), ".");
  TORCH_CHECK_VALUE(ids.size(0) == spec.rows, "[", name_,
                    "::prefill] batch must be ", spec.rows,
                    ", the decoder's, but got ", ids.size(0),
                    "; make a decoder for it.");
  TORCH_CHECK_VALUE(!options.chunk || *options.chunk >= 1, "[", name_,
                    "::prefill] chunk must be >= 1 but got ",
                    options.chunk.value_or(1), ".");
  TORCH_CHECK_VALUE(
      options.skip.empty() ||
          (static_cast<int64_t>(options.skip.size()) == spec.rows &&
           std::all_of(options.skip.begin(), options.skip.end(),
                       [&](int64_t n) { return n >= 0 && n < ids.size(1); })),
      "[", name_, "::prefill] skip must give each of ", spec.rows,
      " rows the pads before its first token, fewer than ", ids.size(1), ".");
  const int64_t shortest_pad =
      options.skip.empty()
          ? 0
          : *std::min_element(options.skip.begin(), options.skip.end());
  TORCH_CHECK_VALUE(ids.size(1) - shortest_pad <= cache_.capacity(), "[", name_,
                    "::prefill] at most ", cache_.capacity(),
                    " tokens, max_len, fit a row but got ",
                    ids.size(1) - shortest_pad,
                    "; crop the prompt or raise CacheSpec::capacity.");
  const int64_t step =
      std::min(options.chunk.value_or(ids.size(1)), ids.size(1) - shortest_pad);
  TORCH_CHECK_VALUE(step <= cache_.most_step(), "[", name_,
                    "::prefill] a step over ring storage has at most ",
                    cache_.most_step(), " tokens a row but got ", step,
                    "; set chunk, or raise CacheSpec::max_step.");
  cache_.reset();
  return prefill_steps(ids, options);
}

Tensor StaticDecoder::prefill_steps(const Tensor& ids,
                                    const GraphPrefillOptions& options) {
  at::NoGradGuard no_grad;
  const int64_t rows = ids.size(0), columns = ids.size(1);
  const int64_t chunk = options.chunk.value_or(columns);
  Tensor all, logits;
  std::vector<int64_t> skip(static_cast<size_t>(rows)), count(skip);
  for (int64_t begin = 0; begin < columns; begin += chunk) {
    const int64_t tokens = std::min(chunk, columns - begin);
    for (size_t row = 0; row < skip.size(); ++row) {
      const int64_t pads = options.skip.empty() ? 0 : options.skip[row];
      skip[row] = std::clamp<int64_t>(pads - begin, 0, tokens);
      count[row] = tokens - skip[row];
    }
    Step step =
        cache_.begin_step({.tokens = tokens, .skip = skip, .count = count});
    logits = model_.forward(
        ids.narrow(1, begin, tokens), step,
        {.role = Role::kPrefill, .all_logits = !options.last_only});
    step.commit();
    if (!options.last_only) {
      if (!all.defined()) {
        all = new_zeros({rows, columns, model_.vocab_size}, at::kFloat,
                        cache_.spec().device);
      }
      all.narrow(1, begin, tokens).copy_(logits);
    }
  }
  return options.last_only ? logits : all;
}

Tensor StaticDecoder::step(const Tensor& tokens,
                           std::span<const int64_t> count) {
  check_tokens(tokens);
  check_room(count, 1);
  at::NoGradGuard no_grad;
  if (!logits_graph_) {
    return plain_step(tokens, count);
  }
  tokens_.copy_(tokens);
  logits_graph_->run({.tokens = 1, .count = count});
  return logits_;
}

Tensor StaticDecoder::plain_step(const Tensor& tokens,
                                 std::span<const int64_t> count) {
  Step step = cache_.begin_step({.tokens = 1, .count = count});
  Tensor logits = model_.forward(tokens, step, {.role = Role::kDecode});
  step.commit();
  return logits;
}

void StaticDecoder::logits_step(Step& step) const {
  at::NoGradGuard no_grad;
  logits_.copy_(model_.forward(tokens_, step, {.role = Role::kDecode}));
}

// Feeds the tokens, and puts what follows them in their place.
void StaticDecoder::token_step(Step& step, int64_t repeat) const {
  at::NoGradGuard no_grad;
  const Tensor scores = scores_.select(0, repeat);
  scores.copy_(
      model_.forward(tokens_, step, {.role = Role::kDecode}).squeeze(1));
  const Tensor before = tokens_.squeeze(1);
  const Tensor live = step.limits().squeeze(1).gt(0);  // none in a recording
  Tensor next = options_.sampler ? options_.sampler(scores, live, repeat)
                                 : at::argmax(scores, 1);
  next = at::where(live, next, before);
  ids_.select(0, repeat).copy_(next);
  if (ends_.defined()) {
    const Tensor ended = next.unsqueeze(1).eq(ends_.unsqueeze(0)).any(1);
    finished_.logical_or_(ended.logical_and(live));
  }
  tokens_.copy_(next.unsqueeze(1));
}

DecodedTokens StaticDecoder::decode(const Tensor& tokens, int64_t steps,
                                    std::span<const int64_t> count) {
  check_tokens(tokens);
  TORCH_CHECK_VALUE(steps >= 1 && steps <= options_.steps_per_replay, "[",
                    name_, "::decode] steps must be in [1, ",
                    options_.steps_per_replay, "] but got ", steps,
                    "; raise GraphDecoderOptions::steps_per_replay.");
  check_room(count, steps);
  at::NoGradGuard no_grad;
  if (!scores_.defined()) {
    scores_ = new_zeros(
        {options_.steps_per_replay, cache_.spec().rows, model_.vocab_size},
        at::kFloat, cache_.spec().device);
  }
  decoded_ = steps;
  tokens_.copy_(tokens);
  finished_.zero_();
  if (!options_.backend) {
    return plain_decode(steps, count);
  }
  if (!token_graph_) {
    std::vector<Tensor> inputs = options_.sampler_inputs;
    inputs.insert(inputs.end(), {tokens_, ids_, scores_});
    if (ends_.defined()) {
      inputs.push_back(ends_);
    }
    token_graph_ = std::make_unique<StepGraph>(
        cache_,
        [this](Step& step, int64_t repeat) { token_step(step, repeat); },
        StepGraphOptions{.backend = options_.backend,
                         .inputs = std::move(inputs),
                         .finished = finished_,
                         .byte_budget = options_.byte_budget});
  }
  const std::vector<int64_t> before(cache_.lengths().begin(),
                                    cache_.lengths().end());
  token_graph_->run({.tokens = 1, .count = count}, steps, true);
  const std::span<const int64_t> after = token_graph_->read_back();
  DecodedTokens result{.ids =
                           ids_.narrow(0, 0, steps).to(at::kCPU, false, true)};
  for (size_t row = 0; row < before.size(); ++row) {
    result.fed.push_back(after[row] - before[row]);
  }
  return result;
}

// The same by plain steps: rows that ended take no more tokens.
DecodedTokens StaticDecoder::plain_decode(int64_t steps,
                                          std::span<const int64_t> count) {
  std::vector<int64_t> live(count.begin(), count.end());
  DecodedTokens result{.fed = std::vector<int64_t>(live.size(), 0)};
  for (int64_t i = 0; i < steps; ++i) {
    Step step = cache_.begin_step({.tokens = 1, .count = live});
    token_step(step, i);
    step.commit();
    const Tensor ended = finished_.to(at::kCPU);
    for (size_t row = 0; row < live.size(); ++row) {
      result.fed[row] += live[row];
      if (ended.const_data_ptr<bool>()[row]) {
        live[row] = 0;
      }
    }
  }
  result.ids = ids_.narrow(0, 0, steps).to(at::kCPU, false, true);
  return result;
}

Tensor StaticDecoder::logits() const {
  TORCH_CHECK(scores_.defined(), "[", name_,
              "::logits] decode() must have been called but was not.");
  return scores_.narrow(0, 0, decoded_);
}

double StaticDecoder::capture(std::span<const int64_t> windows) {
  if (!logits_graph_) {
    return 0;
  }
  const std::span<const int64_t> buckets = cache_.buckets();
  for (const int64_t window : windows) {
    TORCH_CHECK_VALUE(
        std::binary_search(buckets.begin(), buckets.end(), window), "[", name_,
        "::capture] a window must be one of the cache's ", buckets.size(),
        " buckets but got ", window, "; see WindowCache::buckets().");
  }
  at::NoGradGuard no_grad;
  double seconds = 0;
  for (const int64_t window : windows.empty() ? buckets : windows) {
    seconds += logits_graph_->capture(window);
  }
  options_.backend->synchronize();
  return seconds;
}

const GraphStatistics& StaticDecoder::statistics() const noexcept {
  static const GraphStatistics none;
  return logits_graph_ ? logits_graph_->statistics() : none;
}

const GraphStatistics& StaticDecoder::decode_statistics() const noexcept {
  static const GraphStatistics none;
  return token_graph_ ? token_graph_->statistics() : none;
}

}  // namespace kvcache
