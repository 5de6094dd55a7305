// A radix tree of key sequences: tokens, and one pseudo token where an adapter
// begins. Nodes know the texts that pass through them and the checkpoints that
// lie on their edge.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "kvcache/reuse_report.h"

namespace kvcache::store {

struct Node;
struct Root;
struct Text;

// What else than tokens decides whether a text serves a request. Numbers stand
// for names that TextIndex knows.
struct Variant {
  int32_t route = 0;
  int32_t layout = 0;
  uint64_t generation = 0;
  int64_t multiple = 1;  // of which positions must be
  bool any = false;      // every position can be restored, not checkpoints only
  auto operator<=>(const Variant&) const = default;
};

// One checkpoint; of a text whose every position can be restored, its end.
struct Unit {
  Text* text = nullptr;  // null: removed, remembered to name the reason
  Root* root = nullptr;
  Node* node = nullptr;
  int64_t depth = 0;  // keys
  int64_t position = 0;
  Variant variant = {};
  double score = 0;    // the lowest is evicted first
  uint64_t order = 0;  // unique, among equal scores
  int64_t uses = 1;
  double used_at = 0;  // seconds of the store's clock
  std::list<Unit*>::iterator remembered = {};
};

struct NewestFirst {
  bool operator()(const Text* a, const Text* b) const noexcept;
};

struct Node {
  using Slot = std::pair<int64_t, Variant>;  // depth, variant

  Node* parent = nullptr;
  int64_t end = 0;            // depth
  std::vector<int32_t> edge;  // keys [end - size, end)
  std::unordered_map<int32_t, std::unique_ptr<Node>> children;
  std::map<Variant, std::set<Text*, NewestFirst>> passing;
  int64_t texts = 0;  // in `passing`; each ends at the end of a node
  std::map<Slot, std::unique_ptr<Unit>> slots;

  Node() = default;
  ~Node();  // without recursion: a tree may be as deep as a text is long
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  int64_t start() const { return end - static_cast<int64_t>(edge.size()); }
};

// A sequence with its pseudo token, and how its depths are positions.
class Key {
 public:
  // An adapter that no text has; matches nothing.
  static constexpr int32_t kUnknown = std::numeric_limits<int32_t>::min();

  // Throws if a token is not in [0, 2^31). `adapter`: < 0, or 0 for none.
  Key(const char* function, std::span<const int64_t> tokens,
      const Namespace& space, int32_t adapter);

  std::span<const int32_t> all() const { return keys_; }
  std::span<const int32_t> up_to(int64_t position) const {
    return all().first(static_cast<size_t>(depth(position)));
  }
  int64_t position(int64_t depth) const {
    return depth - (depth > switch_at_ ? 1 : 0);
  }
  int64_t depth(int64_t position) const {
    return position + (position > switch_at_ ? 1 : 0);
  }

 private:
  std::vector<int32_t> keys_;
  int64_t switch_at_ = std::numeric_limits<int64_t>::max();
};

struct Match {
  std::vector<Node*> path = {};  // from the top; the last may match in part
  int64_t depth = 0;             // keys that match
  Node& last() const { return *path.back(); }
  bool ends_in_edge() const { return depth < last().end; }
  // Of the node on the path, how deep the keys match.
  int64_t depth_in(const Node& node) const { return std::min(depth, node.end); }
};

Match match(Node& top, std::span<const int32_t> keys);
// The node that ends at `keys`, made if there is none.
Node& reach(Node& top, std::span<const int32_t> keys);
// The ancestor of `node`, or itself, that ends at `depth`, made if need be.
Node& ending_at(Node& node, int64_t depth);
// A text that ends at `node` begins or stops to pass through nodes down to it;
// with `below`, only through those that end deeper than it.
void enter(Node& node, Text& text, const Variant& variant);
void leave(Node& node, Text& text, const Variant& variant, int64_t below = -1);
// Removes what holds nothing, from `node` upwards, and joins what need not be
// apart.
void prune(Node& node);

}  // namespace kvcache::store
