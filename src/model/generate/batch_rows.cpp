// batch_rows.cpp - the requests in the rows of a batcher's cache.

#include "batch_rows.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "feed.h"

namespace kvcache::model {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torch) {
    return torch.what_without_backtrace();
  } catch (const std::exception& standard) {
    return standard.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

BatchRows::Row::Row(const LanguageModel& model, QueuedRequestPtr from,
                    const AdapterChoice& with, Namespace in)
    : queued(std::move(from)),
      sequence(queued->request.tokens),
      prompt(static_cast<int64_t>(sequence.size())),
      queued_ms(ms_since(queued->submitted)),
      adapter(with),
      space(std::move(in)),
      answer(model, sequence, queued->request.options, queued->request.hooks,
             queued->new_tokens) {}

void BatchRows::Row::report_prefill(int64_t done) const {
  const auto& hook = queued->request.hooks.on_prefill;
  if (hook) hook(done, prompt);
}

BatchRows::BatchRows(const LanguageModel& model, Cache& cache,
                     BatchDecode& decode, BatchQueue& queue, bool keeps_rows)
    : model_(model),
      cache_(cache),
      decode_(decode),
      queue_(queue),
      rows_(static_cast<size_t>(cache.spec().rows)),
      keeps_rows_(keeps_rows),
      kept_(cache),
      ids_(rows_.size()),
      active_(rows_.size()),
      alone_(rows_.size()) {
  queue_.count([&](BatchStats& stats) { stats.rows = cache.spec().rows; });
}

bool BatchRows::step() {
  bool worked = drop_cancelled();
  worked = admit() || worked;
  const bool decodes = std::any_of(
      rows_.begin(), rows_.end(),
      [](const std::optional<Row>& row) { return row && row->decoding; });
  if (prefilling_.empty() && !decodes) return worked;
  // In turns, so that neither long prompts nor long texts hold up the other.
  const bool prefills = !prefilling_.empty() && (prefill_turn_ || !decodes);
  prefill_turn_ = !prefills;
  if (prefills) {
    prefill();
  } else {
    decode();
  }
  return true;
}

bool BatchRows::drop_cancelled() {
  const auto cancelled = queue_.take_cancelled();
  for (const QueuedRequestPtr& queued : cancelled) {
    BatchResult result{.id = queued->id,
                       .queued_ms = ms_since(queued->submitted)};
    result.result.finish_reason = FinishReason::kCancelled;
    result.result.seed = queued->request.options.sampling.seed.value_or(0);
    queue_.finish(std::move(result));
  }
  bool any = !cancelled.empty();
  for (int64_t row = 0; row < cache_.spec().rows; ++row) {
    const auto& held = rows_[static_cast<size_t>(row)];
    if (!held || !held->queued->stop_requested()) continue;
    any = true;
    guard(row, [&] {
      at(row).answer.cancel();
      return true;
    });
  }
  return any;
}

bool BatchRows::admit() {
  bool any = false;
  const auto is_free = [](const std::optional<Row>& row) { return !row; };
  while (std::any_of(rows_.begin(), rows_.end(), is_free)) {
    const QueuedRequestPtr queued = queue_.next();
    if (!queued) break;
    admit(queued);
    any = true;
  }
  return any;
}

void BatchRows::admit(const QueuedRequestPtr& queued) {
  const GenerateOptions& options = queued->request.options;
  int64_t row = 0;
  try {
    const AdapterChoice adapter = choose_adapter(
        "Batcher", model_, options.adapter, options.adapter_from);
    const Namespace space = with_adapter(options.space, model_, adapter);
    row = row_for(*queued, space);
    rows_[static_cast<size_t>(row)].emplace(model_, queued, adapter, space);
  } catch (...) {
    const auto error = std::current_exception();
    queue_.finish({.id = queued->id,
                   .status = BatchStatus::kFailed,
                   .error = text_of(error),
                   .exception = error,
                   .queued_ms = ms_since(queued->submitted)});
    return;
  }
  decode_.set_adapter(row, at(row).adapter);
  prefilling_.push_back(row);
  queue_.count([](BatchStats& stats) {
    ++stats.occupied_rows;
    stats.most_occupied = std::max(stats.most_occupied, stats.occupied_rows);
  });
}

// A free row, with as much of the prompt as one of them holds.
int64_t BatchRows::row_for(const QueuedRequest& queued,
                           const Namespace& space) {
  std::vector<int64_t> free;
  for (int64_t row = 0; row < cache_.spec().rows; ++row) {
    if (!rows_[static_cast<size_t>(row)]) free.push_back(row);
  }
  const auto& prefix = queued.request.options.prefix;
  if (!prefix) return kept_.take(free, nullptr);
  const RowRequest request{queued.request.tokens, space,
                           prefix->restore_multiple()};
  return kept_.take(free, &request);
}

void BatchRows::prefill() {
  const int64_t row = prefilling_.front();
  guard(row, [&] { return prefill_chunk(row); });
}

// As late as can be, so that it sees what others left meanwhile.
void BatchRows::restore_prefix(int64_t row) {
  Row& held = at(row);
  const GenerateOptions& options = held.queued->request.options;
  if (!options.prefix || held.prefix) return;
  held.prefix.emplace(*options.prefix, cache_, row, held.sequence, held.space,
                      options.marks);
  GenerateResult& result = held.answer.result();
  result.reuse = std::make_shared<Reuse>(held.prefix->reuse());
  result.reused = cache_.lengths()[static_cast<size_t>(row)];
}

bool BatchRows::prefill_chunk(int64_t row) {
  Row& held = at(row);
  const auto start = Clock::now();
  restore_prefix(row);
  const int64_t done = cache_.lengths()[static_cast<size_t>(row)];
  const int64_t chunk = held.queued->request.options.chunk;
  const int64_t end = held.prefix
                          ? held.prefix->step_end(done)
                          : std::min(done - done % chunk + chunk, held.prompt);
  GenerateTimings& timings = held.answer.result().timings;
  Tensor logits;
  if (held.prefix) logits = held.prefix->logits();
  if (!logits.defined()) {
    logits = feed(model_, cache_,
                  ids_tensor(std::span<const int64_t>(held.sequence)
                                 .subspan(static_cast<size_t>(done),
                                          static_cast<size_t>(end - done))),
                  with_adapter({.role = Role::kPrefill}, held.adapter), row);
    if (held.prefix) held.prefix->prefilled(end, logits);
    queue_.count([&](BatchStats& stats) {
      ++stats.prefill_steps;
      stats.prefill_tokens += end - done;
    });
    timings.prefill_tokens += end - done;
  }
  timings.prefill_ms += ms_since(start);
  held.report_prefill(std::min(end, held.prompt));
  if (end < held.prompt) return false;
  prefilling_.pop_front();
  held.decoding = true;
  return held.answer.take(logits_row(logits));
}

void BatchRows::decode() {
  int64_t decoding = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    active_[i] = rows_[i] && rows_[i]->decoding ? 1 : 0;
    ids_[i] = active_[i] == 1 ? rows_[i]->sequence.back() : 0;
    decoding += active_[i];
  }
  const auto start = Clock::now();
  bool done = decoding > 1;
  if (done) {
    try {
      decode_.step(ids_, active_);
    } catch (
        ...) {  // nothing was committed; one by one shows whose fault it is
      done = false;
    }
  }
  const double ms = ms_since(start);
  queue_.count([&](BatchStats& stats) {
    ++stats.decode_steps;
    stats.decode_tokens += decoding;
    stats.redone_steps += decoding > 1 && !done;
  });
  for (int64_t row = 0; row < cache_.spec().rows; ++row) {
    if (active_[static_cast<size_t>(row)] == 0) continue;
    if (done) {
      guard(row, [&] { return take_decoded(row, ms); });
    } else {
      guard(row, [&] {
        decode_alone(row);
        return take_decoded(row, ms_since(start));
      });
    }
  }
}

void BatchRows::decode_alone(int64_t row) {
  std::fill(alone_.begin(), alone_.end(), 0);
  alone_[static_cast<size_t>(row)] = 1;
  decode_.step(ids_, alone_);
}

bool BatchRows::take_decoded(int64_t row, double ms) {
  Answer& answer = at(row).answer;
  answer.result().timings.decode_ms += ms;
  ++answer.result().timings.decode_steps;
  return answer.take(decode_.logits(row));
}

template <typename Work>
void BatchRows::guard(int64_t row, Work work) {
  try {
    if (work()) finish(row);
  } catch (...) {
    fail(row, std::current_exception());
  }
}

void BatchRows::finish(int64_t row) {
  Row& held = at(row);
  if (held.prefix) held.prefix->keep(held.sequence);
  held.answer.result().cache_length =
      cache_.lengths()[static_cast<size_t>(row)];
  release(row,
          {.id = held.queued->id,
           .result = held.answer.finish(),
           .queued_ms = held.queued_ms},
          may_keep(held));
}

bool BatchRows::may_keep(const Row& row) const {
  return keeps_rows_ && row.prefix && row.decoding;
}

void BatchRows::fail(int64_t row, const std::exception_ptr& error) {
  Row& held = at(row);
  held.answer.result().cache_length =
      cache_.lengths()[static_cast<size_t>(row)];
  release(row, {.id = held.queued->id,
                .status = BatchStatus::kFailed,
                .result = held.answer.finish_after_error(),
                .error = text_of(error),
                .exception = error,
                .queued_ms = held.queued_ms});
}

void BatchRows::release(int64_t row, BatchResult result, bool keep) {
  if (keep) {
    const Row& held = at(row);
    const auto length =
        static_cast<size_t>(cache_.lengths()[static_cast<size_t>(row)]);
    kept_.keep(row, std::span(held.sequence).first(length), held.prompt,
               held.space);
  } else {
    cache_.reset(row);
  }
  std::erase(prefilling_, row);
  rows_[static_cast<size_t>(row)].reset();
  queue_.count([](BatchStats& stats) { --stats.occupied_rows; });
  queue_.finish(std::move(result));
}

}  // namespace kvcache::model
