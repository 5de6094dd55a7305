#include "stored_text.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "kv_format.h"

namespace kvcache {
namespace {

void write(std::ostream& out, const LayerSpec& layer) {
  if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
    out << ";a" << attention->heads << ',' << attention->head_dim << ','
        << attention->sliding << ',' << attention->sinks;
    return;
  }
  const auto& recurrent = std::get<RecurrentLayer>(layer);
  out << ";r" << recurrent.conv_channels << ',' << recurrent.conv_taps;
  for (const int64_t size : recurrent.state_shape) out << ',' << size;
}

bool has_conv(const std::vector<LayerSpec>& layers) {
  return std::any_of(layers.begin(), layers.end(), [](const LayerSpec& layer) {
    const auto* recurrent = std::get_if<RecurrentLayer>(&layer);
    return recurrent != nullptr && recurrent->conv_channels > 0;
  });
}

void write(std::ostream& out, int64_t first_layer,
           const std::vector<LayerSpec>& layers, at::ScalarType dtype,
           KvFormat format, at::ScalarType conv_dtype) {
  out << '[' << first_layer << ':' << c10::toString(dtype);
  if (format != KvFormat::kPlain) out << '/' << format_text(format);
  if (has_conv(layers)) out << ':' << c10::toString(conv_dtype);
  for (const LayerSpec& layer : layers) write(out, layer);
  out << ']';
}

bool recurrent(const LayerSpec& layer) {
  return std::holds_alternative<RecurrentLayer>(layer);
}

size_t attention_layers(const Checkpoint& part) {
  return part.layers.size() -
         std::count_if(part.layers.begin(), part.layers.end(), recurrent);
}

}  // namespace

std::string layout_of(std::span<const CacheSpec> parts) {
  std::ostringstream out;
  for (const CacheSpec& part : parts) {
    write(out, part.first_layer, part.layers, part.dtype, part.kv_format,
          part.conv_dtype.value_or(part.dtype));
  }
  return out.str();
}

namespace store {
namespace {

void check_blocks(const Checkpoint& part) {
  const size_t layers = attention_layers(part);
  TORCH_CHECK_VALUE(
      part.kv.empty(),
      "[CheckpointStore::put] K and V must be in blocks but got whole rows; "
      "take checkpoint(row, BlockOptions).");
  int64_t end = 0;
  for (const auto& block : part.blocks) {
    TORCH_CHECK_VALUE(block != nullptr && block->first == end &&
                          block->tokens > 0 && block->kv.size() == layers,
                      "[CheckpointStore::put] blocks must follow each other "
                      "and hold every attention layer but token ",
                      end, " is not the first of such a one.");
    end += block->tokens;
  }
  TORCH_CHECK_VALUE(end == part.length || (layers == 0 && end == 0),
                    "[CheckpointStore::put] blocks must hold ", part.length,
                    " tokens but hold ", end, ".");
}

void check_points(const Checkpoint& part) {
  int64_t previous = 0;
  for (const auto& point : part.points) {
    TORCH_CHECK_VALUE(point != nullptr && point->position > previous &&
                          point->position <= part.length,
                      "[CheckpointStore::put] restore points must ascend "
                      "within (0, ",
                      part.length, "] but one behind ", previous, " does not.");
    previous = point->position;
  }
}

void check_extras(const StoredText& text, int64_t tokens) {
  int64_t previous = 0;
  for (const PointExtras& extras : text.extras) {
    TORCH_CHECK_VALUE(extras.position > previous && extras.position <= tokens,
                      "[CheckpointStore::put] positions of extras must ascend "
                      "within (0, ",
                      tokens, "] but got ", extras.position, " behind ",
                      previous, ".");
    previous = extras.position;
  }
  int64_t end = 0;
  for (const auto& [first, last] : text.decoded) {
    TORCH_CHECK_VALUE(first >= end && last >= first && last <= tokens,
                      "[CheckpointStore::put] decoded ranges must ascend "
                      "within [0, ",
                      tokens, "] but got [", first, ", ", last, ").");
    end = last;
  }
}

const PointExtras* extras_at(const StoredText& text, int64_t position) {
  const auto at = std::lower_bound(
      text.extras.begin(), text.extras.end(), position,
      [](const PointExtras& a, int64_t b) { return a.position < b; });
  return at != text.extras.end() && at->position == position ? &*at : nullptr;
}

bool needs_features(const StoredText& text) {
  return std::any_of(text.extras.begin(), text.extras.end(),
                     [](const PointExtras& e) { return e.features.defined(); });
}

bool has_point(const Checkpoint& part, int64_t position) {
  return std::any_of(
      part.points.begin(), part.points.end(),
      [position](const auto& point) { return point->position == position; });
}

bool has_states(const Checkpoint& part) {
  return std::any_of(part.layers.begin(), part.layers.end(), recurrent);
}

// Positions that a part with states, or the router's features, offer.
std::vector<int64_t> offered(const StoredText& text) {
  std::vector<int64_t> positions;
  for (const Checkpoint& part : text.parts) {
    if (!has_states(part)) continue;
    for (const auto& point : part.points) positions.push_back(point->position);
    return positions;
  }
  for (const PointExtras& extras : text.extras) {
    positions.push_back(extras.position);
  }
  return positions;
}

bool usable(const StoredText& text, int64_t position, bool features) {
  return position % text.restore_multiple == 0 &&
         std::all_of(text.parts.begin(), text.parts.end(),
                     [position](const Checkpoint& part) {
                       return !has_states(part) || has_point(part, position);
                     }) &&
         (!features || features_at(text, position).defined());
}

// The same positions of [0, end) were decoded.
bool same_decoded(const StoredText& a, const StoredText& b, int64_t end) {
  const auto clipped = [end](const StoredText& text) {
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (const auto& [first, last] : text.decoded) {
      if (first < std::min(last, end)) {
        ranges.emplace_back(first, std::min(last, end));
      }
    }
    return ranges;
  };
  return clipped(a) == clipped(b);
}

void share_part(const StoredText& from, const Checkpoint& source, int64_t same,
                const StoredText& text, Checkpoint& to) {
  const size_t blocks = std::min(source.blocks.size(), to.blocks.size());
  for (size_t i = 0; i < blocks; ++i) {
    const KvBlock& mine = *to.blocks[i];
    const KvBlock& other = *source.blocks[i];
    const int64_t end = mine.first + mine.tokens;
    if (end > same || mine.first != other.first ||
        mine.tokens != other.tokens) {
      break;
    }
    if (to.blocks[i] != source.blocks[i] && same_decoded(text, from, end)) {
      to.blocks[i] = source.blocks[i];
    }
  }
  for (auto& point : to.points) {
    const int64_t position = point->position;
    for (const auto& other : source.points) {
      if (other->position == position && position <= same &&
          same_decoded(text, from, position)) {
        point = other;
      }
    }
  }
}

}  // namespace

void check_text(const StoredText& text, int64_t tokens) {
  TORCH_CHECK_VALUE(!text.parts.empty(),
                    "[CheckpointStore::put] a text must have a part but got "
                    "none; make() returns checkpoints of the caches.");
  TORCH_CHECK_VALUE(text.restore_multiple >= 1,
                    "[CheckpointStore::put] restore_multiple must be >= 1 but "
                    "got ",
                    text.restore_multiple, ".");
  for (const Checkpoint& part : text.parts) {
    TORCH_CHECK_VALUE(part.length == tokens,
                      "[CheckpointStore::put] every part must have the ",
                      tokens, " tokens of the request but got ", part.length,
                      "; take the checkpoints at that length.");
    check_blocks(part);
    check_points(part);
  }
  check_extras(text, tokens);
}

bool has_states(const StoredText& text) {
  return std::any_of(text.parts.begin(), text.parts.end(),
                     [](const Checkpoint& part) { return has_states(part); });
}

bool restores_any(const StoredText& text) {
  return !has_states(text) && !needs_features(text);
}

std::vector<int64_t> usable_positions(const StoredText& text) {
  if (restores_any(text)) {
    const int64_t length = text.parts.front().length;
    const int64_t last = length - length % text.restore_multiple;
    return last > 0 ? std::vector<int64_t>{last} : std::vector<int64_t>{};
  }
  std::vector<int64_t> positions = offered(text);
  const bool features = needs_features(text);
  std::erase_if(positions, [&](int64_t position) {
    return !usable(text, position, features);
  });
  return positions;
}

void keep(StoredText& text, std::span<const int64_t> positions) {
  const int64_t end = positions.back();
  const auto unwanted = [&](int64_t position) {
    return !std::binary_search(positions.begin(), positions.end(), position);
  };
  const bool any = restores_any(text);
  for (Checkpoint& part : text.parts) {
    std::erase_if(part.points,
                  [&](const auto& point) { return unwanted(point->position); });
    std::erase_if(part.blocks,
                  [end](const auto& block) { return block->first >= end; });
    part.length = part.blocks.empty()
                      ? end
                      : part.blocks.back()->first + part.blocks.back()->tokens;
  }
  std::erase_if(text.extras, [&](const PointExtras& extras) {
    return any ? extras.position > end : unwanted(extras.position);
  });
}

void share(StoredText& text, const StoredText& with, int64_t same,
           bool first_part) {
  const size_t parts = std::min(text.parts.size(), with.parts.size());
  for (size_t i = first_part ? 0 : 1; i < (first_part ? 1 : parts); ++i) {
    share_part(with, with.parts[i], same, text, text.parts[i]);
  }
}

int64_t decoded_before(const StoredText& text, int64_t position) {
  int64_t count = 0;
  for (const auto& [first, last] : text.decoded) {
    count += std::max<int64_t>(0, std::min(last, position) - first);
  }
  return count;
}

Tensor final_hidden_at(const StoredText& text, int64_t position) {
  const PointExtras* extras = extras_at(text, position);
  return extras == nullptr ? Tensor() : extras->final_hidden;
}

Tensor features_at(const StoredText& text, int64_t position) {
  const PointExtras* extras = extras_at(text, position);
  return extras == nullptr ? Tensor() : extras->features;
}

std::string layout_of_text(const StoredText& text) {
  std::ostringstream out;
  for (const Checkpoint& part : text.parts) {
    const bool conv = !part.points.empty() && part.points[0]->conv.defined();
    write(out, part.first_layer, part.layers, part.dtype, part.format,
          conv ? part.points[0]->conv.scalar_type() : part.dtype);
  }
  return out.str();
}

}  // namespace store
}  // namespace kvcache
