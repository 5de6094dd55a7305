#include "byte_account.h"

#include <unordered_set>

namespace kvcache::store {
namespace {

class Collector {
 public:
  void add(const Tensor& tensor) {
    if (!tensor.defined()) return;
    const c10::Storage& storage = tensor.storage();
    const void* address = storage.unsafeGetStorageImpl();
    if (storage.nbytes() > 0 && seen_.insert(address).second) {
      uses_.push_back({.storage = address, .bytes = storage.nbytes()});
    }
  }
  void add(const KvBlock& block) {
    for (const KvTensors& pair : block.kv) {
      add(pair.k);
      add(pair.v);
    }
  }
  void add(const RestorePoint& point) {
    add(point.conv);
    add(point.state);
  }
  void add(const PointExtras& extras) {
    add(extras.features);
    add(extras.final_hidden);
  }
  StorageUses take() { return std::move(uses_); }

 private:
  std::unordered_set<const void*> seen_;
  StorageUses uses_;
};

}  // namespace

StorageUses storages_of(const StoredText& text) {
  Collector all;
  for (const Checkpoint& part : text.parts) {
    for (const auto& block : part.blocks) all.add(*block);
    for (const auto& point : part.points) all.add(*point);
  }
  for (const PointExtras& extras : text.extras) all.add(extras);
  return all.take();
}

StorageUses storages_at(const StoredText& text, int64_t position) {
  Collector some;
  for (const Checkpoint& part : text.parts) {
    for (const auto& point : part.points) {
      if (point->position == position) some.add(*point);
    }
  }
  for (const PointExtras& extras : text.extras) {
    if (extras.position == position) some.add(extras);
  }
  return some.take();
}

size_t bytes_of(const StorageUses& uses) {
  size_t sum = 0;
  for (const StorageUse& use : uses) sum += use.bytes;
  return sum;
}

void ByteAccount::promise(const LedgerPtr& ledger, size_t bytes) {
  const std::lock_guard lock(mutex_);
  total_ += bytes;
  ledger->bytes += bytes;
}

void ByteAccount::take_back(const LedgerPtr& ledger, size_t bytes) {
  const std::lock_guard lock(mutex_);
  total_ -= bytes;
  ledger->bytes -= bytes;
}

void ByteAccount::hold(const StorageUses& uses, const LedgerPtr& ledger,
                       size_t promised) {
  const std::lock_guard lock(mutex_);
  for (const StorageUse& use : uses) {
    Held& held = held_[use.storage];
    if (held.holders++ == 0) {
      held.bytes = use.bytes;
      held.ledger = ledger;
      total_ += use.bytes;
      ledger->bytes += use.bytes;
    }
  }
  total_ -= promised;
  ledger->bytes -= promised;
}

void ByteAccount::release(StoredText& text, const StorageUses& uses) {
  const std::lock_guard lock(mutex_);
  text = {};
  for (const StorageUse& use : uses) {
    const auto at = held_.find(use.storage);
    if (--at->second.holders == 0) {
      total_ -= at->second.bytes;
      at->second.ledger->bytes -= at->second.bytes;
      held_.erase(at);
    }
  }
}

size_t ByteAccount::total() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

size_t ByteAccount::total(const Ledger& ledger) const {
  const std::lock_guard lock(mutex_);
  return ledger.bytes;
}

size_t ByteAccount::missing(const StorageUses& uses) const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const StorageUse& use : uses) {
    if (!held_.contains(use.storage)) sum += use.bytes;
  }
  return sum;
}

size_t ByteAccount::sole(const StorageUses& uses) const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const StorageUse& use : uses) {
    const auto at = held_.find(use.storage);
    if (at != held_.end() && at->second.holders == 1) sum += use.bytes;
  }
  return sum;
}

size_t ByteAccount::sole(const KvBlock& block) const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  const void* previous = nullptr;  // mostly one storage for all
  for (const KvTensors& pair : block.kv) {
    for (const Tensor* tensor : {&pair.k, &pair.v}) {
      if (!tensor->defined()) continue;
      const void* storage = tensor->storage().unsafeGetStorageImpl();
      if (std::exchange(previous, storage) == storage) continue;
      const auto at = held_.find(storage);
      if (at != held_.end() && at->second.holders == 1) sum += at->second.bytes;
    }
  }
  return sum;
}

HeldText::HeldText(StoredText text, std::shared_ptr<ByteAccount> account,
                   const std::shared_ptr<Ledger>& ledger, size_t promised)
    : text_(std::move(text)),
      uses_(storages_of(text_)),
      account_(std::move(account)) {
  account_->hold(uses_, ledger, promised);
}

HeldText::~HeldText() { account_->release(text_, uses_); }

}  // namespace kvcache::store
