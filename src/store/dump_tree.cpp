// The store for people: what is there, and whether it is sound.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "store_impl.h"

namespace kvcache {

using store::Node;
using store::Root;
using store::Text;
using store::Unit;

namespace {

constexpr size_t kTokensShown = 8;
constexpr int kDeepestIndent = 20;  // levels; a tree may be deeper

std::string size_text(size_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1);
  if (bytes >= size_t{1} << 20U) {
    out << static_cast<double>(bytes) / (1U << 20U) << " MiB";
  } else {
    out << static_cast<double>(bytes) / (1U << 10U) << " KiB";
  }
  return out.str();
}

class TreeText {
 public:
  TreeText(std::ostream& out, const store::TextIndex& index, double now,
           bool tokens)
      : out_(out), index_(index), now_(now), tokens_(tokens) {}

  void write(const Root& root) {
    std::vector<std::pair<const Node*, int>> todo = {{&root.top, 0}};
    while (!todo.empty()) {
      const auto [node, level] = todo.back();
      todo.pop_back();
      if (node->texts == 0) continue;  // only remembered
      if (level > 0) write(*node, level);
      for (auto at = node->branches.rbegin(); at != node->branches.rend();
           ++at) {
        todo.emplace_back(at->second.get(), level + 1);
      }
    }
  }

 private:
  void write(const Node& node, int level) {
    indent(level);
    out_ << "tokens [" << node.start << ", " << node.live_end() << "), "
         << node.texts << (node.texts == 1 ? " text" : " texts");
    if (tokens_) write_tokens(node);
    out_ << '\n';
    for (const auto& [slot, unit] : node.slots) {
      if (unit->text != nullptr) write(*unit, level + 1);
    }
  }

  void write_tokens(const Node& node) {
    out_ << ':';
    for (size_t i = 0; i < std::min(kTokensShown, node.keys.size()); ++i) {
      if (node.keys[i] < 0) {
        out_ << " <adapter>";
      } else {
        out_ << ' ' << node.keys[i];
      }
    }
    if (node.keys.size() > kTokensShown) out_ << " ...";
  }

  void write(const Unit& unit, int level) {
    const Text& text = *unit.text;
    indent(level);
    out_ << "checkpoint at " << unit.position << ", "
         << size_text(
                store::bytes_of(store::storages_at(text.text(), unit.position)))
         << ", used " << unit.uses << " times, last " << std::fixed
         << std::setprecision(1) << now_ - unit.used_at << " s ago";
    if (!index_.routes.name(unit.variant.route).empty() && tokens_) {
      out_ << ", route " << index_.routes.name(unit.variant.route);
    }
    if (text.pinned) out_ << ", pinned";
    if (text.priority != 0) out_ << ", priority " << text.priority;
    if (text.leased()) out_ << ", in use";
    out_ << '\n';
  }

  void indent(int level) {
    out_ << std::string(
        static_cast<size_t>(2 * std::min(level, kDeepestIndent)), ' ');
  }

  std::ostream& out_;
  const store::TextIndex& index_;
  double now_;
  bool tokens_;
};

void check_node(const Node& node, std::vector<std::string>& broken) {
  int64_t texts = 0;
  for (const auto& [variant, exits] : node.passing) {
    texts += static_cast<int64_t>(exits.size());
  }
  const std::string place =
      " of the node that starts at depth " + std::to_string(node.start);
  if (texts != node.texts) broken.push_back("the count of texts" + place);
  int64_t needed = node.live_end();
  for (const auto& [slot, unit] : node.slots) {
    needed = std::max(needed, slot.first);
    if (unit->node != &node || unit->depth != slot.first ||
        slot.first <= node.start || slot.first > node.end()) {
      broken.push_back("a checkpoint" + place);
    }
  }
  for (const auto& [fork, branch] : node.branches) {
    needed = std::max(needed, fork.first);
    if (branch->parent != &node || branch->start != fork.first ||
        branch->keys.empty() || branch->keys.front() != fork.second) {
      broken.push_back("a branch" + place);
    }
  }
  if (needed != node.end()) broken.push_back("the end" + place);
}

void check_tree(const Root& root, std::vector<std::string>& broken) {
  std::vector<const Node*> todo = {&root.top};
  while (!todo.empty()) {
    const Node* node = todo.back();
    todo.pop_back();
    check_node(*node, broken);
    for (const auto& [fork, branch] : node->branches) {
      todo.push_back(branch.get());
    }
  }
}

}  // namespace

std::string CheckpointStore::dump_tree(const Namespace* viewer) const {
  const std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  std::ostringstream out;
  out << impl.index.texts().size() << " texts, " << impl.index.units()
      << " checkpoints, " << size_text(impl.account->total()) << " of "
      << size_text(impl.options.max_bytes) << '\n';
  const Root* own = viewer == nullptr ? nullptr : impl.index.find_root(*viewer);
  int64_t number = 0;
  for (const auto& [key, root] : impl.index.roots()) {
    ++number;
    if (root->top.texts == 0) continue;
    out << "namespace " << number;
    if (root.get() == own) {
      out << " (yours): model " << std::quoted(root->space.model) << ", base "
          << std::quoted(root->space.base);
    }
    out << ": " << root->top.texts << " texts, "
        << size_text(impl.account->total(*root->ledger)) << '\n';
    TreeText(out, impl.index, impl.now(), root.get() == own).write(*root);
  }
  return out.str();
}

std::vector<std::string> CheckpointStore::validate() const {
  const std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  std::vector<std::string> broken;
  int64_t units = 0;
  int64_t ranked = 0;
  size_t pinned = 0;
  for (const auto& [key, root] : impl.index.roots()) check_tree(*root, broken);
  for (const auto& [id, text] : impl.index.texts()) {
    units += static_cast<int64_t>(text->units.size());
    ranked += text->pinned ? 0 : static_cast<int64_t>(text->units.size());
    if (text->pinned) pinned += store::bytes_of(text->held->uses());
    if (text->units.empty() ||
        text->units.rbegin()->second->depth != text->depth) {
      broken.push_back("the end of text " + std::to_string(id));
    }
    const auto exits = text->end->passing.find(text->variant);
    if (exits == text->end->passing.end() ||
        !exits->second.contains(
            {.depth = text->depth, .id = id, .text = text.get()})) {
      broken.push_back("the path of text " + std::to_string(id));
    }
    if (impl.account->missing(text->held->uses()) > 0) {
      broken.push_back("bytes of text " + std::to_string(id) +
                       " are not counted");
    }
  }
  if (units != impl.index.units()) broken.emplace_back("count of checkpoints");
  if (ranked != static_cast<int64_t>(impl.index.ranks().size())) {
    broken.emplace_back("order of eviction");
  }
  if (pinned != impl.pinned_bytes) broken.emplace_back("pinned bytes");
  return broken;
}

}  // namespace kvcache
