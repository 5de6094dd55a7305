#include "event_log.h"

#include <algorithm>

namespace kvcache::store {
namespace {

// splitmix64's finaliser
uint64_t mixed(uint64_t hash, uint64_t value) {
  uint64_t x = hash + 0x9e3779b97f4a7c15U + value;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0;
  for (const char letter : text) {
    hash = mixed(hash, static_cast<unsigned char>(letter));
  }
  return hash;
}

uint64_t hash_of(uint64_t parent, std::span<const int32_t> keys) {
  uint64_t hash = parent;
  for (const int32_t key : keys) {
    hash = mixed(hash, static_cast<uint32_t>(key));
  }
  return hash;
}

std::string medium_of(const KvBlock& block) {
  return block.kv.empty()
             ? "cpu"
             : c10::DeviceTypeName(block.kv.front().k.device().type(), true);
}

}  // namespace

std::string adapter_name(const Text& text, const std::string& route) {
  return text.adapter.empty() ? route : text.adapter;
}

StoreEvent& EventLog::push(StoreEventType type, double now) {
  waiting_.push_back({.type = type, .sequence = ++sequence_, .ts = now});
  return waiting_.back();
}

void EventLog::publish(const Text& text, int64_t group, const std::string& name,
                       std::span<const int64_t> tokens, const Key& key,
                       double now) {
  uint64_t hash = mixed(hash_of(encode_root(text.root->space) + name),
                        static_cast<uint64_t>(group));
  StoreEvent* event = nullptr;  // that takes the next block as well
  for (const auto& block : text.text().parts[group].blocks) {
    const int64_t last = std::min<int64_t>(block->first + block->tokens,
                                           static_cast<int64_t>(tokens.size()));
    const int64_t from = key.depth(block->first);
    const uint64_t parent = hash;
    hash = hash_of(hash, key.all().subspan(from, key.depth(last) - from));
    Published& published = published_[block.get()];
    if (published.texts++ > 0) {  // told already
      hash = published.hash;
      event = nullptr;
      continue;
    }
    published.hash = hash;
    published.group = group;
    published.medium = medium_of(*block);
    if (event == nullptr || event->block_size != block->tokens) {
      event = &push(StoreEventType::kBlockStored, now);
      if (block->first > 0) event->parent_block_hash = parent;
      event->block_size = block->tokens;
      event->lora_name = name;
      event->medium = published.medium;
      event->group_idx = group;
    }
    event->block_hashes.push_back(hash);
    event->token_ids.insert(event->token_ids.end(),
                            tokens.begin() + block->first,
                            tokens.begin() + last);
  }
}

void EventLog::stored(const Text& text, const std::string& route,
                      std::span<const int64_t> tokens, const Key& key,
                      double now) {
  if (!sink_) return;
  const std::string name = adapter_name(text, route);
  for (size_t group = 0; group < text.text().parts.size(); ++group) {
    publish(text, static_cast<int64_t>(group), name, tokens, key, now);
  }
  for (const auto& [position, unit] : text.units) {
    StoreEvent& event = push(StoreEventType::kCheckpointStored, now);
    event.position = position;
    event.bytes = bytes_of(storages_at(text.text(), position));
    event.lora_name = name;
  }
}

void EventLog::reduced(const StoredText& before, const StoredText* after,
                       double now) {
  if (!sink_) return;
  for (size_t part = 0; part < before.parts.size(); ++part) {
    const size_t left = after == nullptr ? 0 : after->parts[part].blocks.size();
    StoreEvent* event = nullptr;
    const KvBlocks& blocks = before.parts[part].blocks;
    for (size_t i = blocks.size(); i > left; --i) {
      const auto at = published_.find(blocks[i - 1].get());
      if (--at->second.texts > 0) continue;
      if (event == nullptr) {
        event = &push(StoreEventType::kBlockRemoved, now);
        event->group_idx = at->second.group;
        event->medium = at->second.medium;
      }
      event->block_hashes.push_back(at->second.hash);
      published_.erase(at);
    }
  }
}

void EventLog::removed(int64_t position, const std::string& name, double now) {
  if (!sink_) return;
  StoreEvent& event = push(StoreEventType::kCheckpointRemoved, now);
  event.position = position;
  event.lora_name = name;
}

void EventLog::cleared(double now) {
  if (!sink_) return;
  published_.clear();
  push(StoreEventType::kAllBlocksCleared, now);
}

void EventLog::deliver(std::mutex& store) {
  if (!sink_) return;
  std::unique_lock lock(store);
  if (delivering_) return;  // that thread tells them too
  delivering_ = true;
  while (!waiting_.empty()) {
    const StoreEvent event = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    try {
      sink_(event);
    } catch (...) {
      lock.lock();
      delivering_ = false;
      throw;
    }
    lock.lock();
  }
  delivering_ = false;
}

}  // namespace kvcache::store
