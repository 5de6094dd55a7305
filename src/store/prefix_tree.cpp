#include "prefix_tree.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "text_index.h"

namespace kvcache::store {

int64_t Node::live_end() const {
  int64_t deepest = start;
  for (const auto& [variant, exits] : passing) {
    deepest = std::max(deepest, exits.rbegin()->depth);
  }
  return deepest;
}

Node::~Node() {
  std::vector<std::unique_ptr<Node>> below;
  const auto take = [&below](Node& node) {
    for (auto& [fork, branch] : node.branches) {
      below.push_back(std::move(branch));
    }
    node.branches.clear();
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
  Match found;
  const auto n = static_cast<int64_t>(keys.size());
  for (Node* node = &top; node != nullptr;) {
    const auto rest = keys.subspan(static_cast<size_t>(found.depth));
    const auto same = std::mismatch(node->keys.begin(), node->keys.end(),
                                    rest.begin(), rest.end());
    found.depth += same.first - node->keys.begin();
    found.path.push_back({.node = node, .depth = found.depth});
    if (found.depth == n) break;
    const auto branch = node->branches.find({found.depth, keys[found.depth]});
    node = branch == node->branches.end() ? nullptr : branch->second.get();
  }
  return found;
}

Node& reach(Node& top, std::span<const int32_t> keys) {
  const Match found = match(top, keys);
  Node& last = *found.path.back().node;
  const auto rest = keys.subspan(static_cast<size_t>(found.depth));
  if (rest.empty()) return last;
  if (last.parent != nullptr && found.depth == last.end()) {
    last.keys.insert(last.keys.end(), rest.begin(), rest.end());
    return last;
  }
  auto made = std::make_unique<Node>();
  Node& node = *made;
  node.parent = &last;
  node.start = found.depth;
  node.keys.assign(rest.begin(), rest.end());
  last.branches.emplace(Node::Fork(found.depth, rest.front()), std::move(made));
  return node;
}

Node& holder(Node& node, int64_t depth) {
  Node* at = &node;
  while (at->start >= depth && at->parent != nullptr) at = at->parent;
  return *at;
}

void enter(Node& node, int64_t depth, Text& text, const Variant& variant) {
  for (Node* at = &node; at != nullptr; at = at->parent) {
    at->passing[variant].insert({.depth = depth, .id = text.id, .text = &text});
    ++at->texts;
    depth = at->start;
  }
}

void leave(Node& node, int64_t depth, Text& text, const Variant& variant) {
  for (Node* at = &node; at != nullptr; at = at->parent) {
    const auto exits = at->passing.find(variant);
    exits->second.erase({.depth = depth, .id = text.id, .text = &text});
    --at->texts;
    if (exits->second.empty()) at->passing.erase(exits);
    depth = at->start;
  }
}

namespace {

// Texts of a node that go on behind `depth`, counted up to `most`.
int64_t going_on(const Node& node, int64_t depth, int64_t most) {
  int64_t count = 0;
  for (const auto& [variant, exits] : node.passing) {
    for (auto at = exits.rbegin();
         at != exits.rend() && at->depth > depth && count < most; ++at) {
      ++count;
    }
  }
  return count;
}

// All of `from` behind `depth` is now of `to`.
void move_behind(Node& from, int64_t depth, Node& to) {
  const auto cut = from.keys.begin() + (depth - from.start);
  to.keys.insert(to.keys.end(), cut, from.keys.end());
  from.keys.erase(cut, from.keys.end());
  while (!from.slots.empty() && from.slots.rbegin()->first.first > depth) {
    auto slot = from.slots.extract(std::prev(from.slots.end()));
    slot.mapped()->node = &to;
    to.slots.insert(std::move(slot));
  }
  while (!from.branches.empty() &&
         from.branches.rbegin()->first.first > depth) {
    auto branch = from.branches.extract(std::prev(from.branches.end()));
    branch.mapped()->parent = &to;
    to.branches.insert(std::move(branch));
  }
}

// Texts that go on in `node` behind `depth` go on in `rest`.
void split_texts(Node& node, int64_t depth, Node& rest) {
  for (auto& [variant, exits] : node.passing) {
    while (exits.rbegin()->depth > depth) {
      Exit exit = *exits.rbegin();
      exits.erase(exit);
      if (exit.text->end == &node) exit.text->end = &rest;
      rest.passing[variant].insert(exit);
      ++rest.texts;
      exit.depth = depth;
      exits.insert(exit);
    }
  }
}

// Texts that go on in `branch` go on in `node`.
void join_texts(Node& branch, Node& node) {
  for (auto& [variant, exits] : branch.passing) {
    auto& joined = node.passing[variant];
    for (const Exit& exit : exits) {
      if (exit.text->end == &branch) exit.text->end = &node;
      joined.erase({.depth = branch.start, .id = exit.id, .text = exit.text});
      joined.insert(exit);
    }
  }
}

// `branch` becomes what `node` goes on with, and the other way round.
void change_places(Node& node, Node& branch) {
  const int64_t depth = branch.start;
  auto rest = std::make_unique<Node>();
  rest->parent = &node;
  rest->start = depth;
  move_behind(node, depth, *rest);
  split_texts(node, depth, *rest);
  const auto place = node.branches.find({depth, branch.keys.front()});
  const std::unique_ptr<Node> dropped = std::move(place->second);
  node.branches.erase(place);
  move_behind(branch, depth, node);
  join_texts(branch, node);
  if (rest->keys.empty()) return;
  const Node::Fork fork(depth, rest->keys.front());
  node.branches.emplace(fork, std::move(rest));
}

}  // namespace

void balance(Node& node) {
  Node* at = &node;
  while (at->parent != nullptr) {
    Node& parent = *at->parent;
    const bool doubled = std::has_single_bit(static_cast<uint64_t>(at->texts));
    if (doubled && parent.parent != nullptr &&
        2 * going_on(parent, at->start, at->texts) <= at->texts) {
      change_places(parent, *at);
    }
    at = &parent;
  }
}

void prune(Node& node) {
  for (Node* at = &node; at->parent != nullptr;) {
    int64_t end = at->live_end();
    if (!at->slots.empty()) {
      end = std::max(end, at->slots.rbegin()->first.first);
    }
    if (!at->branches.empty()) {
      end = std::max(end, at->branches.rbegin()->first.first);
    }
    if (end > at->start) {
      at->keys.resize(static_cast<size_t>(end - at->start));
      return;
    }
    Node* parent = at->parent;
    parent->branches.erase(Node::Fork(at->start, at->keys.front()));
    at = parent;
  }
}

}  // namespace kvcache::store
