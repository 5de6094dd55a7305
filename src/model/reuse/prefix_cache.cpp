// prefix_cache.cpp - look up, restore, mark, keep.
#include "kvcache/model/prefix_cache.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "src/model/reuse/prefix_impl.h"

namespace kvcache::model {
namespace {

bool has_states(const CacheSpec& spec) {
  return std::any_of(spec.layers.begin(), spec.layers.end(),
                     [](const LayerSpec& layer) {
                       return std::holds_alternative<RecurrentLayer>(layer);
                     });
}

// Of one row with `tokens` tokens: K and V, or states.
size_t kv_bytes(const CacheSpec& spec, int64_t tokens) {
  CacheSpec one = spec;
  one.rows = 1;
  return bytes_needed(one, tokens) - bytes_needed(one, 0);
}
size_t state_bytes(const CacheSpec& spec) {
  CacheSpec one = spec;
  one.rows = 1;
  return bytes_needed(one, 0) / 2;  // it counts the successor too
}

PlacementPolicy placement_for(PrefixOptions options, bool any_token) {
  PlacementOptions& placement = options.placement;
  if (!any_token) {
    placement.align = options.chunk;
    placement.stride -= placement.stride % options.chunk;
  }
  return PlacementPolicy(placement);
}

}  // namespace

PrefixCache::Impl::Impl(std::shared_ptr<const LanguageModel> of,
                        std::shared_ptr<CheckpointStore> in, PrefixOptions with)
    : model(std::move(of)),
      store(std::move(in)),
      options(std::move(with)),
      placement(PlacementOptions{}),
      any_token(false) {
  TORCH_CHECK_VALUE(model && store,
                    "[PrefixCache] the model and the store must not be null.");
  TORCH_CHECK_VALUE(options.block >= 1 && options.chunk >= 1,
                    "[PrefixCache] block and chunk must be at least 1 token "
                    "but got ",
                    options.block, " and ", options.chunk, ".");
  any_token = model->row_exact(Role::kPrefill) &&
              model->row_exact(Role::kDecode) && model->roles_agree();
  placement = placement_for(options, any_token);
  if (!options.folder.path.empty()) saved.emplace(options.folder);
}

std::string PrefixCache::Impl::layout_for(const CacheSpec& spec) const {
  return layout_of({&spec, 1});
}

PrefixCache::PrefixCache(std::shared_ptr<const LanguageModel> model,
                         std::shared_ptr<CheckpointStore> store,
                         PrefixOptions options)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(store),
                                   std::move(options))) {}
PrefixCache::~PrefixCache() = default;

CheckpointStore& PrefixCache::store() const noexcept { return *impl_->store; }
bool PrefixCache::any_token() const noexcept { return impl_->any_token; }
int64_t PrefixCache::restore_multiple() const noexcept {
  return impl_->restore_multiple();
}

int64_t PrefixCache::save() {
  return impl_->saved ? impl_->saved->save(*impl_->store) : 0;
}

PrefixRun::PrefixRun(PrefixCache& prefix, Cache& cache, int64_t row,
                     std::span<const int64_t> prompt, const Namespace& space,
                     std::span<const int64_t> marks, RestoreTime when)
    : prefix_(*prefix.impl_),
      cache_(cache),
      row_(row),
      prompt_(static_cast<int64_t>(prompt.size())),
      space_(space) {
  // A ring cannot be kept: said here, not by never reusing anything.
  cache.checkpoint(row, BlockOptions{.length = 0});
  held_ = cache.lengths()[static_cast<size_t>(row)];
  find(prompt);
  if (when == RestoreTime::kAtOnce || !logits().defined()) arrive();
  if (has_states(cache.spec()) && held_ < prompt_) {
    ends_ = prefix_.placement.positions(held_, prompt_, marks,
                                        reuse_.report.divergence);
  }
}

void PrefixRun::find(std::span<const int64_t> prompt) {
  const PrefixOptions& options = prefix_.options;
  hit_ = prefix_.store->lookup({.tokens = prompt,
                                .space = space_,
                                .layout = prefix_.layout_for(cache_.spec()),
                                .final_hidden = options.keep_logits});
  reuse_.report = hit_.report;
  if (prefix_.saved) {
    auto found = prefix_.saved->find(prompt, space_, prefix_.restore_multiple(),
                                     hit_.position);
    if (found) {
      hit_ = Hit();
      hit_.position = found->position;
      hit_.text = std::move(found->text);
      hit_.final_hidden = found->logits;
      reuse_.from_folder = true;
      LookupReport& report = reuse_.report;
      report.reason = found->position >= prompt_ - 1 ? ReuseReason::kAll
                      : found->matched < prompt_ - 1
                          ? ReuseReason::kTokensDiverge
                          : ReuseReason::kNoCheckpointBefore;
      report.matched = found->matched;
      report.restored = found->position;
      report.computed = prompt_ - found->position;
      report.first_different.reset();
      if (found->matched < prompt_) report.first_different = found->matched;
    }
  }
  if (!hit_.text || hit_.position <= held_) return stay(held_);
  held_ = hit_.position;
  waiting_ = true;
  if (hit_.position < prompt_) hit_.final_hidden.reset();
  prompt_logits_ = hit_.final_hidden;
  reuse_.whole_prompt = prompt_logits_.defined();
}

void PrefixRun::arrive() {
  if (!waiting_) return;
  cache_.restore(hit_.text->parts[0], row_, hit_.position);
  waiting_ = false;
}

// The row goes on from what it holds. What the store has of that is shared with
// what will be kept, where the bits are sure to be the same.
void PrefixRun::stay(int64_t held) {
  hit_.final_hidden.reset();
  if (held == 0 || !prefix_.any_token) {
    hit_.text.reset();
    hit_.position = 0;
  }
  if (held == 0) return;
  LookupReport& report = reuse_.report;
  if (report.matched <= held) {
    report.matched = held;
    report.reason =
        held >= prompt_ - 1 ? ReuseReason::kAll : ReuseReason::kTokensDiverge;
    report.first_different.reset();
    if (held < prompt_ - 1) report.first_different = held;
  }
  report.restored = held;
  report.computed = prompt_ - held;
  reuse_.from_folder = false;
  reuse_.in_row = true;
}

int64_t PrefixRun::step_end(int64_t done) const {
  const int64_t chunk = prefix_.options.chunk;
  int64_t end = std::min(prompt_, done - done % chunk + chunk);
  const auto next = std::upper_bound(ends_.begin(), ends_.end(), done);
  if (next != ends_.end()) end = std::min(end, *next);
  return end;
}

void PrefixRun::prefilled(int64_t done, const Tensor& logits) {
  if (std::binary_search(ends_.begin(), ends_.end(), done)) cache_.mark(row_);
  if (done == prompt_ && prefix_.options.keep_logits) {
    prompt_logits_ = logits.clone();
  }
}

// How much of the row can be taken up again.
int64_t PrefixRun::kept_length() const {
  int64_t length = cache_.lengths()[static_cast<size_t>(row_)];
  if (prefix_.any_token) return length;
  length = std::min(length, prompt_);
  length -= length % prefix_.options.chunk;
  if (!has_states(cache_.spec())) return length;
  const std::vector<int64_t> points = cache_.restore_points(row_);
  const auto behind = std::upper_bound(points.begin(), points.end(), length);
  return behind == points.begin() ? 0 : *(behind - 1);
}

StoredText PrefixRun::stored(int64_t length) const {
  const PrefixOptions& options = prefix_.options;
  StoredText text{
      .parts = {cache_.checkpoint(
          row_, {.shared = hit_.text ? &hit_.text->parts[0] : nullptr,
                 .same = hit_.position,
                 .block = options.block,
                 .length = length})},
      .restore_multiple = prefix_.restore_multiple()};
  if (prompt_logits_.defined() && prompt_ <= length) {
    text.extras.push_back(
        {.position = prompt_, .features = {}, .final_hidden = prompt_logits_});
  }
  if (hit_.text) {
    for (const auto& [first, last] : hit_.text->decoded) {
      if (first < hit_.position) {
        text.decoded.emplace_back(first, std::min(last, hit_.position));
      }
    }
  }
  if (prompt_ < length) text.decoded.emplace_back(prompt_, length);
  return text;
}

void PrefixRun::keep(std::span<const int64_t> sequence) noexcept {
  try {
    arrive();
    const int64_t length = kept_length();
    if (length <= hit_.position) return;
    const CacheSpec& spec = cache_.spec();
    PutRequest request{.tokens = sequence.first(static_cast<size_t>(length)),
                       .space = space_,
                       .layout = prefix_.layout_for(spec)};
    const int64_t copied = length - hit_.position + prefix_.options.block;
    request.bytes = kv_bytes(spec, copied) +
                    (prompt_logits_.defined() ? prompt_logits_.nbytes() : 0);
    if (has_states(spec)) {
      for (const int64_t point : cache_.restore_points(row_)) {
        if (point <= length) request.positions.push_back(point);
      }
      if (request.positions.empty() || request.positions.back() != length) {
        request.positions.push_back(length);
      }
      request.bytes += request.positions.size() * state_bytes(spec);
    }
    const PutResult result =
        prefix_.store->put(request, [&] { return stored(length); });
    if (prefix_.saved && result == PutResult::kStored) {
      prefix_.saved->note(request.tokens, space_);
    }
  } catch (const std::exception&) {
    // The answer is there; a later request computes what could not be kept.
  }
}

}  // namespace kvcache::model
