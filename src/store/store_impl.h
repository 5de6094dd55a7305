// What the parts of CheckpointStore share.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "event_log.h"
#include "kvcache/checkpoint_store.h"
#include "text_index.h"

namespace kvcache {

// Everything is guarded by `mutex`, the account apart.
struct CheckpointStore::Impl {
  enum class Why : uint8_t { kEvicted, kExpired, kInvalidated, kAbsorbed };

  explicit Impl(StoreOptions from);

  // put.cpp
  PutResult put(const PutRequest& request,
                const std::function<StoredText()>& make);
  std::optional<PutResult> refuse(const PutRequest& request, store::Root& root);
  PutResult insert(const PutRequest& request, const store::Key& key,
                   store::Root& root, StoredText text, size_t& promised);
  void add(const PutRequest& request, const store::Key& key, store::Root& root,
           StoredText text, const store::Variant& variant,
           std::span<const int64_t> positions, size_t& promised);
  store::Unit* known(const PutRequest& request, const store::Key& key,
                     store::Root& root);
  void refresh(store::Unit& unit, const PutRequest& request);
  bool pin(store::Text& text);  // false: over the bound

  // eviction.cpp
  size_t quota(const store::Root& root) const;
  size_t pinned_bound() const;
  bool make_room(store::Root& root, size_t bytes);
  bool evict_one(const store::Root* root, bool leased);
  void remove(store::Unit& unit, Why why);
  void remove(store::Text& text, Why why);
  int64_t invalidate(const std::vector<store::Text*>& texts);
  void expire();
  void set_expiry(store::Text& text);

  // lookups
  Hit find(const LookupRequest& request);
  void count(const Hit& first, const Hit& answered, bool mispredicted);
  double now() const;

  mutable std::mutex mutex;
  StoreOptions options;
  std::shared_ptr<store::ByteAccount> account;
  store::TextIndex index;
  store::EventLog events;
  StoreStats stats;
  std::set<std::pair<double, uint64_t>> expiries;  // of texts, by id
  size_t pinned_bytes = 0;
  uint64_t epoch = 0;  // of clear() and invalidate
};

}  // namespace kvcache
