// kvcache/store_events.h - what a CheckpointStore tells as it changes, in the
// names of vLLM's KV events, so that routers and viewers made for those read
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvcache {

enum class StoreEventType : uint8_t {
  kBlockStored,        // K/V of block_size or fewer tokens can be reused now
  kBlockRemoved,       // and now no more
  kAllBlocksCleared,   // nothing is there any more
  kCheckpointStored,   // ours: a place to restore
  kCheckpointRemoved,  // ours
};
// "BlockStored", ...
std::string_view to_string(StoreEventType type) noexcept;

struct StoreEvent {
  StoreEventType type = StoreEventType::kBlockStored;
  uint64_t sequence = 0;  // from 1 on, without a gap
  double ts = 0;          // seconds of the store's clock
  // Each stands for all tokens up to its block's end, namespace included.
  std::vector<uint64_t> block_hashes = {};
  std::optional<uint64_t> parent_block_hash = {};  // empty: from token 0
  std::vector<int64_t> token_ids = {};             // of the stored blocks
  int64_t block_size = 0;
  std::string lora_name = {};  // the adapter, or the route; empty: neither
  std::string medium = {};     // "cpu", "cuda", ...
  int64_t group_idx = 0;       // model part
  int64_t position = 0;        // of a checkpoint
  size_t bytes = 0;            // that it holds alone when it comes
};

// One line of JSON without the line end.
std::string to_json(const StoreEvent& event);

using StoreEventSink = std::function<void(const StoreEvent&)>;

}  // namespace kvcache
