// Texts, their checkpoints and the order in which these are evicted. No locks:
// the store has one.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "byte_account.h"
#include "prefix_tree.h"

namespace kvcache::store {

// The order of eviction: priority, score, age.
struct Rank {
  int priority = 0;
  double score = 0;
  uint64_t order = 0;
  auto operator<=>(const Rank&) const = default;
};
using Ranks = std::map<Rank, Unit*>;

// One tree per tenant, model and base.
struct Root {
  Namespace space = {};  // without an adapter
  Node top = {};
  std::map<std::string, int32_t> adapters = {};  // pseudo tokens, < 0
  Ranks ranks = {};
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  std::optional<size_t> quota = {};
  NamespaceStats counts = {};
  std::atomic<int64_t> makers = 0;  // puts that wait for make()
};

struct Text {
  uint64_t id = 0;
  Root* root = nullptr;
  Node* end = nullptr;  // where it ends, at `depth`
  int64_t depth = 0;
  std::string adapter = {};
  Variant variant = {};
  bool states = false;
  std::shared_ptr<const HeldText> held = {};
  std::map<int64_t, Unit*> units = {};  // by position
  int priority = 0;
  bool pinned = false;
  std::optional<double> ttl = {};  // seconds
  double expires = 0;

  const StoredText& text() const { return held->text(); }
  bool leased() const { return held.use_count() > 1; }
};

// Numbers for names.
class Names {
 public:
  int32_t find(const std::string& name) const;  // -1: unknown
  int32_t add(const std::string& name);
  const std::string& name(int32_t number) const { return names_[number]; }

 private:
  std::map<std::string, int32_t> numbers_;
  std::vector<std::string> names_;
};

class TextIndex {
 public:
  TextIndex(EvictionPolicy policy, int64_t most_remembered,
            std::shared_ptr<ByteAccount> account)
      : policy_(policy),
        most_remembered_(most_remembered),
        account_(std::move(account)) {}

  Root* find_root(const Namespace& space) const;
  Root& root(const Namespace& space);  // made if there is none

  // A checkpoint at each position of `made`, which ascend.
  Text& add(std::unique_ptr<Text> made, const Key& key,
            std::span<const int64_t> positions, double now);
  // Removes a checkpoint, and what of its text only it needed; the text goes
  // with its last one. `remember`: lookups can tell that it was there.
  void remove(Unit& unit, bool remember);
  void remove(Text& text, bool remember);
  void touch(Unit& unit, double now);
  void set_retention(Text& text, int priority, bool pinned);
  void forget(const Root* root);  // removed checkpoints; null: of all roots
  void clear();

  // The next to be evicted, of one namespace or of all, that no hit holds, or
  // with `leased` even so; null: none. Pinned ones never are.
  Unit* victim(const Root* root, bool leased) const;
  void set_age(double score) { age_ = score > age_ ? score : age_; }
  Text* find(uint64_t id) const;
  // The checkpoint at a position of what matches; of texts that restore at any,
  // the end of one that goes so far. Null: none. Layout empty: of any.
  Unit* known(const Match& match, const Key& key, int64_t position,
              int32_t route, uint64_t generation,
              std::optional<int32_t> layout) const;

  const auto& texts() const { return texts_; }
  const auto& roots() const { return roots_; }
  const auto& ranks() const { return ranks_; }
  const auto& remembered() const { return remembered_; }
  int64_t units() const { return units_; }

  Names routes = {};
  Names layouts = {};

 private:
  void rank(Unit& unit);
  void unrank(Unit& unit);
  double cost_score(const Unit& unit) const;
  Unit& slot_for(Text& text, int64_t depth);
  void shorten(Text& text);
  void detach(Text& text);
  void remember(Unit& unit);
  void unlist(const Unit& unit);
  void forget(Unit& unit);
  void drop_empty_roots();

  EvictionPolicy policy_;
  int64_t most_remembered_;
  std::shared_ptr<ByteAccount> account_;
  std::map<std::string, std::unique_ptr<Root>> roots_;
  std::unordered_map<uint64_t, std::unique_ptr<Text>> texts_;
  Ranks ranks_;                  // of all roots; pinned ones have none
  std::list<Unit*> remembered_;  // oldest first
  int64_t remembered_keys_ = 0;
  uint64_t next_id_ = 1, next_order_ = 1;
  int64_t units_ = 0;
  double age_ = 0;
};

// The pseudo token of an adapter; 0 for none, Key::kUnknown if no text has it.
int32_t adapter_key(const Root& root, const std::string& adapter);
int32_t add_adapter(Root& root, const std::string& adapter);

// What separates roots, each part with its length, so that no two are alike.
std::string encode_root(const Namespace& space);

}  // namespace kvcache::store
