// kvcache/checkpoint_store.h - what a model remembers of texts, kept for later
// requests that begin alike.
//
//   Hit hit = store.lookup({.tokens = prompt, .space = {.model = "qwen"}});
//   if (hit.text) cache.restore(hit.text->parts[0], row, hit.position);
//   ... prefill prompt[hit.position, n) ...
//   store.put({.tokens = prompt, .space = ..., .bytes = most},
//             [&] { return StoredText{.parts = {cache.checkpoint(row, {})}};
//             });
//
// A text is a token sequence with the memory of one or more model parts after
// it. A checkpoint is a position of a text that can be restored. Tokens decide
// what matches: they are compared one by one, no hash stands for them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/reuse_report.h"
#include "kvcache/store_events.h"
#include "kvcache/types.h"

namespace kvcache {

// What belongs to one position beside the memory of the layers.
struct PointExtras {
  int64_t position = 0;
  Tensor features = {};      // router's sum over [0, position); or undefined
  Tensor final_hidden = {};  // of token position - 1; or undefined
};

// What make() of a put returns, and what a hit gives back.
struct StoredText {
  // Of equal length, K and V in blocks (see Cache::checkpoint with
  // BlockOptions). Of several, the first does not depend on the route.
  std::vector<Checkpoint> parts = {};
  std::vector<PointExtras> extras = {};  // ascending positions
  // Half-open ranges of positions whose memory decode wrote, ascending.
  std::vector<std::pair<int64_t, int64_t>> decoded = {};
  // Positions can be restored if they are multiples of it: 1 where the model is
  // row-exact, else its canonical chunk.
  int64_t restore_multiple = 1;
};

struct LookupRequest {
  std::span<const int64_t> tokens = {};
  Namespace space = {};
  std::optional<std::string> route = {};  // empty: of any route
  uint64_t generation = 0;                // of the weights
  std::string layout = {};                // layout_of(); empty: not compared
  // Deepest position allowed. Empty: all tokens but the last, which is left to
  // give the first logits.
  std::optional<int64_t> limit = {};
  bool eligible = true;  // false: reported, nothing is looked up
  // The whole request may match where its final hidden state is stored.
  bool final_hidden = false;
  // Neither counted nor refreshed before settle(): for a guess of the route.
  bool deferred = false;
};

// What a lookup found. `text` keeps its tensors alive, and counted, until it is
// dropped: hold it until the put that continues it has returned, not longer.
struct Hit {
  int64_t position = 0;  // restore this many tokens; 0: start anew
  std::shared_ptr<const StoredText> text = {};  // null: nothing was found
  // At the position; undefined: not stored.
  Tensor features = {}, final_hidden = {};
  LookupReport report = {};
  Namespace space = {};  // of the request
  int64_t limit = 0;     // deepest position that was allowed
  uint64_t id = 0;       // of the text, for the store
};

struct PutRequest {
  std::span<const int64_t> tokens = {};
  Namespace space = {};
  std::string route = {};  // empty: no adapter chosen by a router
  uint64_t generation = 0;
  std::string layout = {};  // must be that of the parts; empty: not compared
  // Upper estimate of what make() allocates. Shared blocks do not count.
  size_t bytes = 0;
  // Where the text can be restored. If all of them are known already, make() is
  // not called. Empty: at its end.
  std::vector<int64_t> positions = {};
  int priority = 0;     // lower ones are evicted first
  bool pinned = false;  // never evicted, within StoreOptions::max_pinned_bytes
  std::optional<std::chrono::milliseconds> ttl = {};  // after its last use
};

enum class PutResult : uint8_t {
  kStored,
  kRefreshed,  // all of it was there; now it is most recent
  kDisabled,   // the store keeps nothing
  kTooShort,   // fewer tokens than StoreOptions::min_prefix
  kOversize,   // more bytes than the bound or the quota: nothing was evicted
  kNoRoom,     // what is there is pinned or in use
  kUnusable,   // no position can be restored in every part
  kOvertaken   // the store was cleared or invalidated meanwhile
};
std::string_view to_string(PutResult result) noexcept;

enum class EvictionPolicy : uint8_t {
  kLru,       // least recently used first
  kCostAware  // fewest tokens saved per byte first, aged (GDSF)
};

struct StoreOptions {
  size_t max_bytes = 0;      // 0: keeps nothing
  int64_t min_prefix = 256;  // tokens; shorter ones are not worth it
  EvictionPolicy eviction = EvictionPolicy::kLru;
  std::optional<size_t> max_pinned_bytes = {};  // empty: half of max_bytes
  std::optional<size_t> namespace_quota = {};   // bytes each; empty: none
  int64_t most_remembered = 1024;  // removed checkpoints, to name the reason
  StoreEventSink on_event = {};    // called without a lock, one at a time
  std::function<std::chrono::steady_clock::time_point()> clock = {};
};

// Rows, and tokens of rows. A row is a lookup that counts.
struct ReuseCounts {
  int64_t rows = 0;
  int64_t hits = 0;     // restored up to the limit
  int64_t partial = 0;  // less, but more than nothing
  int64_t cold = 0;
  int64_t mispredict = 0;  // guessed the wrong route
  int64_t tokens_reused = 0;
  int64_t tokens_computed = 0;
  int64_t ckpts_made = 0;
  int64_t evicted = 0;  // checkpoints
};

struct StoreStats : ReuseCounts {
  int64_t expired = 0;      // checkpoints
  int64_t invalidated = 0;  // checkpoints
  int64_t refreshed = 0;    // puts
  int64_t oversize = 0;     // puts refused
  int64_t no_room = 0;      // puts refused
  int64_t unusable = 0;     // puts refused
  int64_t pins_refused = 0;
  size_t max_bytes = 0;
  size_t used_bytes = 0;  // promised to puts that are making included
  size_t pinned_bytes = 0;
  int64_t checkpoints = 0;  // now
  int64_t groups = 0;       // texts now
};

struct NamespaceStats : ReuseCounts {
  size_t used_bytes = 0;
  std::optional<size_t> quota = {};
  int64_t checkpoints = 0;
  int64_t groups = 0;
};

// What caches a checkpoint fits into: dtypes and layers of each part.
std::string layout_of(std::span<const CacheSpec> parts);

// Safe to share between threads. Bytes are those of unique storages of all that
// is kept or held by hits; with what puts were promised they never exceed
// max_bytes. Besides, 4 bytes of bookkeeping per distinct token, and about 2 KB
// per text.
//
// Cost: lookup and put O(tokens); a put copies nothing but what make() copies,
// and holds no lock meanwhile.
class CheckpointStore {
 public:
  explicit CheckpointStore(StoreOptions options);
  ~CheckpointStore();  // hits stay good
  CheckpointStore(const CheckpointStore&) = delete;
  CheckpointStore& operator=(const CheckpointStore&) = delete;

  // The deepest checkpoint whose tokens the request begins with. It becomes
  // most recent, and the row is counted, unless deferred.
  Hit lookup(const LookupRequest& request);
  // Counts a deferred lookup and refreshes its checkpoint, if it is still
  // there.
  void settle(const Hit& hit);
  // The guess had the wrong route: the class of the row comes from the first
  // lookup, its tokens and what is refreshed from the one that answered.
  void settle(const Hit& guess, const Hit& answered);

  // Makes room, then lets make() copy, then keeps it. What make() throws passes
  // through; only the eviction remains then. Positions that are known already
  // for this route and generation stay as they are.
  PutResult put(const PutRequest& request,
                const std::function<StoredText()>& make);

  // False if the text is gone or the pinned bytes would exceed their bound.
  bool pin(const Hit& hit, bool pinned = true);
  // Evicts down to it, what hits hold included; that is counted until dropped.
  void set_max_bytes(size_t bytes);
  void set_quota(const Namespace& space, std::optional<size_t> bytes);

  // Remove texts, pinned ones too; return how many checkpoints.
  int64_t invalidate_route(std::string_view route);
  // Without an adapter the whole of it, else what ran with that adapter.
  int64_t invalidate_namespace(const Namespace& space);
  int64_t invalidate_generations_before(uint64_t generation);
  void clear();  // all of it, and what is remembered; not the statistics

  StoreStats stats() const;
  NamespaceStats stats(const Namespace& space) const;
  // Token counts, bytes and ages of all; names and the first token ids of the
  // viewer's namespace only.
  std::string dump_tree(const Namespace* viewer = nullptr) const;
  std::vector<std::string> validate() const;  // broken invariants; empty: sound

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvcache
