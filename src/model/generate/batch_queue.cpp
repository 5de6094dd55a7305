// batch_queue.cpp - where requests wait and results are left.

#include "batch_queue.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvcache::model {

BatchQueue::BatchQueue(BatcherOptions options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(!options_.max_queued || *options_.max_queued >= 1,
                    "[Batcher::Batcher] max_queued must be at least 1 but got ",
                    *options_.max_queued,
                    "; leave it empty for a queue without a bound.");
}

uint64_t BatchQueue::add(BatchRequest request, int64_t new_tokens) {
  auto queued = std::make_shared<QueuedRequest>();
  queued->request = std::move(request);
  queued->new_tokens = new_tokens;
  const std::scoped_lock lock(mutex_);
  const auto waiting = static_cast<int64_t>(waiting_.size());
  if (options_.max_queued && waiting >= *options_.max_queued) {
    return refuse_locked(
        {.reason = RefusalReason::kQueueFull,
         .text = c10::str("[Batcher::submit] at most ", *options_.max_queued,
                          " requests may wait but ", waiting,
                          " do; submit it again later.")});
  }
  ++stats_.submitted;
  queued->id = ++last_id_;
  open_.emplace(queued->id, queued);
  waiting_.push_back(std::move(queued));
  work_.notify_all();
  return last_id_;
}

uint64_t BatchQueue::refuse(Refusal refusal) {
  const std::scoped_lock lock(mutex_);
  return refuse_locked(std::move(refusal));
}

uint64_t BatchQueue::refuse_locked(Refusal refusal) {
  ++stats_.submitted;
  keep_locked({.id = ++last_id_,
               .status = BatchStatus::kRefused,
               .refusal = refusal.reason,
               .error = std::move(refusal.text)});
  return last_id_;
}

bool BatchQueue::cancel(uint64_t id) {
  const std::scoped_lock lock(mutex_);
  const auto found = open_.find(id);
  if (found == open_.end()) return false;
  found->second->cancelled = true;
  return true;
}

QueuedRequestPtr BatchQueue::next() {
  const std::scoped_lock lock(mutex_);
  if (waiting_.empty()) return nullptr;
  QueuedRequestPtr first = std::move(waiting_.front());
  waiting_.pop_front();
  return first;
}

std::vector<QueuedRequestPtr> BatchQueue::take_cancelled() {
  const std::scoped_lock lock(mutex_);
  const auto waits = [](const QueuedRequestPtr& queued) {
    return !queued->stop_requested();
  };
  if (std::all_of(waiting_.begin(), waiting_.end(), waits)) return {};
  const auto kept =
      std::stable_partition(waiting_.begin(), waiting_.end(), waits);
  std::vector<QueuedRequestPtr> cancelled(
      std::make_move_iterator(kept), std::make_move_iterator(waiting_.end()));
  waiting_.erase(kept, waiting_.end());
  return cancelled;
}

void BatchQueue::finish(BatchResult result) {
  const std::scoped_lock lock(mutex_);
  open_.erase(result.id);
  keep_locked(std::move(result));
}

void BatchQueue::keep_locked(BatchResult result) {
  switch (result.status) {
    case BatchStatus::kFinished:
      ++stats_.finished;
      stats_.cancelled +=
          result.result.finish_reason == FinishReason::kCancelled;
      break;
    case BatchStatus::kRefused:
      ++stats_.refused;
      break;
    case BatchStatus::kFailed:
      ++stats_.failed;
      break;
  }
  finished_.push_back(std::move(result));
  if (options_.on_finished) work_.notify_all();
}

bool BatchQueue::deliver() {
  if (!options_.on_finished) return false;
  for (bool any = false;; any = true) {
    BatchResult result;
    {
      const std::scoped_lock lock(mutex_);
      if (finished_.empty()) return any;
      result = std::move(finished_.front());
      finished_.pop_front();
    }
    options_.on_finished(std::move(result));
  }
}

std::vector<BatchResult> BatchQueue::take_finished() {
  const std::scoped_lock lock(mutex_);
  if (options_.on_finished) return {};
  std::vector<BatchResult> taken(std::make_move_iterator(finished_.begin()),
                                 std::make_move_iterator(finished_.end()));
  finished_.clear();
  return taken;
}

void BatchQueue::wait(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  work_.wait(lock, stop, [&] {
    return !waiting_.empty() || (options_.on_finished && !finished_.empty());
  });
}

BatchStats BatchQueue::stats() const {
  const std::scoped_lock lock(mutex_);
  BatchStats stats = stats_;
  stats.queued = static_cast<int64_t>(waiting_.size());
  return stats;
}

}  // namespace kvcache::model
