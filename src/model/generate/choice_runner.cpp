// choice_runner.cpp - memo, eligibility, the plain path, statistics.
#include "kvcache/model/choice_runner.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "choice_checks.h"
#include "choice_row.h"
#include "kvcache/concat_cache.h"

namespace kvcache::model {
namespace {

PlacementOptions placement_of(const ChoiceOptions& options) {
  return {.rule = PlacementRule::kChunkEnds,
          .stride = options.stride,
          .tail = options.tail,
          .align = options.align,
          .max_chunk = options.lengths.back(),
          .min_prefix = options.min_prefix};
}

std::string layout_for(const RoutedModel& model, int64_t capacity) {
  const CacheSpec parts[] = {model.cache_spec(ModelPart::kLower, capacity),
                             model.cache_spec(ModelPart::kUpper, capacity)};
  return layout_of(parts);
}

std::shared_ptr<const RoutedModel> given(
    std::shared_ptr<const RoutedModel> model,
    const std::shared_ptr<CheckpointStore>& store) {
  TORCH_CHECK_VALUE(model && store,
                    "[ChoiceRunner] the model and the store must not be null.");
  return model;
}

// In float32, in the order of the options.
std::vector<float> softmax(const float* logits, int64_t count) {
  std::vector<float> result(logits, logits + count);
  const float most = *std::max_element(result.begin(), result.end());
  float sum = 0;
  for (float& value : result) sum += value = std::exp(value - most);
  for (float& value : result) value /= sum;
  return result;
}

// Answers that cannot be given by the plain path either.
bool unanswerable(ChoiceRefusal why) {
  return why == ChoiceRefusal::kImages || why == ChoiceRefusal::kRouterAbove ||
         why == ChoiceRefusal::kRouterFeatures;
}

}  // namespace

ChoiceRunner::Impl::Impl(std::shared_ptr<const RoutedModel> of,
                         std::shared_ptr<CheckpointStore> in,
                         ChoiceOptions with)
    : model(given(std::move(of), in)),
      store(std::move(in)),
      options(checked(std::move(with), *model)),
      placement(placement_of(options)),
      layout(layout_for(*model, options.spans.back())),
      letters(at::tensor(options.letters, at::kLong).to(model->device())),
      graphs(model, options),
      memo(options.memo_entries) {}

ChoiceRefusal ChoiceRunner::Impl::eligible(const ChoiceRequest& request) const {
  using enum ChoiceRefusal;
  const auto router = model->router();
  if (router && !router->normalised) return kRouterFeatures;
  if (router && router->layer > model->split()) return kRouterAbove;
  if (request.images) return kImages;
  if (store->stats().max_bytes == 0) return kDisabled;
  if (request.state_len == 0) return kNoStateLength;
  const int64_t state = placement.align_down(request.state_len);
  if (state < options.min_prefix) return kTooShort;
  const auto slots = static_cast<int64_t>(request.slots.size());
  if (slots == 0 || slots > options.max_slots) return kSlotCount;
  if (std::ranges::min(request.slots) < state) return kSlotInState;
  const int64_t suffix = static_cast<int64_t>(request.ids.size()) - state;
  const int64_t padded = graphs.padded(suffix);
  if (padded == 0) return kSuffixTooLong;
  return state + padded > options.spans.back() ? kTooLong : kNone;
}

std::vector<std::vector<float>> ChoiceRunner::Impl::probabilities(
    const Tensor& hidden, const ChoiceRequest& request) const {
  const auto slots = static_cast<int64_t>(request.slots.size());
  if (slots == 0) return {};
  const Tensor logits =
      model->choices(hidden.narrow(1, 0, slots), letters).cpu().contiguous();
  std::vector<std::vector<float>> result;
  for (int64_t i = 0; i < slots; ++i) {
    result.push_back(
        softmax(logits.const_data_ptr<float>() + i * letters.numel(),
                request.option_counts[static_cast<size_t>(i)]));
  }
  return result;
}

Tensor ChoiceRunner::Impl::no_features() const {
  if (!model->router()) return {};
  return at::zeros({model->hidden_size()},
                   at::TensorOptions(at::kFloat).device(model->device()));
}

ChoiceResult ChoiceRunner::Impl::plain(const ChoiceRequest& request,
                                       ChoiceRefusal why) {
  ++plain_count;
  ChoiceResult result{.refusal = why};
  const auto n = static_cast<int64_t>(request.ids.size());
  result.report.computed = n;
  result.report.reason =
      why == ChoiceRefusal::kDisabled   ? ReuseReason::kDisabled
      : why == ChoiceRefusal::kTooShort ? ReuseReason::kTooShort
                                        : ReuseReason::kNotEligible;
  if (unanswerable(why)) return result;
  const Tensor ids =
      at::tensor(request.ids, at::kLong).unsqueeze(0).to(model->device());
  const Tensor features = no_features();
  ConcatCache lower(model->cache_spec(ModelPart::kLower, {}));
  Step first = lower.begin_step({.tokens = n});
  const Tensor hidden = model->lower(ids, first, features);
  first.commit();
  result.route = request.route.value_or(
      features.defined() ? model->route(features.div(static_cast<double>(n)))
                         : 0);
  check_route(result.route, *model);
  const auto loaded = model->routes();
  Tensor slot;
  if (result.route != 0) {
    const auto at = std::find(loaded.begin(), loaded.end(), result.route);
    slot = at::tensor({static_cast<int64_t>(at - loaded.begin())}, at::kLong)
               .to(model->device());
  }
  if (request.slots.empty()) return result;
  ConcatCache upper(model->cache_spec(ModelPart::kUpper, {}));
  Step second = upper.begin_step({.tokens = n});
  const Tensor positions =
      at::tensor(request.slots, at::kLong).unsqueeze(0).to(model->device());
  const Tensor chosen = model->upper(hidden, second, slot, positions);
  second.commit();
  result.probabilities = probabilities(chosen, request);
  return result;
}

ChoiceResult ChoiceRunner::Impl::answer(const ChoiceRequest& request) {
  const ChoiceRefusal refusal = eligible(request);
  if (refusal != ChoiceRefusal::kNone) return plain(request, refusal);
  ChoiceResult result = ChoiceRow(*this, request).run();
  if (result.refusal != ChoiceRefusal::kNone) {
    return plain(request, result.refusal);
  }
  return result;
}

ChoiceRunner::ChoiceRunner(std::shared_ptr<const RoutedModel> model,
                           std::shared_ptr<CheckpointStore> store,
                           ChoiceOptions options)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(store),
                                   std::move(options))) {}
ChoiceRunner::~ChoiceRunner() = default;

ChoiceResult ChoiceRunner::answer(const ChoiceRequest& request) {
  const c10::InferenceMode inference;
  check_request(request, impl_->options, *impl_->model);
  std::string key;
  if (impl_->options.memo_entries > 0 && !request.images) {
    key = ChoiceMemo::key_of(request, impl_->options.generation);
    if (const ChoiceResult* known = impl_->memo.find(key)) {
      ++impl_->memo_hits;
      ChoiceResult result = *known;
      result.from_memo = true;
      result.timings = {};
      return result;
    }
  }
  ChoiceResult result = impl_->answer(request);
  if (!key.empty() && !result.probabilities.empty()) {
    impl_->memo.keep(key, result);
  }
  return result;
}

ChoiceRefusal ChoiceRunner::eligible(const ChoiceRequest& request) const {
  check_request(request, impl_->options, *impl_->model);
  return impl_->eligible(request);
}

PrecaptureResult ChoiceRunner::precapture(std::mutex* lock) {
  const c10::InferenceMode inference;
  return impl_->graphs.precapture(lock);
}

void ChoiceRunner::recapture() {
  impl_->graphs.clear();
  clear();
}

void ChoiceRunner::clear() {
  impl_->store->clear();
  impl_->memo.clear();
}

int64_t ChoiceRunner::last_route() const noexcept { return impl_->last_route; }

ChoiceInfo ChoiceRunner::info() const {
  ChoiceInfo info{.store = impl_->store->stats(),
                  .stride = impl_->options.stride,
                  .tail = impl_->options.tail};
  impl_->graphs.add_to(info);
  info.plain = impl_->plain_count;
  info.memo_hits = impl_->memo_hits;
  info.memo_entries = static_cast<int64_t>(impl_->memo.size());
  return info;
}

}  // namespace kvcache::model
