// Names and JSON of what a store tells.
#include "kvcache/store_events.h"

#include <cstdio>
#include <iomanip>
#include <sstream>

#include "kvcache/checkpoint_store.h"

namespace kvcache {
namespace {

void write_text(std::ostream& out, const std::string& text) {
  out << '"';
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      out << '\\' << letter;
    } else if (code < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      out << escaped;
    } else {
      out << letter;
    }
  }
  out << '"';
}

template <class T>
void write_list(std::ostream& out, const std::vector<T>& values) {
  out << '[';
  for (size_t i = 0; i < values.size(); ++i) {
    out << (i == 0 ? "" : ",") << values[i];
  }
  out << ']';
}

void write_name(std::ostream& out, const char* key, const std::string& name) {
  out << ",\"" << key << "\":";
  if (name.empty()) {
    out << "null";
  } else {
    write_text(out, name);
  }
}

void write_stored_block(std::ostream& out, const StoreEvent& event) {
  out << ",\"parent_block_hash\":";
  if (event.parent_block_hash) {
    out << *event.parent_block_hash;
  } else {
    out << "null";
  }
  out << ",\"token_ids\":";
  write_list(out, event.token_ids);
  out << ",\"block_size\":" << event.block_size;
  write_name(out, "lora_name", event.lora_name);
}

}  // namespace

std::string_view to_string(StoreEventType type) noexcept {
  switch (type) {
    case StoreEventType::kBlockStored:
      return "BlockStored";
    case StoreEventType::kBlockRemoved:
      return "BlockRemoved";
    case StoreEventType::kAllBlocksCleared:
      return "AllBlocksCleared";
    case StoreEventType::kCheckpointStored:
      return "CheckpointStored";
    case StoreEventType::kCheckpointRemoved:
      return "CheckpointRemoved";
  }
  return "";
}

std::string to_json(const StoreEvent& event) {
  std::ostringstream out;
  out << std::setprecision(15) << "{\"type\":\"" << to_string(event.type)
      << "\",\"seq\":" << event.sequence << ",\"ts\":" << event.ts;
  switch (event.type) {
    case StoreEventType::kBlockStored:
    case StoreEventType::kBlockRemoved:
      out << ",\"block_hashes\":";
      write_list(out, event.block_hashes);
      if (event.type == StoreEventType::kBlockStored) {
        write_stored_block(out, event);
      }
      write_name(out, "medium", event.medium);
      out << ",\"group_idx\":" << event.group_idx;
      break;
    case StoreEventType::kCheckpointStored:
      out << ",\"position\":" << event.position << ",\"bytes\":" << event.bytes;
      write_name(out, "lora_name", event.lora_name);
      break;
    case StoreEventType::kCheckpointRemoved:
      out << ",\"position\":" << event.position;
      write_name(out, "lora_name", event.lora_name);
      break;
    case StoreEventType::kAllBlocksCleared:
      break;
  }
  out << '}';
  return out.str();
}

std::string_view to_string(ReuseReason reason) noexcept {
  switch (reason) {
    case ReuseReason::kAll:
      return "all";
    case ReuseReason::kNoEntry:
      return "no_entry";
    case ReuseReason::kNamespace:
      return "namespace";
    case ReuseReason::kRoute:
      return "route";
    case ReuseReason::kGeneration:
      return "generation";
    case ReuseReason::kTokensDiverge:
      return "tokens_diverge";
    case ReuseReason::kNoCheckpointBefore:
      return "no_checkpoint_before";
    case ReuseReason::kEvicted:
      return "evicted";
    case ReuseReason::kTooShort:
      return "too_short";
    case ReuseReason::kNotEligible:
      return "not_eligible";
    case ReuseReason::kDtypeOrLayout:
      return "dtype_or_layout";
    case ReuseReason::kDisabled:
      return "disabled";
  }
  return "";
}

std::string_view to_string(PutResult result) noexcept {
  switch (result) {
    case PutResult::kStored:
      return "stored";
    case PutResult::kRefreshed:
      return "refreshed";
    case PutResult::kDisabled:
      return "disabled";
    case PutResult::kTooShort:
      return "too_short";
    case PutResult::kOversize:
      return "oversize";
    case PutResult::kNoRoom:
      return "no_room";
    case PutResult::kUnusable:
      return "unusable";
    case PutResult::kOvertaken:
      return "overtaken";
  }
  return "";
}

}  // namespace kvcache
