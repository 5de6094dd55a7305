// kvcache/model/batcher.h - many requests through the rows of one cache.
//
// Continuous batching: a request enters whenever a row (slot) is free and
// leaves when its text ends, while the others go on. Between two decode steps
// of all rows one chunk of one prompt is prefilled, so neither waits for the
// other's end. Each request gives the tokens, text and log-probabilities that
// generate() gives for it alone, where the model is row-exact; whatever comes
// along, and in whatever order things happen.
//
// With a prefix cache, a plain cache of bounded capacity leaves a text in its
// row until the row is needed: a request that begins alike goes there, and on
// from it without a copy.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/graph_backend.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

struct BatchRequest {
  std::vector<int64_t> tokens = {};  // the prompt
  GenerateOptions options = {};
  GenerateHooks hooks = {};  // called by the thread that steps
};

// Why a request was not taken.
enum class RefusalReason : uint8_t {
  kBadOptions,  // an option is out of range, or the model cannot meet it
  kBadPrompt,   // empty, or an id that is not in the vocabulary
  kTooLong,     // prompt and new tokens exceed the context or a row's capacity
  kQueueFull    // BatcherOptions::max_queued requests wait already
};
std::string_view to_string(RefusalReason reason) noexcept;

struct Refusal {
  RefusalReason reason = RefusalReason::kBadOptions;
  std::string text = {};  // with the numbers
};

enum class BatchStatus : uint8_t {
  kFinished,  // `result` is what generate() would return, cancelled or not
  kRefused,   // `refusal` and `error` say why; nothing was computed
  kFailed     // `exception` ended it; `result` is what there was before
};

// What became of a request.
struct BatchResult {
  uint64_t id = 0;
  BatchStatus status = BatchStatus::kFinished;
  GenerateResult result = {};
  std::optional<RefusalReason> refusal = {};
  std::string error = {};  // empty: none
  std::exception_ptr exception = {};
  double queued_ms = 0;  // from submit() to a row
};

struct BatcherOptions {
  // Records the shared decode step; the cache then is a SlotCache. Null: plain
  // steps, over a cache of any kind.
  std::shared_ptr<GraphBackend> graphs = {};
  // Most requests that wait for a row; further ones are refused. Empty: no
  // bound.
  std::optional<int64_t> max_queued = {};
  // Gets every result, from the thread that steps and without a lock. Empty:
  // results wait for take_finished(). What it throws leaves step(); the result
  // is gone then, everything else goes on.
  std::function<void(BatchResult)> on_finished = {};
};

struct BatchStats {
  int64_t submitted = 0;
  int64_t finished = 0;  // cancelled ones included
  int64_t cancelled = 0;
  int64_t refused = 0;
  int64_t failed = 0;
  int64_t prefill_steps = 0;  // chunks
  int64_t prefill_tokens = 0;
  int64_t decode_steps = 0;   // shared ones
  int64_t decode_tokens = 0;  // rows of them that took part
  int64_t redone_steps = 0;   // that threw, and were done row by row
  int64_t queued = 0;         // now
  int64_t rows = 0;           // of the cache
  int64_t occupied_rows = 0;  // now
  int64_t most_occupied = 0;
  double mean_occupied() const noexcept;  // rows of a decode step; 0 if none
};

// submit(), cancel(), take_finished() and stats() may be called from any
// thread, hooks included; step(), run() and serve() from one at a time, and not
// from a hook.
//
// Errors: one request's fault is its own. A refused request, a hook that
// throws, logits that are not finite and a forward that throws end that request
// alone. A shared step that throws has committed nothing; it is done again row
// by row, and the rows that throw then are the ones that end.
// Cost: a decode step computes the rows from the first to the last that decode.
// Without a new shape it allocates what the forward does.
class Batcher {
 public:
  // `cache` is empty and made for `model`; each of its rows is a slot.
  Batcher(std::shared_ptr<const LanguageModel> model,
          std::unique_ptr<Cache> cache, BatcherOptions options = {});
  // Requests that are not finished are dropped without a result.
  ~Batcher();
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  // Queues a request behind all others; rows are given out in this order.
  // Returns its id, from 1 on. One that is refused has its result at once.
  uint64_t submit(BatchRequest request);
  // Why submit() would refuse it, a full queue apart.
  std::optional<Refusal> refusal(const BatchRequest& request) const;
  // Ends a request before its next step, as its stop token does: finished,
  // cancelled. False if it has its result already, or never was.
  bool cancel(uint64_t id);

  // One unit of work: a chunk of a prompt, or a decode step of all rows. False
  // if there was nothing to do.
  bool step();
  // Steps until nothing is left to do.
  void run();
  // Steps until `stop`, and sleeps while there is nothing to do. What is not
  // finished then stays.
  void serve(const std::stop_token& stop);

  // The results since the last call, in the order in which they came.
  std::vector<BatchResult> take_finished();
  BatchStats stats() const;
  // For the thread that steps.
  const Cache& cache() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvcache::model
