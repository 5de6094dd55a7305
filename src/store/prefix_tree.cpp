#include "prefix_tree.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "text_index.h"

namespace kvcache::store {
namespace {

// The lower part stays the same object, so that texts that end there need not
// be told.
Node& split(Node& lower, int64_t depth) {
  auto made = std::make_unique<Node>();
  Node& upper = *made;
  Node& parent = *lower.parent;
  const auto cut = lower.edge.begin() + (depth - lower.start());
  upper.parent = &parent;
  upper.end = depth;
  upper.edge.assign(lower.edge.begin(), cut);
  upper.passing = lower.passing;
  upper.texts = lower.texts;
  while (!lower.slots.empty() && lower.slots.begin()->first.first <= depth) {
    auto slot = lower.slots.extract(lower.slots.begin());
    slot.mapped()->node = &upper;
    upper.slots.insert(std::move(slot));
  }
  lower.edge.erase(lower.edge.begin(), cut);
  auto& place = parent.children.at(upper.edge.front());
  upper.children.emplace(lower.edge.front(), std::move(place));
  lower.parent = &upper;
  place = std::move(made);
  return upper;
}

// `upper` into its only child, which stays.
void join(Node& upper) {
  Node& parent = *upper.parent;
  auto& place = parent.children.at(upper.edge.front());
  const std::unique_ptr<Node> dropped = std::move(place);
  place = std::move(upper.children.begin()->second);
  upper.children.clear();
  Node& lower = *place;
  lower.parent = &parent;
  lower.edge.insert(lower.edge.begin(), upper.edge.begin(), upper.edge.end());
  for (auto& [slot, unit] : upper.slots) unit->node = &lower;
  lower.slots.merge(upper.slots);
}

}  // namespace

bool NewestFirst::operator()(const Text* a, const Text* b) const noexcept {
  return a->id > b->id;
}

Node::~Node() {
  std::vector<std::unique_ptr<Node>> below;
  const auto take = [&below](Node& node) {
    for (auto& [key, child] : node.children) below.push_back(std::move(child));
    node.children.clear();
  };
  take(*this);
  while (!below.empty()) {
    const std::unique_ptr<Node> last = std::move(below.back());
    below.pop_back();
    take(*last);
  }
}

Key::Key(const char* function, std::span<const int64_t> tokens,
         const Namespace& space, int32_t adapter) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  const int64_t from = std::max<int64_t>(space.active_from, 0);
  const bool switches = adapter != 0 && from < n;
  keys_.reserve(tokens.size() + 1);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = tokens[i];
    TORCH_CHECK_VALUE(
        token >= 0 && token <= std::numeric_limits<int32_t>::max(), "[",
        function, "] tokens must be in [0, 2^31) but got ", token, " at ", i,
        ".");
    if (switches && i == from) keys_.push_back(adapter);
    keys_.push_back(static_cast<int32_t>(token));
  }
  if (switches) switch_at_ = from;
}

Match match(Node& top, std::span<const int32_t> keys) {
  Match found{.path = {&top}};
  const int64_t n = static_cast<int64_t>(keys.size());
  while (found.depth < n && !found.ends_in_edge()) {
    const auto child = found.last().children.find(keys[found.depth]);
    if (child == found.last().children.end()) break;
    const auto& edge = child->second->edge;
    const auto rest = keys.subspan(static_cast<size_t>(found.depth));
    const auto same =
        std::mismatch(edge.begin(), edge.end(), rest.begin(), rest.end());
    found.path.push_back(child->second.get());
    found.depth += same.first - edge.begin();
  }
  return found;
}

Node& reach(Node& top, std::span<const int32_t> keys) {
  const Match found = match(top, keys);
  Node& at = ending_at(found.last(), found.depth);
  const auto rest = keys.subspan(static_cast<size_t>(found.depth));
  if (rest.empty()) return at;
  auto made = std::make_unique<Node>();
  Node& node = *made;
  node.parent = &at;
  node.end = static_cast<int64_t>(keys.size());
  node.edge.assign(rest.begin(), rest.end());
  at.children.emplace(rest.front(), std::move(made));
  return node;
}

Node& ending_at(Node& node, int64_t depth) {
  Node* at = &node;
  while (at->start() >= depth && at->parent != nullptr) at = at->parent;
  return at->end == depth ? *at : split(*at, depth);
}

void enter(Node& node, Text& text, const Variant& variant) {
  for (Node* at = &node; at != nullptr; at = at->parent) {
    at->texts += at->passing[variant].insert(&text).second ? 1 : 0;
  }
}

void leave(Node& node, Text& text, const Variant& variant, int64_t below) {
  for (Node* at = &node; at != nullptr && at->end > below; at = at->parent) {
    const auto texts = at->passing.find(variant);
    texts->second.erase(&text);
    --at->texts;
    if (texts->second.empty()) at->passing.erase(texts);
  }
}

void prune(Node& node) {
  Node* at = &node;
  while (at->parent != nullptr && at->children.empty() && at->texts == 0 &&
         at->slots.empty()) {
    Node* parent = at->parent;
    const int32_t first = at->edge.front();
    parent->children.erase(first);
    at = parent;
  }
  // Texts that pass on into the only child end nowhere between.
  if (at->parent != nullptr && at->children.size() == 1 &&
      at->texts == at->children.begin()->second->texts) {
    join(*at);
  }
}

}  // namespace kvcache::store
