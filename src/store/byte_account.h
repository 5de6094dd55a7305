// Bytes of the storages that a store keeps alive, each counted once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/checkpoint_store.h"

namespace kvcache::store {

struct StorageUse {
  const void* storage = nullptr;
  size_t bytes = 0;
};
// Of one text or a part of it, each storage once.
using StorageUses = std::vector<StorageUse>;

// Bytes of one namespace, written by the account only.
struct Ledger {
  size_t bytes = 0;
};

// Hits are dropped by any thread at any time, so it has a lock of its own,
// taken last. What is promised to a put counts as if it were there.
class ByteAccount {
 public:
  using LedgerPtr = std::shared_ptr<Ledger>;

  void promise(const LedgerPtr& ledger, size_t bytes);
  void take_back(const LedgerPtr& ledger, size_t bytes);
  // Counts `uses` in place of what was promised for them.
  void hold(const StorageUses& uses, const LedgerPtr& ledger, size_t promised);
  // Frees `text` and counts it no more, as one: no other storage can get the
  // address of a freed one in between.
  void release(StoredText& text, const StorageUses& uses);

  size_t total() const;
  size_t total(const Ledger& ledger) const;
  size_t missing(const StorageUses& uses) const;  // bytes not counted yet
  size_t sole(const StorageUses& uses) const;     // bytes that one text holds
  size_t sole(const KvBlock& block) const;

 private:
  struct Held {
    size_t bytes = 0;
    int64_t holders = 0;
    LedgerPtr ledger;
  };
  mutable std::mutex mutex_;
  std::unordered_map<const void*, Held> held_;
  size_t total_ = 0;
};

// A text whose storages count as long as it is there. Immutable.
class HeldText {
 public:
  HeldText(StoredText text, std::shared_ptr<ByteAccount> account,
           const std::shared_ptr<Ledger>& ledger, size_t promised);
  ~HeldText();
  HeldText(const HeldText&) = delete;
  HeldText& operator=(const HeldText&) = delete;

  const StoredText& text() const noexcept { return text_; }
  const StorageUses& uses() const noexcept { return uses_; }

 private:
  StoredText text_;
  StorageUses uses_;
  std::shared_ptr<ByteAccount> account_;
};

// Storages of a whole text, and of what one position alone needs of it.
StorageUses storages_of(const StoredText& text);
StorageUses storages_at(const StoredText& text, int64_t position);
size_t bytes_of(const StorageUses& uses);

}  // namespace kvcache::store
