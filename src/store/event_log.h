// Events as they come to be under the store's lock, told without it.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "text_index.h"

namespace kvcache::store {

// What is told of one text: hashes of its blocks need its tokens once.
class EventLog {
 public:
  explicit EventLog(StoreEventSink sink) : sink_(std::move(sink)) {}

  // All but deliver() under the store's lock. Nothing is done without a sink.
  void stored(const Text& text, const std::string& route,
              std::span<const int64_t> tokens, const Key& key, double now);
  // A text holds less, or (null) nothing, of what it held.
  void reduced(const StoredText& before, const StoredText* after, double now);
  void removed(int64_t position, const std::string& name, double now);
  void cleared(double now);

  // Calls the sink in order, one thread at a time; a sink may use the store.
  void deliver(std::mutex& store);

 private:
  struct Published {
    int64_t texts = 0;
    uint64_t hash = 0;
    int64_t group = 0;
    std::string medium;
  };
  void publish(const Text& text, int64_t group, const std::string& name,
               std::span<const int64_t> tokens, const Key& key, double now);
  StoreEvent& push(StoreEventType type, double now);

  StoreEventSink sink_;
  std::unordered_map<const KvBlock*, Published> published_;
  std::deque<StoreEvent> waiting_;
  uint64_t sequence_ = 0;
  bool delivering_ = false;
};

// The adapter of a text, or else its route.
std::string adapter_name(const Text& text, const std::string& route);

}  // namespace kvcache::store
