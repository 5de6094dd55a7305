// batch_queue.h - where requests wait and results are left: what threads share
// of a batcher.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "answer.h"
#include "kvcache/model/batcher.h"

namespace kvcache::model {

// A request that was taken. All but the cancellation belongs to the thread that
// steps.
struct QueuedRequest {
  uint64_t id = 0;
  BatchRequest request;
  int64_t new_tokens = 0;  // at most
  Clock::time_point submitted = Clock::now();
  std::atomic<bool> cancelled = false;

  bool stop_requested() const {
    return cancelled || request.hooks.stop.stop_requested();
  }
};
using QueuedRequestPtr = std::shared_ptr<QueuedRequest>;

// Thread-safe. Nothing of a caller runs under its lock.
class BatchQueue {
 public:
  explicit BatchQueue(BatcherOptions options);

  uint64_t add(BatchRequest request, int64_t new_tokens);
  uint64_t refuse(Refusal refusal);
  bool cancel(uint64_t id);

  // The request that waits longest; null: none.
  QueuedRequestPtr next();
  // Out of the queue: those that were cancelled in it.
  std::vector<QueuedRequestPtr> take_cancelled();
  // The request is over, as its result says.
  void finish(BatchResult result);
  // Hands results to on_finished; false if there were none.
  bool deliver();
  std::vector<BatchResult> take_finished();
  // Sleeps until there is something to do.
  void wait(const std::stop_token& stop);

  BatchStats stats() const;
  template <typename Change>
  void count(Change change) {
    const std::scoped_lock lock(mutex_);
    change(stats_);
  }

 private:
  uint64_t refuse_locked(Refusal refusal);
  void keep_locked(BatchResult result);

  const BatcherOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable_any work_;
  uint64_t last_id_ = 0;
  std::deque<QueuedRequestPtr> waiting_;
  std::unordered_map<uint64_t, QueuedRequestPtr> open_;  // no result yet
  std::deque<BatchResult> finished_;
  BatchStats stats_;
};

}  // namespace kvcache::model
