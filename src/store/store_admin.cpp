// Pins, invalidation, statistics.
#include <algorithm>

#include "store_impl.h"

namespace kvcache {

using store::Root;
using store::Text;

namespace {

// What an invalidation takes; it changes the index, so they are listed first.
template <class Takes>
std::vector<Text*> select(const store::TextIndex& index, const Takes& takes) {
  std::vector<Text*> texts;
  for (const auto& [id, text] : index.texts()) {
    if (takes(*text)) texts.push_back(text.get());
  }
  std::sort(texts.begin(), texts.end(),
            [](const Text* a, const Text* b) { return a->id < b->id; });
  return texts;
}

}  // namespace

bool CheckpointStore::pin(const Hit& hit, bool pinned) {
  const std::lock_guard lock(impl_->mutex);
  Text* text = impl_->index.find(hit.id);
  if (text == nullptr) return false;
  if (pinned) return impl_->pin(*text);
  if (text->pinned) {
    impl_->pinned_bytes -= store::bytes_of(text->held->uses());
    impl_->index.set_retention(*text, text->priority, false);
  }
  return true;
}

int64_t CheckpointStore::Impl::invalidate(const std::vector<Text*>& texts) {
  const int64_t before = index.units();
  ++epoch;
  for (Text* text : texts) remove(*text, Why::kInvalidated);
  return before - index.units();
}

int64_t CheckpointStore::invalidate_route(std::string_view route) {
  int64_t count = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    const int32_t number = impl_->index.routes.find(std::string(route));
    count = impl_->invalidate(select(impl_->index, [number](const Text& text) {
      return text.variant.route == number;
    }));
  }
  impl_->events.deliver(impl_->mutex);
  return count;
}

int64_t CheckpointStore::invalidate_namespace(const Namespace& space) {
  int64_t count = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    const Root* root = impl_->index.find_root(space);
    count = impl_->invalidate(select(impl_->index, [&](const Text& text) {
      return text.root == root &&
             (space.adapter.empty() || text.adapter == space.adapter);
    }));
    if (root != nullptr && space.adapter.empty()) impl_->index.forget(root);
  }
  impl_->events.deliver(impl_->mutex);
  return count;
}

int64_t CheckpointStore::invalidate_generations_before(uint64_t generation) {
  int64_t count = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    count =
        impl_->invalidate(select(impl_->index, [generation](const Text& text) {
          return text.variant.generation < generation;
        }));
  }
  impl_->events.deliver(impl_->mutex);
  return count;
}

void CheckpointStore::clear() {
  {
    const std::lock_guard lock(impl_->mutex);
    ++impl_->epoch;
    impl_->index.clear();
    impl_->expiries.clear();
    impl_->pinned_bytes = 0;
    impl_->events.cleared(impl_->now());
  }
  impl_->events.deliver(impl_->mutex);
}

StoreStats CheckpointStore::stats() const {
  const std::lock_guard lock(impl_->mutex);
  StoreStats stats = impl_->stats;
  stats.max_bytes = impl_->options.max_bytes;
  stats.used_bytes = impl_->account->total();
  stats.pinned_bytes = impl_->pinned_bytes;
  stats.checkpoints = impl_->index.units();
  stats.groups = static_cast<int64_t>(impl_->index.texts().size());
  return stats;
}

NamespaceStats CheckpointStore::stats(const Namespace& space) const {
  const std::lock_guard lock(impl_->mutex);
  const Root* root = impl_->index.find_root(space);
  if (root == nullptr) return {};
  NamespaceStats stats = root->counts;
  stats.used_bytes = impl_->account->total(*root->ledger);
  stats.quota = root->quota ? root->quota : impl_->options.namespace_quota;
  for (const auto& [id, text] : impl_->index.texts()) {
    if (text->root != root) continue;
    ++stats.groups;
    stats.checkpoints += static_cast<int64_t>(text->units.size());
  }
  return stats;
}

}  // namespace kvcache
