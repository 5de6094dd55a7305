// A text on its way in.
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "store_impl.h"
#include "stored_text.h"

namespace kvcache {

using store::Exit;
using store::Key;
using store::Match;
using store::Root;
using store::Text;
using store::Unit;
using store::Variant;

namespace {

// Longer texts with the same blocks and points lend theirs; of the first of
// several parts whatever their route.
void share_what_is_there(StoredText& text, const Match& match, const Key& key,
                         const Variant& variant) {
  bool first = false;
  bool others = false;
  for (auto at = match.path.rbegin(); at != match.path.rend(); ++at) {
    for (const auto& [passing, exits] : at->node->passing) {
      if (passing.layout != variant.layout ||
          passing.generation != variant.generation) {
        continue;
      }
      const Exit& deepest = *exits.rbegin();
      const StoredText& with = deepest.text->text();
      const int64_t same = key.position(std::min(at->depth, deepest.depth));
      const bool same_route = passing.route == variant.route;
      if (!first && (same_route || text.parts.size() > 1)) {
        store::share(text, with, same, true);
        first = true;
      }
      if (!others && same_route) {
        store::share(text, with, same, false);
        others = true;
      }
    }
  }
}

// Of texts that restore anywhere, those that the new one begins with are of no
// more use.
std::vector<Text*> absorbed_by(const Match& match, const Variant& variant,
                               const PutRequest& request) {
  std::vector<Text*> texts;
  if (!variant.any) return texts;
  for (const auto& stretch : match.path) {
    for (const auto& [slot, unit] : stretch.node->slots) {
      Text* text = unit->text;
      if (text == nullptr || slot.first > stretch.depth ||
          slot.second != variant) {
        continue;
      }
      if (!text->pinned && text->priority <= request.priority &&
          (!request.ttl || text->ttl)) {
        texts.push_back(text);
      }
    }
  }
  return texts;
}

void merge_extras(StoredText& text, const std::vector<Text*>& absorbed) {
  std::map<int64_t, PointExtras> all;
  for (const PointExtras& extras : text.extras) {
    all.emplace(extras.position, extras);
  }
  for (const Text* other : absorbed) {
    for (const PointExtras& extras : other->text().extras) {
      all.emplace(extras.position, extras);
    }
  }
  text.extras.clear();
  for (auto& [position, extras] : all) text.extras.push_back(std::move(extras));
}

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::optional<PutResult> CheckpointStore::Impl::refuse(
    const PutRequest& request, Root& root) {
  if (request.bytes > quota(root)) {
    ++stats.oversize;
    return PutResult::kOversize;
  }
  // Else all that is not pinned would go for nothing.
  if (request.bytes + pinned_bytes > options.max_bytes ||
      !make_room(root, request.bytes)) {
    ++stats.no_room;
    return PutResult::kNoRoom;
  }
  return {};
}

Unit* CheckpointStore::Impl::known(const PutRequest& request, const Key& key,
                                   Root& root) {
  const int32_t route = index.routes.find(request.route);
  std::optional<int32_t> layout;
  if (!request.layout.empty()) layout = index.layouts.find(request.layout);
  const Match match = store::match(root.top, key.all());
  std::vector<int64_t> positions = request.positions;
  if (positions.empty()) {
    positions.push_back(static_cast<int64_t>(request.tokens.size()));
  }
  Unit* deepest = nullptr;
  for (const int64_t position : positions) {
    deepest =
        index.known(match, key, position, route, request.generation, layout);
    if (deepest == nullptr) break;
  }
  return deepest;
}

bool CheckpointStore::Impl::pin(Text& text) {
  const size_t bytes = store::bytes_of(text.held->uses());
  if (text.pinned) return true;
  if (pinned_bytes + bytes > pinned_bound()) {
    ++stats.pins_refused;
    return false;
  }
  pinned_bytes += bytes;
  index.set_retention(text, text.priority, true);
  return true;
}

void CheckpointStore::Impl::refresh(Unit& unit, const PutRequest& request) {
  Text& text = *unit.text;
  ++stats.refreshed;
  index.touch(unit, now());
  if (request.priority > text.priority) {
    index.set_retention(text, request.priority, text.pinned);
  }
  if (request.pinned) pin(text);
  if (text.ttl && !request.ttl) {  // from now on for good
    expiries.erase({text.expires, text.id});
    text.ttl.reset();
  } else if (text.ttl) {
    text.ttl = std::max(*text.ttl, seconds(*request.ttl));
  }
  set_expiry(text);
}

PutResult CheckpointStore::Impl::insert(const PutRequest& request,
                                        const Key& key, Root& root,
                                        StoredText text, size_t& promised) {
  Variant variant{.route = index.routes.add(request.route),
                  .layout = index.layouts.add(store::layout_of_text(text)),
                  .generation = request.generation,
                  .multiple = text.restore_multiple,
                  .any = store::restores_any(text)};
  std::vector<int64_t> positions = store::usable_positions(text);
  if (positions.empty()) {
    ++stats.unusable;
    return PutResult::kUnusable;
  }
  Unit* deepest = nullptr;
  {
    const Match match = store::match(root.top, key.all());
    std::erase_if(positions, [&](int64_t position) {
      Unit* unit = index.known(match, key, position, variant.route,
                               variant.generation, variant.layout);
      if (unit != nullptr) deepest = unit;
      return unit != nullptr;
    });
    if (positions.empty()) {
      refresh(*deepest, request);
      return PutResult::kRefreshed;
    }
    store::keep(text, positions);
    share_what_is_there(text, match, key, variant);
  }
  for (;;) {  // room for more than was promised, if need be
    const size_t bytes = account->missing(store::storages_of(text));
    const size_t more = bytes > promised ? bytes - promised : 0;
    if (account->total(*root.ledger) + more <= quota(root) &&
        account->total() + more <= options.max_bytes) {
      break;
    }
    const bool own = account->total(*root.ledger) + more > quota(root);
    if (bytes > quota(root) || !evict_one(own ? &root : nullptr, false)) {
      ++stats.no_room;
      return PutResult::kNoRoom;
    }
  }
  add(request, key, root, std::move(text), variant, positions, promised);
  return PutResult::kStored;
}

void CheckpointStore::Impl::add(const PutRequest& request, const Key& key,
                                Root& root, StoredText text,
                                const Variant& variant,
                                std::span<const int64_t> positions,
                                size_t& promised) {
  const Match match = store::match(root.top, key.up_to(positions.back()));
  const std::vector<Text*> absorbed = absorbed_by(match, variant, request);
  if (!absorbed.empty()) merge_extras(text, absorbed);
  auto made = std::make_unique<Text>();
  made->root = &root;
  made->adapter = request.space.adapter;
  made->variant = variant;
  made->states = store::has_states(text);
  made->priority = request.priority;
  made->held = std::make_shared<const store::HeldText>(
      std::move(text), account, root.ledger, std::exchange(promised, 0));
  Text& added = index.add(std::move(made), key, positions, now());
  stats.ckpts_made += static_cast<int64_t>(positions.size());
  root.counts.ckpts_made += static_cast<int64_t>(positions.size());
  if (request.pinned) pin(added);
  if (request.ttl) added.ttl = seconds(*request.ttl);
  set_expiry(added);
  events.stored(added, request.route, request.tokens, key, now());
  for (Text* old : absorbed) remove(*old, Why::kAbsorbed);
}

namespace {

// A put while make() runs: what it was promised counts, its root stays. Ends
// with or without the lock.
class Making {
 public:
  Making(store::ByteAccount& account, Root& root, size_t bytes)
      : promised(bytes), account_(account), root_(root) {
    account_.promise(root_.ledger, promised);
    ++root_.makers;
  }
  ~Making() {
    account_.take_back(root_.ledger, promised);
    --root_.makers;
  }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

  size_t promised;

 private:
  store::ByteAccount& account_;
  Root& root_;
};

}  // namespace

PutResult CheckpointStore::put(const PutRequest& request,
                               const std::function<StoredText()>& make) {
  const auto n = static_cast<int64_t>(request.tokens.size());
  for (const int64_t position : request.positions) {
    TORCH_CHECK_VALUE(position > 0 && position <= n,
                      "[CheckpointStore::put] positions must be in (0, ", n,
                      "] but got ", position, ".");
  }
  Impl& impl = *impl_;
  const PutResult result = impl.put(request, make);
  impl.events.deliver(impl.mutex);
  return result;
}

PutResult CheckpointStore::Impl::put(const PutRequest& request,
                                     const std::function<StoredText()>& make) {
  std::unique_lock lock(mutex);
  if (options.max_bytes == 0) return PutResult::kDisabled;
  const auto n = static_cast<int64_t>(request.tokens.size());
  if (n < options.min_prefix) return PutResult::kTooShort;
  expire();
  Root& root = index.root(request.space);
  const Key key("CheckpointStore::put", request.tokens, request.space,
                store::add_adapter(root, request.space.adapter));
  if (Unit* unit = known(request, key, root)) {
    refresh(*unit, request);
    return PutResult::kRefreshed;
  }
  if (const auto refused = refuse(request, root)) return *refused;
  const uint64_t started = epoch;
  Making making(*account, root, request.bytes);
  lock.unlock();
  StoredText text = make();
  store::check_text(text, n);
  TORCH_CHECK_VALUE(
      request.layout.empty() || request.layout == store::layout_of_text(text),
      "[CheckpointStore::put] the parts must have the layout of the request, ",
      request.layout, ", but have ", store::layout_of_text(text), ".");
  lock.lock();
  const PutResult result =
      started == epoch
          ? insert(request, key, root, std::move(text), making.promised)
          : PutResult::kOvertaken;
  lock.unlock();
  return result;
}

}  // namespace kvcache
