// A tree of key sequences: tokens, and one pseudo token where an adapter
// begins. Nodes know the texts that pass through them and the checkpoints on
// them.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
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

// Where a text leaves a node; the last is the deepest, of these the newest.
struct Exit {
  int64_t depth = 0;
  uint64_t id = 0;
  Text* text = nullptr;
  auto operator<=>(const Exit& other) const {
    return std::pair(depth, id) <=> std::pair(other.depth, other.id);
  }
  bool operator==(const Exit& other) const = default;
};

// The keys of a sequence from where it left another node on. It is not split
// where a third one leaves it, so a walk compares few, long runs.
struct Node {
  using Slot = std::pair<int64_t, Variant>;  // depth, variant
  using Fork = std::pair<int64_t, int32_t>;  // depth, key

  Node* parent = nullptr;
  int64_t start = 0;          // depth
  std::vector<int32_t> keys;  // of depths [start, end())
  std::map<Fork, std::unique_ptr<Node>> branches;
  std::map<Variant, std::set<Exit>> passing;
  int64_t texts = 0;  // in `passing`
  std::map<Slot, std::unique_ptr<Unit>> slots;

  Node() = default;
  ~Node();  // without recursion
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  int64_t end() const { return start + static_cast<int64_t>(keys.size()); }
  int64_t live_end() const;  // the deepest exit; `start` if there is none
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

// A node of a path, and up to where it belongs to it.
struct Stretch {
  Node* node = nullptr;
  int64_t depth = 0;
};

struct Match {
  std::vector<Stretch> path = {};  // from the top
  int64_t depth = 0;               // keys that match
};

Match match(Node& top, std::span<const int32_t> keys);
// The node in which `keys` ends, made or made longer if need be.
Node& reach(Node& top, std::span<const int32_t> keys);
// A text that ends in `node` at `depth` begins or stops to pass through.
void enter(Node& node, int64_t depth, Text& text, const Variant& variant);
void leave(Node& node, int64_t depth, Text& text, const Variant& variant);
// After enter(): where twice as many texts leave a node as go on in it, they
// change places. A path so has about log2(texts) nodes, wherever texts part.
void balance(Node& node);
// Of a path to `node`, the node that holds the key before `depth`.
Node& holder(Node& node, int64_t depth);
// Removes keys and nodes that nothing needs, from `node` upwards.
void prune(Node& node);

}  // namespace kvcache::store
