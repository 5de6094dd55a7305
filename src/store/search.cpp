#include "search.h"

#include <algorithm>
#include <array>

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
      const Node& node = **at;
      const int64_t depth = match_.depth_in(node);
      if (key_.position(depth) <= position_) break;  // nothing deeper to come
      for (const auto& [variant, texts] : node.passing) {
        pass(variant, texts, key_.position(depth));
      }
      for (auto slot = node.slots.rbegin(); slot != node.slots.rend(); ++slot) {
        if (slot->first.first <= depth) offer(*slot->second);
      }
    }
  }

  Text* text_ = nullptr;
  Unit* unit_ = nullptr;
  int64_t position_ = 0;
  int64_t attention_ = 0;
  bool states_ = false;
  int64_t evicted_ = 0;
  std::array<int64_t, kFits> otherwise_ = {};  // positions, by what misfits

 private:
  using Texts = std::set<Text*, NewestFirst>;

  // Whole texts that ended deeper and are gone served any position before.
  void look_below_dead_end() {
    const Node* node = &match_.last();
    if (node->texts > 0) return;
    while (!node->children.empty()) node = node->children.begin()->second.get();
    for (const auto& [slot, unit] : node->slots) {
      if (slot.second.any) {
        offer_dead(slot.second,
                   std::min(key_.position(match_.depth), wanted_.limit));
      }
    }
  }

  void pass(const Variant& variant, const Texts& texts, int64_t reached) {
    const Fit fit = fit_of(variant, wanted_);
    Text& newest = **texts.begin();
    const int64_t most = std::min(reached, wanted_.limit);
    if (fit == kFits && most > attention_) {
      attention_ = most;
      states_ = newest.states;
    }
    if (!variant.any) return;
    const int64_t position = most - most % variant.multiple;
    take(fit, position, newest, *newest.units.begin()->second);
    if (!wanted_.final_hidden || reached <= most) return;
    for (Text* text : texts) {
      if (final_hidden_at(text->text(), reached).defined()) {
        take(fit, reached, *text, *text->units.begin()->second);
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
    take(fit_of(unit.variant, wanted_), unit.position, *unit.text, unit);
  }

  void offer_dead(const Variant& variant, int64_t position) {
    const Fit fit = fit_of(variant, wanted_);
    if (fit == kFits) evicted_ = std::max(evicted_, position);
    if (fit == kGeneration) {
      otherwise_[fit] = std::max(otherwise_[fit], position);
    }
  }

  void take(Fit fit, int64_t position, Text& text, Unit& unit) {
    if (fit != kFits) {
      otherwise_[fit] = std::max(otherwise_[fit], position);
      return;
    }
    if (position <= position_) return;
    position_ = position;
    text_ = &text;
    unit_ = &unit;
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

// The key behind a depth of a node's edge or, at its end, of a child.
bool continues_with(const Node& node, int64_t depth, int32_t key) {
  if (depth < node.end) return node.edge[depth - node.start()] == key;
  return node.children.contains(key);
}

// Past a pseudo token `adapter` at `depth`, the next key is `token`.
bool adapter_then(const Node& node, int64_t depth, int32_t adapter,
                  int32_t token) {
  if (!continues_with(node, depth, adapter)) return false;
  if (depth < node.end) {
    return depth + 1 < node.end ? node.edge[depth + 1 - node.start()] == token
                                : node.children.contains(token);
  }
  const Node& child = *node.children.at(adapter);
  return child.edge.size() > 1 ? child.edge[1] == token
                               : child.children.contains(token);
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

bool has_live_child(const Node& node) {
  return std::any_of(node.children.begin(), node.children.end(),
                     [](const auto& child) { return child.second->texts > 0; });
}

// `live`: only of texts that are there, else of those remembered as well.
Leaving leaving(const Root& root, const Match& match, const Key& key,
                bool live) {
  size_t last = match.path.size() - 1;
  while (live && last > 0 && match.path[last]->texts == 0) --last;
  const Node& node = *match.path[last];
  Leaving result{.depth = match.depth_in(node)};
  const auto keys = key.all();
  if (result.depth == static_cast<int64_t>(keys.size())) return result;
  if (live && node.texts == 0) return result;
  result.adapter = other_adapter(root, node, result.depth, keys);
  result.differs = !result.adapter &&
                   (result.depth < node.end ||
                    (live ? has_live_child(node) : !node.children.empty()));
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
  if (root == nullptr || (root->top.texts == 0 && root->top.children.empty())) {
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
  result.unit = found.unit_;
  result.position = found.position_;
  return result;
}

}  // namespace kvcache::store
