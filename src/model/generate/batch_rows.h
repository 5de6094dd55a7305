// batch_rows.h - the requests in the rows of a batcher's cache.
#pragma once

#include <deque>
#include <exception>
#include <optional>
#include <vector>

#include "answer.h"
#include "batch_decode.h"
#include "batch_queue.h"
#include "kept_rows.h"
#include "kvcache/model/prefix_cache.h"

namespace kvcache::model {

// Admits, prefills, decodes and lets go. Used by one thread.
class BatchRows {
 public:
  // All must outlive it. `keeps_rows`: texts with a prefix cache stay in their
  // row until another request needs it.
  BatchRows(const LanguageModel& model, Cache& cache, BatchDecode& decode,
            BatchQueue& queue, bool keeps_rows);

  // One unit of work; false if there was none.
  bool step();

 private:
  struct Row {
    Row(const LanguageModel& model, QueuedRequestPtr from,
        const AdapterChoice& with, Namespace in);
    void report_prefill(int64_t done) const;

    QueuedRequestPtr queued;
    std::vector<int64_t>& sequence;  // the prompt and what was sampled
    int64_t prompt;                  // tokens
    double queued_ms;
    AdapterChoice adapter;
    Namespace space;  // of its text, adapter included
    Answer answer;
    bool decoding = false;            // the whole prompt is in the cache
    std::optional<PrefixRun> prefix;  // once its prefill has begun
  };

  bool drop_cancelled();
  bool admit();
  void admit(const QueuedRequestPtr& queued);
  int64_t row_for(const QueuedRequest& queued, const Namespace& space);
  void prefill();
  void restore_prefix(int64_t row);
  bool prefill_chunk(int64_t row);
  void decode();
  void decode_alone(int64_t row);
  bool take_decoded(int64_t row, double ms);

  // Runs `work`, true when the text is over; what it throws ends the request.
  template <typename Work>
  void guard(int64_t row, Work work);
  void finish(int64_t row);
  void fail(int64_t row, const std::exception_ptr& error);
  bool may_keep(const Row& row) const;
  void release(int64_t row, BatchResult result, bool keep = false);

  Row& at(int64_t row) { return *rows_[static_cast<size_t>(row)]; }

  const LanguageModel& model_;
  Cache& cache_;
  BatchDecode& decode_;
  BatchQueue& queue_;
  std::vector<std::optional<Row>> rows_;  // [B]; empty: a free slot
  bool keeps_rows_;
  KeptRows kept_;
  std::deque<int64_t> prefilling_;  // rows, as they were admitted
  bool prefill_turn_ = true;
  std::vector<int64_t> ids_, active_, alone_;  // [B] of the next decode step
};

}  // namespace kvcache::model
