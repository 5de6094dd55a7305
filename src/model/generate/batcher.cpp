// batcher.cpp - many requests through the rows of one cache.

#include "kvcache/model/batcher.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "batch_decode.h"
#include "batch_queue.h"
#include "batch_rows.h"
#include "feed.h"
#include "room.h"

namespace kvcache::model {
namespace {

constexpr const char* kSubmit = "Batcher::submit";

// What submit() decides: how many new tokens, or why none.
struct Plan {
  int64_t new_tokens = 0;
  std::optional<Refusal> refusal = {};
};

Plan plan(const LanguageModel& model, const Cache& cache,
          const BatchRequest& request) {
  const auto& [tokens, options, hooks] = request;
  auto reason = RefusalReason::kBadOptions;
  try {
    check_generate_options(kSubmit, model, options);
    const int64_t context =
        effective_context(kSubmit, model, options.context, options.chunk);
    if (tokens.empty()) {
      reason = RefusalReason::kBadPrompt;
    } else if (options.max_new_tokens.value_or(1) >= 1) {
      reason = RefusalReason::kTooLong;
    }
    const int64_t room =
        room_for_new(kSubmit, {.prompt = static_cast<int64_t>(tokens.size()),
                               .max_new_tokens = options.max_new_tokens,
                               .context = context,
                               .cache = &cache});
    reason = RefusalReason::kBadPrompt;
    check_ids(kSubmit, tokens, model.vocab_size());
    return {.new_tokens = room};
  } catch (const c10::Error& error) {
    return {.refusal = Refusal{.reason = reason,
                               .text = error.what_without_backtrace()}};
  }
}

// Marks a thread as the one that steps.
class Stepping {
 public:
  explicit Stepping(std::atomic<bool>& flag) : flag_(flag) {
    TORCH_CHECK(!flag_.exchange(true),
                "[Batcher::step] one thread steps at a time, and no hook; "
                "submit() and cancel() may be called from anywhere.");
  }
  ~Stepping() { flag_ = false; }
  Stepping(const Stepping&) = delete;
  Stepping& operator=(const Stepping&) = delete;

 private:
  std::atomic<bool>& flag_;
};

std::unique_ptr<Cache> checked(const LanguageModel* model,
                               std::unique_ptr<Cache> cache) {
  TORCH_CHECK_VALUE(model, "[Batcher::Batcher] the model must not be null.");
  TORCH_CHECK_VALUE(cache,
                    "[Batcher::Batcher] the cache must not be null; "
                    "generate() works without one.");
  model->check_cache(cache->spec());
  const auto lengths = cache->lengths();
  const auto used = std::find_if(lengths.begin(), lengths.end(),
                                 [](int64_t length) { return length > 0; });
  TORCH_CHECK_VALUE(used == lengths.end(),
                    "[Batcher::Batcher] the cache must be empty but row ",
                    used - lengths.begin(), " holds ", *used,
                    " tokens; reset() it.");
  return cache;
}

std::unique_ptr<BatchDecode> decode_for(const LanguageModel& model,
                                        Cache& cache,
                                        std::shared_ptr<GraphBackend> graphs) {
  auto* slots = dynamic_cast<SlotCache*>(&cache);
  while (slots != nullptr && slots->acquire()) {
  }  // for good: the batcher itself says who is active
  if (!graphs) return make_plain_decode(model, cache);
  TORCH_CHECK_VALUE(slots,
                    "[Batcher::Batcher] recorded steps need a SlotCache but "
                    "got ",
                    cache.describe(), "; make one, or leave graphs out.");
  return make_recorded_decode(model, *slots, std::move(graphs));
}

}  // namespace

std::string_view to_string(RefusalReason reason) noexcept {
  switch (reason) {
    case RefusalReason::kBadOptions:
      return "bad options";
    case RefusalReason::kBadPrompt:
      return "bad prompt";
    case RefusalReason::kTooLong:
      return "too long";
    case RefusalReason::kQueueFull:
      break;
  }
  return "queue full";
}

double BatchStats::mean_occupied() const noexcept {
  return decode_steps > 0 ? static_cast<double>(decode_tokens) /
                                static_cast<double>(decode_steps)
                          : 0.0;
}

struct Batcher::Impl {
  Impl(std::shared_ptr<const LanguageModel> of, std::unique_ptr<Cache> over,
       BatcherOptions options)
      : model(std::move(of)),
        cache(checked(model.get(), std::move(over))),
        decode(decode_for(*model, *cache, options.graphs)),
        // A cache that grows would grow with what nobody may need; a recorded
        // step computes with windows as long as the longest row.
        keeps_rows(cache->spec().capacity && !options.graphs),
        queue(std::move(options)),
        rows(*model, *cache, *decode, queue, keeps_rows) {}

  bool step() {
    const Stepping guard(stepping);
    const bool worked = rows.step();
    return queue.deliver() || worked;
  }

  std::shared_ptr<const LanguageModel> model;
  std::unique_ptr<Cache> cache;
  std::unique_ptr<BatchDecode> decode;
  bool keeps_rows;
  BatchQueue queue;
  BatchRows rows;
  std::atomic<bool> stepping = false;
};

Batcher::Batcher(std::shared_ptr<const LanguageModel> model,
                 std::unique_ptr<Cache> cache, BatcherOptions options)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(cache),
                                   std::move(options))) {}

Batcher::~Batcher() = default;

uint64_t Batcher::submit(BatchRequest request) {
  Plan planned = plan(*impl_->model, *impl_->cache, request);
  if (planned.refusal) return impl_->queue.refuse(std::move(*planned.refusal));
  return impl_->queue.add(std::move(request), planned.new_tokens);
}

std::optional<Refusal> Batcher::refusal(const BatchRequest& request) const {
  return plan(*impl_->model, *impl_->cache, request).refusal;
}

bool Batcher::cancel(uint64_t id) { return impl_->queue.cancel(id); }

bool Batcher::step() { return impl_->step(); }

void Batcher::run() {
  while (impl_->step()) {
  }
}

void Batcher::serve(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    if (!impl_->step()) impl_->queue.wait(stop);
  }
}

std::vector<BatchResult> Batcher::take_finished() {
  return impl_->queue.take_finished();
}

BatchStats Batcher::stats() const { return impl_->queue.stats(); }

const Cache& Batcher::cache() const noexcept { return *impl_->cache; }

}  // namespace kvcache::model
