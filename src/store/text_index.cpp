#include "text_index.h"

#include <algorithm>

#include "stored_text.h"

namespace kvcache::store {
namespace {

constexpr size_t kMostRoots = 1024;  // empty ones go then, statistics included
// Of removed checkpoints, 4 bytes each at most.
constexpr int64_t kMostRememberedKeys = int64_t{1} << 22;

Rank rank_of(const Unit& unit) {
  return {unit.text->priority, unit.score, unit.order};
}

// What one more use of a checkpoint saves: tokens from the one before it on.
int64_t position_before(const Unit& unit) {
  int64_t before = unit.depth;
  for (const Node* node = unit.node; node != nullptr; node = node->parent) {
    for (auto at = node->slots.rbegin(); at != node->slots.rend(); ++at) {
      const Unit& other = *at->second;
      if (other.depth < before && other.text != nullptr &&
          other.variant == unit.variant) {
        return other.position;
      }
    }
    before = node->start + 1;  // what leaves there, begins behind it
  }
  return 0;
}

std::vector<int64_t> positions_of(const Text& text) {
  std::vector<int64_t> positions;
  for (const auto& [position, unit] : text.units) positions.push_back(position);
  return positions;
}

}  // namespace

std::string encode_root(const Namespace& space) {
  std::string key;
  for (const std::string* part : {&space.tenant, &space.model, &space.base}) {
    key += std::to_string(part->size()) + ':' + *part;
  }
  return key;
}

int32_t adapter_key(const Root& root, const std::string& adapter) {
  if (adapter.empty()) return 0;
  const auto at = root.adapters.find(adapter);
  return at == root.adapters.end() ? Key::kUnknown : at->second;
}

int32_t add_adapter(Root& root, const std::string& adapter) {
  if (adapter.empty()) return 0;
  const auto next = -1 - static_cast<int32_t>(root.adapters.size());
  return root.adapters.emplace(adapter, next).first->second;
}

int32_t Names::find(const std::string& name) const {
  const auto at = numbers_.find(name);
  return at == numbers_.end() ? -1 : at->second;
}

int32_t Names::add(const std::string& name) {
  const auto next = static_cast<int32_t>(names_.size());
  const auto [at, added] = numbers_.emplace(name, next);
  if (added) names_.push_back(name);
  return at->second;
}

Root* TextIndex::find_root(const Namespace& space) const {
  const auto at = roots_.find(encode_root(space));
  return at == roots_.end() ? nullptr : at->second.get();
}

Root& TextIndex::root(const Namespace& space) {
  if (Root* found = find_root(space)) return *found;
  if (roots_.size() >= kMostRoots) drop_empty_roots();
  auto made = std::make_unique<Root>();
  made->space = space;
  made->space.adapter.clear();
  made->space.active_from = 0;
  return *(roots_[encode_root(space)] = std::move(made));
}

void TextIndex::drop_empty_roots() {
  for (auto at = roots_.begin(); at != roots_.end();) {
    const Root& root = *at->second;
    if (root.top.texts == 0 && root.makers == 0 && !root.quota) {
      forget(&root);
      at = roots_.erase(at);
    } else {
      ++at;
    }
  }
}

Unit& TextIndex::slot_for(Text& text, int64_t depth) {
  Node& node = holder(*text.end, depth);
  auto& slot = node.slots[{depth, text.variant}];
  if (slot != nullptr) unlist(*slot);  // was removed, is back
  slot = std::make_unique<Unit>(Unit{.text = &text,
                                     .root = text.root,
                                     .node = &node,
                                     .depth = depth,
                                     .variant = text.variant});
  return *slot;
}

Text& TextIndex::add(std::unique_ptr<Text> made, const Key& key,
                     std::span<const int64_t> positions, double now) {
  Text& text = *made;
  text.id = next_id_++;
  text.end = &reach(text.root->top, key.up_to(positions.back()));
  text.depth = key.depth(positions.back());
  texts_.emplace(text.id, std::move(made));
  enter(*text.end, text.depth, text, text.variant);
  balance(*text.end);
  for (const int64_t position : positions) {
    Unit& unit = slot_for(text, key.depth(position));
    unit.position = position;
    unit.used_at = now;
    text.units.emplace(position, &unit);
    ++units_;
  }
  for (const auto& [position, unit] : text.units) rank(*unit);
  return text;
}

void TextIndex::rank(Unit& unit) {
  unit.order = next_order_++;
  if (unit.text->pinned) return;
  unit.score = policy_ == EvictionPolicy::kLru ? static_cast<double>(unit.order)
                                               : cost_score(unit);
  ranks_.emplace(rank_of(unit), &unit);
  unit.root->ranks.emplace(rank_of(unit), &unit);
}

void TextIndex::unrank(Unit& unit) {
  ranks_.erase(rank_of(unit));
  unit.root->ranks.erase(rank_of(unit));
}

// Greedy dual size frequency: what is evicted sets the age that later ones
// start from, so that nothing stays for what it once was good for.
double TextIndex::cost_score(const Unit& unit) const {
  const Text& text = *unit.text;
  const bool last = text.units.rbegin()->second == &unit;
  const auto at = text.units.find(unit.position);
  const int64_t before =
      at == text.units.begin() ? 0 : std::prev(at)->second->position;
  size_t bytes = account_->sole(storages_at(text.text(), unit.position));
  int64_t tokens = unit.variant.any ? 0 : unit.position - position_before(unit);
  for (size_t part = 0; last && part < text.text().parts.size(); ++part) {
    for (const auto& block : text.text().parts[part].blocks) {
      if (block->first < before) continue;
      const size_t sole = account_->sole(*block);
      bytes += sole;
      if (unit.variant.any && part == 0 && sole > 0) tokens += block->tokens;
    }
  }
  return age_ + static_cast<double>(unit.uses * tokens) /
                    static_cast<double>(std::max<size_t>(bytes, 1));
}

void TextIndex::touch(Unit& unit, double now) {
  unrank(unit);
  ++unit.uses;
  unit.used_at = now;
  rank(unit);
}

void TextIndex::set_retention(Text& text, int priority, bool pinned) {
  for (const auto& [position, unit] : text.units) unrank(*unit);
  text.priority = priority;
  text.pinned = pinned;
  // In the order that they had among themselves.
  std::vector<Unit*> units;
  for (const auto& [position, unit] : text.units) units.push_back(unit);
  std::sort(units.begin(), units.end(),
            [](const Unit* a, const Unit* b) { return a->order < b->order; });
  for (Unit* unit : units) rank(*unit);
}

void TextIndex::remove(Unit& unit, bool remembers) {
  Text& text = *unit.text;
  unrank(unit);
  --units_;
  text.units.erase(unit.position);
  unit.text = nullptr;
  if (!remembers) unit.node->slots.erase({unit.depth, unit.variant});
  if (text.units.empty()) {
    detach(text);
  } else {
    shorten(text);
  }
  if (remembers) remember(unit);
}

void TextIndex::remove(Text& text, bool remembers) {
  for (auto left = text.units.size(); left > 0; --left) {
    remove(*text.units.rbegin()->second, remembers);
  }
}

void TextIndex::shorten(Text& text) {
  StoredText rest = text.text();
  keep(rest, positions_of(text));
  text.held = std::make_shared<const HeldText>(std::move(rest), account_,
                                               text.root->ledger, 0);
  const int64_t depth = text.units.rbegin()->second->depth;
  if (depth == text.depth) return;
  Node& old = *text.end;
  leave(old, text.depth, text, text.variant);
  text.end = &holder(old, depth);
  text.depth = depth;
  enter(*text.end, depth, text, text.variant);
  prune(old);
}

void TextIndex::detach(Text& text) {
  Node& end = *text.end;
  leave(end, text.depth, text, text.variant);
  prune(end);
  texts_.erase(text.id);
}

void TextIndex::remember(Unit& unit) {
  remembered_.push_back(&unit);
  remembered_keys_ += unit.depth;
  unit.remembered = std::prev(remembered_.end());
  while (static_cast<int64_t>(remembered_.size()) > most_remembered_ ||
         remembered_keys_ > kMostRememberedKeys) {
    forget(*remembered_.front());
  }
}

void TextIndex::unlist(const Unit& unit) {
  remembered_keys_ -= unit.depth;
  remembered_.erase(unit.remembered);
}

void TextIndex::forget(Unit& unit) {
  Node& node = *unit.node;
  unlist(unit);
  node.slots.erase({unit.depth, unit.variant});
  prune(node);
}

void TextIndex::forget(const Root* root) {
  for (auto at = remembered_.begin(); at != remembered_.end();) {
    Unit& unit = **at++;
    if (root == nullptr || unit.root == root) forget(unit);
  }
}

void TextIndex::clear() {
  ranks_.clear();
  texts_.clear();
  remembered_.clear();
  remembered_keys_ = 0;
  units_ = 0;
  for (auto& [key, root] : roots_) {
    root->ranks.clear();
    root->top.branches.clear();
    root->top.passing.clear();
    root->top.texts = 0;
    root->adapters.clear();
  }
}

Unit* TextIndex::victim(const Root* root, bool leased) const {
  for (const auto& [rank, unit] : root == nullptr ? ranks_ : root->ranks) {
    if (leased || !unit->text->leased()) return unit;
  }
  return nullptr;
}

Text* TextIndex::find(uint64_t id) const {
  const auto at = texts_.find(id);
  return at == texts_.end() ? nullptr : at->second.get();
}

Unit* TextIndex::known(const Match& match, const Key& key, int64_t position,
                       int32_t route, uint64_t generation,
                       std::optional<int32_t> layout) const {
  const int64_t depth = key.depth(position);
  if (depth > match.depth) return nullptr;
  const auto fits = [&](const Variant& variant) {
    return variant.route == route && variant.generation == generation &&
           (!layout || variant.layout == *layout);
  };
  const auto at = std::find_if(
      match.path.begin(), match.path.end(),
      [depth](const Stretch& stretch) { return stretch.depth >= depth; });
  for (const auto& [slot, unit] : at->node->slots) {
    if (slot.first == depth && unit->text != nullptr && fits(slot.second)) {
      return unit.get();
    }
  }
  for (const auto& [variant, exits] : at->node->passing) {
    const Exit& deepest = *exits.rbegin();
    if (variant.any && fits(variant) && deepest.depth >= depth &&
        position % variant.multiple == 0) {
      return deepest.text->units.begin()->second;
    }
  }
  return nullptr;
}

}  // namespace kvcache::store
