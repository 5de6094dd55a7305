// How texts leave: for room, by age, on demand.
#include <algorithm>
#include <limits>

#include "store_impl.h"
#include "stored_text.h"

namespace kvcache {

using store::Root;
using store::Text;
using store::Unit;

size_t CheckpointStore::Impl::quota(const Root& root) const {
  const size_t bytes = root.quota.value_or(
      options.namespace_quota.value_or(std::numeric_limits<size_t>::max()));
  return std::min(bytes, options.max_bytes);
}

size_t CheckpointStore::Impl::pinned_bound() const {
  return std::min(options.max_pinned_bytes.value_or(options.max_bytes / 2),
                  options.max_bytes);
}

// Of one namespace until it keeps its quota, then of all.
bool CheckpointStore::Impl::make_room(Root& root, size_t bytes) {
  while (account->total(*root.ledger) + bytes > quota(root)) {
    if (!evict_one(&root, false)) return false;
  }
  while (account->total() + bytes > options.max_bytes) {
    if (!evict_one(nullptr, false)) return false;
  }
  return true;
}

bool CheckpointStore::Impl::evict_one(const Root* root, bool leased) {
  Unit* unit = index.victim(root, leased);
  if (unit == nullptr) return false;
  index.set_age(unit->score);
  remove(*unit, Why::kEvicted);
  return true;
}

void CheckpointStore::Impl::remove(Unit& unit, Why why) {
  Text& text = *unit.text;
  const bool last = text.units.size() == 1;
  const auto before = text.held;
  const int64_t position = unit.position;
  const std::string name =
      adapter_name(text, index.routes.name(text.variant.route));
  if (text.pinned && last) pinned_bytes -= store::bytes_of(before->uses());
  if (last && text.ttl) expiries.erase({text.expires, text.id});
  stats.evicted += why == Why::kEvicted ? 1 : 0;
  stats.expired += why == Why::kExpired ? 1 : 0;
  stats.invalidated += why == Why::kInvalidated ? 1 : 0;
  text.root->counts.evicted += why == Why::kEvicted ? 1 : 0;
  const auto pinned = text.pinned;
  index.remove(unit, why != Why::kAbsorbed);
  const double at = now();
  events.removed(position, name, at);
  events.reduced(before->text(), last ? nullptr : &text.text(), at);
  if (pinned && !last) {
    pinned_bytes -= store::bytes_of(before->uses());
    pinned_bytes += store::bytes_of(text.held->uses());
  }
}

void CheckpointStore::Impl::remove(Text& text, Why why) {
  for (auto left = text.units.size(); left > 0; --left) {
    remove(*text.units.rbegin()->second, why);
  }
}

void CheckpointStore::Impl::expire() {
  if (expiries.empty()) return;
  const double at = now();
  while (!expiries.empty() && expiries.begin()->first <= at) {
    remove(*index.find(expiries.begin()->second), Why::kExpired);
  }
}

void CheckpointStore::Impl::set_expiry(Text& text) {
  if (!text.ttl) return;
  expiries.erase({text.expires, text.id});
  text.expires = now() + *text.ttl;
  expiries.emplace(text.expires, text.id);
}

void CheckpointStore::set_max_bytes(size_t bytes) {
  {
    const std::lock_guard lock(impl_->mutex);
    Impl& impl = *impl_;
    impl.options.max_bytes = bytes;
    const auto over = [&] { return impl.account->total() > bytes; };
    while (over() && impl.evict_one(nullptr, false)) {
    }
    while (over() && impl.evict_one(nullptr, true)) {
    }
    while (over() && !impl.index.texts().empty()) {  // pinned ones
      impl.remove(*impl.index.texts().begin()->second, Impl::Why::kEvicted);
    }
  }
  impl_->events.deliver(impl_->mutex);
}

void CheckpointStore::set_quota(const Namespace& space,
                                std::optional<size_t> bytes) {
  {
    const std::lock_guard lock(impl_->mutex);
    Root& root = impl_->index.root(space);
    root.quota = bytes;
    while (impl_->account->total(*root.ledger) > impl_->quota(root) &&
           impl_->evict_one(&root, false)) {
    }
  }
  impl_->events.deliver(impl_->mutex);
}

}  // namespace kvcache
