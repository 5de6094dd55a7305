// Lookups and what is counted of them.
#include "kvcache/checkpoint_store.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "search.h"
#include "store_impl.h"
#include "stored_text.h"

namespace kvcache {
namespace {

using Clock = std::chrono::steady_clock;

StoreOptions checked(StoreOptions options) {
  TORCH_CHECK_VALUE(options.min_prefix >= 1 && options.most_remembered >= 0,
                    "[CheckpointStore::CheckpointStore] min_prefix must be >= "
                    "1 and most_remembered >= 0 but got ",
                    options.min_prefix, " and ", options.most_remembered, ".");
  if (!options.clock) options.clock = [] { return Clock::now(); };
  return options;
}

void count_row(ReuseCounts& counts, const LookupReport& first, int64_t limit,
               const LookupReport& answered, bool mispredicted) {
  ++counts.rows;
  if (first.restored >= limit) {
    ++counts.hits;
  } else {
    ++(first.restored > 0 ? counts.partial : counts.cold);
  }
  counts.mispredict += mispredicted ? 1 : 0;
  counts.tokens_reused += answered.restored;
  counts.tokens_computed += answered.computed;
}

bool looked_up(const LookupReport& report) {
  return report.reason != ReuseReason::kDisabled &&
         report.reason != ReuseReason::kNotEligible &&
         report.reason != ReuseReason::kTooShort;
}

}  // namespace

CheckpointStore::Impl::Impl(StoreOptions from)
    : options(checked(std::move(from))),
      account(std::make_shared<store::ByteAccount>()),
      index(options.eviction, options.most_remembered, account),
      events(options.on_event) {}

double CheckpointStore::Impl::now() const {
  return std::chrono::duration<double>(options.clock().time_since_epoch())
      .count();
}

CheckpointStore::CheckpointStore(StoreOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

CheckpointStore::~CheckpointStore() = default;

Hit CheckpointStore::Impl::find(const LookupRequest& request) {
  const auto n = static_cast<int64_t>(request.tokens.size());
  Hit hit{.space = request.space, .limit = request.limit.value_or(n - 1)};
  TORCH_CHECK_VALUE(hit.limit <= n,
                    "[CheckpointStore::lookup] limit must be at most the ", n,
                    " tokens but got ", hit.limit, ".");
  hit.report.computed = n;
  if (!request.eligible || options.max_bytes == 0 ||
      hit.limit < options.min_prefix) {
    hit.report.reason = !request.eligible        ? ReuseReason::kNotEligible
                        : options.max_bytes == 0 ? ReuseReason::kDisabled
                                                 : ReuseReason::kTooShort;
    return hit;
  }
  store::Wanted wanted{.generation = request.generation,
                       .limit = hit.limit,
                       .final_hidden = request.final_hidden,
                       .min_prefix = options.min_prefix};
  if (request.route) wanted.route = index.routes.find(*request.route);
  if (!request.layout.empty()) {
    wanted.layout = index.layouts.find(request.layout);
  }
  store::Root* root = index.find_root(request.space);
  const store::Key key(
      "CheckpointStore::lookup", request.tokens, request.space,
      root == nullptr ? 0 : adapter_key(*root, request.space.adapter));
  store::Match match;
  if (root != nullptr) match = store::match(root->top, key.all());
  const store::Found found =
      search(root, index, match, key, wanted, !index.texts().empty());
  hit.report = found.report;
  hit.report.computed = n - found.position;
  if (found.text == nullptr) return hit;
  const auto& held = found.text->held;
  hit.position = found.position;
  hit.text = std::shared_ptr<const StoredText>(held, &held->text());
  hit.features = store::features_at(*hit.text, hit.position);
  hit.final_hidden = store::final_hidden_at(*hit.text, hit.position);
  hit.id = found.text->id;
  return hit;
}

void CheckpointStore::Impl::count(const Hit& first, const Hit& answered,
                                  bool mispredicted) {
  if (!looked_up(first.report)) return;
  count_row(stats, first.report, first.limit, answered.report, mispredicted);
  count_row(index.root(first.space).counts, first.report, first.limit,
            answered.report, mispredicted);
  store::Text* text = index.find(answered.id);
  if (text == nullptr) return;
  const auto unit = text->variant.any ? text->units.begin()
                                      : text->units.find(answered.position);
  if (unit == text->units.end()) return;
  index.touch(*unit->second, now());
  set_expiry(*text);
}

Hit CheckpointStore::lookup(const LookupRequest& request) {
  Hit hit;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->expire();
    hit = impl_->find(request);
    if (!request.deferred) impl_->count(hit, hit, false);
  }
  impl_->events.deliver(impl_->mutex);
  return hit;
}

void CheckpointStore::settle(const Hit& hit) {
  const std::lock_guard lock(impl_->mutex);
  impl_->count(hit, hit, false);
}

void CheckpointStore::settle(const Hit& guess, const Hit& answered) {
  const std::lock_guard lock(impl_->mutex);
  impl_->count(guess, answered, true);
}

}  // namespace kvcache
