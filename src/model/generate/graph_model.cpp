// graph_model.cpp - a language model under a decoder, and its sampling by ops.

#include "kvcache/model/graph_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <limits>

namespace kvcache::model {
namespace {

Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const c10::InferenceMode normal(false);
  return at::zeros(sizes, at::TensorOptions(dtype).device(device));
}

}  // namespace

GraphAdapters::GraphAdapters(const LanguageModel& model, int64_t rows) {
  if (model.adapters().empty()) return;
  const at::Device device = model.cache_spec(1, 1).device;
  index_ = zeros({rows}, at::kLong, device).fill_(-1);
  from_ = zeros({rows}, at::kLong, device);
}

void GraphAdapters::set_row(int64_t row, int64_t adapter, int64_t from) const {
  if (!index_.defined()) return;
  const at::NoGradGuard no_grad;
  index_.narrow(0, row, 1).fill_(adapter);
  from_.narrow(0, row, 1).fill_(from);
}

ForwardOptions GraphAdapters::in(ForwardOptions options, int64_t first,
                                 int64_t rows) const {
  if (!index_.defined()) return options;
  options.adapters = index_.narrow(0, first, rows);
  options.adapters_from = from_.narrow(0, first, rows);
  return options;
}

GraphModel graph_model(const LanguageModel& model,
                       const GraphAdapters& adapters) {
  return {.forward =
              [&model, adapters](const Tensor& ids, Step& step,
                                 const GraphModel::Call& call) {
                const ForwardOptions options{.role = call.role,
                                             .all_logits = call.all_logits};
                return model.forward(ids, step,
                                     adapters.in(options, 0, adapters.rows()));
              },
          .context = model.context_length(),
          .vocab_size = model.vocab_size(),
          .device = model.cache_spec(1, 1).device};
}

GraphSampling::GraphSampling(const GraphSamplingOptions& options)
    : options_(options) {
  const int64_t rows = options.rows;
  const auto column = [&](at::ScalarType dtype, double value) {
    return zeros({rows, 1}, dtype, options.device).fill_(value);
  };
  temperature_ = column(at::kDouble, 0);
  top_p_ = column(at::kDouble, 1);
  min_p_ = column(at::kDouble, 0);
  top_k_ = column(at::kLong, static_cast<double>(options.vocab_size));
  penalty_ = column(at::kDouble, 1);
  uniform_ = zeros({options.steps, rows, 1}, at::kDouble, options.device);
  seen_ = zeros({rows, options.penalties ? options.vocab_size : 1}, at::kBool,
                options.device);
}

void GraphSampling::set_row(int64_t row, const SamplingOptions& options,
                            Sampler& sampler,
                            std::span<const int64_t> history) {
  const at::NoGradGuard no_grad;
  const int64_t k = options.top_k.value_or(0);
  const double p = options.top_p.value_or(1), min_p = options.min_p.value_or(0);
  const double penalty = options.repetition_penalty.value_or(1);
  const bool filters = k > 0 || p < 1 || min_p > 0;
  TORCH_CHECK_VALUE(
      (options_.draws || options.temperature == 0) &&
          (options_.filters || options.temperature == 0 || !filters) &&
          (options_.penalties || penalty == 1),
      "[GraphSampling::set_row] row ", row,
      " may only ask for what the sampling was made for; set draws, filters "
      "and penalties of GraphSamplingOptions.");
  temperature_.narrow(0, row, 1).fill_(options.temperature);
  top_p_.narrow(0, row, 1).fill_(p);
  min_p_.narrow(0, row, 1).fill_(min_p);
  top_k_.narrow(0, row, 1).fill_(k > 0 ? k : options_.vocab_size);
  penalty_.narrow(0, row, 1).fill_(penalty);
  if (options.temperature > 0) {
    std::vector<double> draws = sampler.draw_uniforms(options_.steps);
    uniform_.narrow(1, row, 1).copy_(
        at::from_blob(draws.data(), {options_.steps, 1, 1}, at::kDouble));
  }
  if (options_.penalties) {
    const Tensor of_row = seen_.narrow(0, row, 1).squeeze(0);
    std::vector<int64_t> ids(history.begin(), history.end());
    of_row.zero_();
    of_row.index_fill_(
        0,
        at::from_blob(ids.data(), {static_cast<int64_t>(ids.size())}, at::kLong)
            .to(options_.device),
        true);
  }
}

// Weights of the tokens that top-k, top-p and min-p leave; 0 elsewhere.
Tensor GraphSampling::filtered(const Tensor& logits,
                               const Tensor& weights) const {
  // Best first, of equal ones the lowest id.
  const auto sorted = logits.sort(/*stable=*/true, 1, /*descending=*/true);
  const Tensor& order = std::get<1>(sorted);
  const Tensor by_rank = weights.gather(1, order);
  const Tensor rank = at::arange(
      logits.size(1), at::TensorOptions(at::kLong).device(logits.device()));
  // masked_fill: where() with a number would copy it from the host.
  const Tensor kept = by_rank.masked_fill(rank.unsqueeze(0).ge(top_k_), 0);
  const Tensor total = kept.sum(1, true);
  const Tensor before = kept.cumsum(1).sub(kept);
  // The token that reaches top_p stays, and the best one always.
  const Tensor in_p = before.lt(top_p_.mul(total))
                          .logical_or(top_p_.ge(1))
                          .logical_or(rank.unsqueeze(0).eq(0));
  const Tensor stays = in_p.logical_and(kept.ge(min_p_));
  const Tensor left = kept.masked_fill(stays.logical_not(), 0);
  return at::zeros_like(weights).scatter(1, order, left);
}

Tensor GraphSampling::sample(const Tensor& raw, const Tensor& live,
                             int64_t repeat) const {
  Tensor logits = raw;
  if (options_.penalties) {
    constexpr double kLimit = std::numeric_limits<float>::max();
    const Tensor wide = logits.to(at::kDouble);
    const Tensor lowered =
        at::where(wide.gt(0), wide.div(penalty_), wide.mul(penalty_))
            .clamp(-kLimit, kLimit)
            .to(at::kFloat);
    logits = at::where(seen_, lowered, logits);
  }
  Tensor chosen = at::argmax(logits, 1, /*keepdim=*/true);
  if (options_.draws) {
    const Tensor wide = logits.to(at::kDouble);
    const Tensor gap = wide.sub(wide.gather(1, chosen));
    // A row of temperature 0 takes its arg-max below, whatever is here.
    const Tensor heat = temperature_.masked_fill(temperature_.le(0), 1);
    Tensor weights = gap.div(heat).exp().masked_fill_(gap.eq(0), 1);
    if (options_.filters) {
      weights = filtered(logits, weights);
    }
    const Tensor sums = weights.cumsum(1);
    const Tensor all = sums.narrow(1, sums.size(1) - 1, 1);
    const Tensor target = uniform_.select(0, repeat).mul(all);
    // The first whose sum passes the target, which rounding may have put at the
    // end. It has a weight, as its sum rose.
    const Tensor passed =
        sums.gt(target).logical_or(sums.eq(all)).to(at::kByte);
    const Tensor drawn = at::argmax(passed, 1, true);
    chosen = at::where(temperature_.gt(0), drawn, chosen);
  }
  if (options_.penalties) {
    const Tensor now = seen_.gather(1, chosen).logical_or(live.unsqueeze(1));
    Tensor(seen_).scatter_(1, chosen, now);
  }
  return chosen.squeeze(1);
}

GraphSampler GraphSampling::sampler() const {
  return [this](const Tensor& logits, const Tensor& live, int64_t repeat) {
    return sample(logits, live, repeat);
  };
}

namespace {

GraphSamplingOptions sampling_options(const LanguageModel& model,
                                      const GraphRunnerOptions& options) {
  const SamplingOptions& asked = options.sampling;
  return {.steps = options.steps_per_replay,
          .vocab_size = model.vocab_size(),
          .device = model.cache_spec(1, 1).device,
          .draws = asked.temperature > 0,
          .filters = asked.top_k.value_or(0) > 0 ||
                     asked.top_p.value_or(1) < 1 || asked.min_p.value_or(0) > 0,
          .penalties = asked.repetition_penalty.value_or(1) != 1};
}

}  // namespace

GraphRunner::GraphRunner(const LanguageModel& model, WindowCache& cache,
                         GraphRunnerOptions options)
    : steps_(options.steps_per_replay),
      sampling_(sampling_options(model, options)),
      adapters_(model, 1),
      decoder_(graph_model(model, adapters_), cache,
               {.backend = std::move(options.backend),
                .byte_budget = options.byte_budget,
                .steps_per_replay = steps_,
                .end_tokens = std::move(options.end_tokens),
                .sampler = sampling_.sampler(),
                .sampler_inputs = sampling_.inputs()}) {
  TORCH_CHECK_VALUE(cache.spec().rows == 1,
                    "[GraphRunner] the cache must have 1 row but got ",
                    cache.spec().rows, "; a batch needs a Batcher.");
}

std::vector<Tensor> GraphSampling::inputs() const {
  return {temperature_, top_p_, min_p_, top_k_, penalty_, uniform_, seen_};
}

}  // namespace kvcache::model
