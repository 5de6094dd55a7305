// kvcache/model/choice_runner.h - multiple-choice requests that go on from what
// earlier ones left.
//
//   ChoiceRunner runner(make_routed(model), store, {.letters = {35, 36, 37}});
//   ChoiceResult result = runner.answer(
//       {.ids = ids, .state_len = 900, .slots = {911}, .option_counts = {3}});
//   result.probabilities[0];  // of the three letters behind token 911
//
// A request is [state | suffix]. The state is taken up where the store has it,
// and checkpointed at its chunk ends; the suffix is always computed. Each chunk
// is one replay per part of the model. Warm and cold answers agree bit for bit
// where the model is row-exact.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/checkpoint_store.h"
#include "kvcache/graph_backend.h"
#include "kvcache/model/routed_model.h"

namespace kvcache::model {

// All counts in tokens unless said otherwise; of placement 0 switches a rule
// off.
struct ChoiceOptions {
  std::vector<int64_t> letters = {};  // token ids of the choices, in order
  // Lengths that chunks are padded to, and keys that a chunk may read: what
  // chunk graphs are recorded for. Ascending.
  std::vector<int64_t> lengths = {16,  32,  64,  128, 192,  256,  320, 384,
                                  448, 512, 640, 768, 1024, 1536, 2048};
  std::vector<int64_t> spans = {1024, 2048, 4096, 8192};
  int64_t min_prefix = 256;  // of a state, aligned
  int64_t max_slots = 4;
  int64_t stride = 2048;  // checkpoints: see PlacementRule::kChunkEnds
  int64_t tail = 16;
  int64_t align = 64;
  int64_t block = 64;                         // of K and V that texts share
  uint64_t generation = 0;                    // of the weights
  size_t memo_entries = 256;                  // requests; 0: no memo
  std::shared_ptr<GraphBackend> graphs = {};  // null: eager_graphs()
  // Asked when no checkpoint was found; false: the plain path, for nothing is
  // to be captured and kept now. Empty: always.
  std::function<bool()> cold_ok = {};
  bool synchronize = false;  // the device at each phase, for true timings
};

struct ChoiceRequest {
  std::vector<int64_t> ids = {};
  int64_t state_len = 0;            // 0: not known
  std::vector<int64_t> slots = {};  // tokens whose successor is asked for
  std::vector<int64_t> option_counts = {};  // of each slot: the first letters
  bool images = false;                      // it has some: refused
  Namespace space = {};
  std::optional<int64_t> route = {};  // empty: the router's
};

// Why a request was not answered with the store. The plain path answers it,
// unless it says otherwise.
enum class ChoiceRefusal : uint8_t {
  kNone,
  kDisabled,        // the store keeps nothing
  kRouterAbove,     // the router reads above the split; not answered
  kRouterFeatures,  // it reads other features; not answered
  kImages,          // not answered: tokens do not tell them apart
  kNoStateLength,
  kTooShort,       // state below min_prefix
  kSlotCount,      // none, or more than max_slots
  kSlotInState,    // a slot before the aligned end of the state
  kSuffixTooLong,  // longer than the longest chunk
  kTooLong,        // beyond the largest span
  kColdNotWanted,  // cold_ok() said no
  kCaptureFailed   // a chunk graph could not be recorded
};
std::string_view to_string(ChoiceRefusal refusal) noexcept;

enum class ReuseClass : uint8_t { kNone, kHit, kPartial, kCold };
std::string_view to_string(ReuseClass reuse) noexcept;  // "hit", ...

// Milliseconds: until the graphs are there; restore and state; suffix and
// route; bookkeeping and checkpoints. A wrong guess adds both of its passes.
struct ChoiceTimings {
  double lookup = 0, prefix = 0, suffix = 0, save = 0;
};

struct ChoiceResult {
  // Of each slot over its options; empty: not answered.
  std::vector<std::vector<float>> probabilities = {};
  int64_t route = 0;
  ReuseClass reuse = ReuseClass::kNone;  // kNone: without the store
  // Of the pass that answered; its counts are those of the whole request.
  LookupReport report = {};
  ChoiceRefusal refusal = ChoiceRefusal::kNone;
  bool guessed_wrong = false;
  bool from_memo = false;
  ChoiceTimings timings = {};
};

struct PrecaptureResult {
  int64_t graphs = 0;  // that are there now
  double seconds = 0;
  std::vector<std::string> failed = {};  // the first three
};

struct ChoiceInfo {
  StoreStats store = {};
  int64_t stride = 0, tail = 0;
  int64_t graphs = 0;    // that are there
  int64_t captures = 0;  // failed ones too
  double capture_seconds = 0;
  int64_t failures = 0;
  // "(lo, 1024, 16): type: message", 160 characters; the first three.
  std::vector<std::string> failed = {};
  int64_t plain = 0;  // requests that took the plain path
  int64_t memo_hits = 0;
  int64_t memo_entries = 0;
};

// Not thread-safe; several runners may share a store.
class ChoiceRunner {
 public:
  // Throws for options that contradict themselves.
  ChoiceRunner(std::shared_ptr<const RoutedModel> model,
               std::shared_ptr<CheckpointStore> store, ChoiceOptions options);
  ~ChoiceRunner();
  ChoiceRunner(const ChoiceRunner&) = delete;
  ChoiceRunner& operator=(const ChoiceRunner&) = delete;

  // Throws for what is no request (ids, slots, counts), c10::IndexError for a
  // route that is not loaded; then nothing has changed.
  ChoiceResult answer(const ChoiceRequest& request);
  // kNone: it may use the store.
  ChoiceRefusal eligible(const ChoiceRequest& request) const;

  // Records every chunk graph that is not there; holds `lock` for each one.
  PrecaptureResult precapture(std::mutex* lock = nullptr);
  // Drops the graphs and forgets which failed, and clear().
  void recapture();
  // The store and the memo; statistics stay.
  void clear();

  int64_t last_route() const noexcept;  // the guess without a checkpoint
  ChoiceInfo info() const;

 private:
  friend class ChoiceRow;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvcache::model
