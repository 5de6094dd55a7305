#include "search.h"

#include <algorithm>
#include <array>
#include <limits>

#include "stored_text.h"

namespace kvcache::store {
namespace {

// Why a text does not serve, most basic first.
enum Fit : uint8_t { kLayout, kGeneration, kRoute, kFits };

Fit fit_of(const Variant& variant, const Wanted& wanted) {
  if (wanted.layout && variant.layout != *wanted.layout) return kLayout;
  if (variant.generation != wanted.generation) return kGeneration;
  if (wanted.route && variant.route != *wanted.route) return kRoute;
  return kFits;
}

// Walks the path from its end to the top. All positions are of the request.
class PathSearch {
 public:
  PathSearch(const Match& match, const Key& key, const Wanted& wanted)
      : match_(match), key_(key), wanted_(wanted) {}

  void run() {
    look_below_dead_end();
    for (auto at = match_.path.rbegin(); at != match_.path.rend(); ++at) {
      const Node& node = *at->node;
      if (key_.position(at->depth) <= position_) break;  // nothing deeper
      for (const auto& [variant, exits] : node.passing) {
        pass(variant, exits, at->depth);
      }
      for (auto slot = node.slots.rbegin(); slot != node.slots.rend(); ++slot) {
        if (slot->first.first <= at->depth) offer(*slot->second);
      }
    }
  }

  Text* text_ = nullptr;
  int64_t position_ = 0;
  int64_t attention_ = 0;
  bool states_ = false;
  int64_t evicted_ = 0;
  std::array<int64_t, kFits> otherwise_ = {};  // positions, by what misfits

 private:
  // Whole texts that ended deeper and are gone served any position before.
  void look_below_dead_end() {
    const Node* node = match_.path.back().node;
    if (node->live_end() >= match_.depth) return;
    while (node != nullptr) {
      for (const auto& [slot, unit] : node->slots) {
        if (unit->text == nullptr && slot.first > match_.depth &&
            slot.second.any) {
          offer_dead(slot.second,
                     std::min(key_.position(match_.depth), wanted_.limit));
        }
      }
      const auto below = node->branches.lower_bound(
          {match_.depth, std::numeric_limits<int32_t>::min()});
      node = below == node->branches.end() ? nullptr : below->second.get();
    }
  }

  void pass(const Variant& variant, const std::set<Exit>& exits,
            int64_t depth) {
    const Fit fit = fit_of(variant, wanted_);
    const Exit& deepest = *exits.rbegin();
    const int64_t reached = key_.position(std::min(depth, deepest.depth));
    const int64_t most = std::min(reached, wanted_.limit);
    if (fit == kFits && most > attention_) {
      attention_ = most;
      states_ = deepest.text->states;
    }
    if (!variant.any) return;
    take(fit, most - most % variant.multiple, *deepest.text);
    if (wanted_.final_hidden && reached > most) {
      pass_whole(fit, exits, depth, reached);
    }
  }

  // All of the request, if one of the texts has its final hidden state.
  void pass_whole(Fit fit, const std::set<Exit>& exits, int64_t depth,
                  int64_t position) {
    for (auto at = exits.rbegin(); at != exits.rend() && at->depth >= depth;
         ++at) {
      if (final_hidden_at(at->text->text(), position).defined()) {
        take(fit, position, *at->text);
        return;
      }
    }
  }

  void offer(Unit& unit) {
    const bool whole = unit.position > wanted_.limit;
    if (unit.text == nullptr) {
      if (!whole) offer_dead(unit.variant, unit.position);
      return;
    }
    if (unit.variant.any) return;  // see pass()
    if (whole &&
        !(wanted_.final_hidden &&
          final_hidden_at(unit.text->text(), unit.position).defined())) {
      return;
    }
    take(fit_of(unit.variant, wanted_), unit.position, *unit.text);
  }

  void offer_dead(const Variant& variant, int64_t position) {
    const Fit fit = fit_of(variant, wanted_);
    if (fit == kFits) evicted_ = std::max(evicted_, position);
    if (fit == kGeneration) {
      otherwise_[fit] = std::max(otherwise_[fit], position);
    }
  }

  void take(Fit fit, int64_t position, Text& text) {
    if (fit != kFits) {
      otherwise_[fit] = std::max(otherwise_[fit], position);
      return;
    }
    if (position <= position_) return;
    position_ = position;
    text_ = &text;
  }

  const Match& match_;
  const Key& key_;
  const Wanted& wanted_;
};

// Where a request leaves a set of texts, and what stands there instead.
struct Leaving {
  int64_t depth = 0;
  bool differs = false;  // the texts go on, with other keys
  bool adapter = false;  // with the same token, but another adapter
};

// What follows a depth of a node: its own next key, and branches.
bool continues_with(const Node& node, int64_t depth, int32_t key) {
  return (depth < node.end() && node.keys[depth - node.start] == key) ||
         node.branches.contains({depth, key});
}

// Past a pseudo token `adapter` at `depth`, the next key is `token`.
bool adapter_then(const Node& node, int64_t depth, int32_t adapter,
                  int32_t token) {
  const auto branch = node.branches.find({depth, adapter});
  if (branch != node.branches.end()) {
    return continues_with(*branch->second, depth + 1, token);
  }
  return continues_with(node, depth, adapter) &&
         continues_with(node, depth + 1, token);
}

bool other_adapter(const Root& root, const Node& node, int64_t depth,
                   std::span<const int32_t> keys) {
  const auto at = static_cast<size_t>(depth);
  const bool switches = keys[at] < 0;
  if (switches && at + 1 == keys.size()) return false;
  const int32_t token = keys[switches ? at + 1 : at];
  if (switches && continues_with(node, depth, token)) return true;
  return std::any_of(root.adapters.begin(), root.adapters.end(),
                     [&](const auto& adapter) {
                       return adapter_then(node, depth, adapter.second, token);
                     });
}

// Texts that are there go on behind `depth`, in whatever way.
bool goes_on(const Node& node, int64_t depth) {
  if (node.live_end() > depth) return true;
  for (auto at = node.branches.lower_bound(
           {depth, std::numeric_limits<int32_t>::min()});
       at != node.branches.end() && at->first.first == depth; ++at) {
    if (at->second->texts > 0) return true;
  }
  return false;
}

// The same of all texts, removed ones that are remembered included.
bool went_on(const Node& node, int64_t depth) {
  const auto branch =
      node.branches.lower_bound({depth, std::numeric_limits<int32_t>::min()});
  return node.end() > depth ||
         (branch != node.branches.end() && branch->first.first == depth);
}

// `live`: only of texts that are there.
Leaving leaving(const Root& root, const Match& match, const Key& key,
                bool live) {
  size_t last = match.path.size() - 1;
  while (live && last > 0 && match.path[last].node->texts == 0) --last;
  const Node& node = *match.path[last].node;
  Leaving result{.depth = match.path[last].depth};
  if (live) result.depth = std::min(result.depth, node.live_end());
  const auto keys = key.all();
  if (result.depth == static_cast<int64_t>(keys.size())) return result;
  if (live && node.texts == 0) return result;
  result.adapter = other_adapter(root, node, result.depth, keys);
  result.differs = !result.adapter && (live ? goes_on(node, result.depth)
                                            : went_on(node, result.depth));
  return result;
}

ReuseReason reason_of(const PathSearch& found, const LookupReport& report,
                      const Wanted& wanted, const Leaving& left) {
  const int64_t restored = found.position_;
  if (restored >= wanted.limit) return ReuseReason::kAll;
  const std::array<std::pair<int64_t, ReuseReason>, 4> lost = {{
      {found.otherwise_[kLayout], ReuseReason::kDtypeOrLayout},
      {found.otherwise_[kGeneration], ReuseReason::kGeneration},
      {found.otherwise_[kRoute], ReuseReason::kRoute},
      {found.evicted_, ReuseReason::kEvicted},
  }};
  const auto most = std::max_element(
      lost.begin(), lost.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  if (most->first > restored) return most->second;
  const int64_t shared = std::min(report.matched, wanted.limit);
  if (restored < shared && shared >= wanted.min_prefix) {
    return ReuseReason::kNoCheckpointBefore;
  }
  if (left.adapter) return ReuseReason::kNamespace;
  if (report.matched == 0) return ReuseReason::kNoEntry;
  return left.differs || restored < shared ? ReuseReason::kTokensDiverge
                                           : ReuseReason::kAll;
}

}  // namespace

Found search(const Root* root, const TextIndex& index, const Match& match,
             const Key& key, const Wanted& wanted, bool others) {
  Found result;
  LookupReport& report = result.report;
  if (root == nullptr || (root->top.texts == 0 && root->top.branches.empty())) {
    report.reason = others ? ReuseReason::kNamespace : ReuseReason::kNoEntry;
    return result;
  }
  PathSearch found(match, key, wanted);
  found.run();
  const Leaving left = leaving(*root, match, key, true);
  const Leaving known = leaving(*root, match, key, false);
  report.matched = key.position(left.depth);
  if (left.differs && report.matched > 0) {
    report.first_different = report.matched;
  }
  if (known.differs && known.depth > 0) {
    report.divergence = key.position(known.depth);
  }
  report.attention = std::max(found.attention_, found.position_);
  if (found.states_) report.recurrent = found.position_;
  report.restored = found.position_;
  report.reason = reason_of(found, report, wanted, left);
  if (found.text_ != nullptr) {
    report.decoded = decoded_before(found.text_->text(), found.position_);
    report.route = index.routes.name(found.text_->variant.route);
  }
  result.text = found.text_;
  result.position = found.position_;
  return result;
}

}  // namespace kvcache::store
