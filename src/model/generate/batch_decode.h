// batch_decode.h - the decode step that the rows of a batch share.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "adapter_choice.h"
#include "kvcache/model/graph_model.h"
#include "kvcache/model/language_model.h"
#include "kvcache/slot_graph_decoder.h"

namespace kvcache::model {

// One token for some rows of a cache. B rows of the cache, V vocabulary.
class BatchDecode {
 public:
  explicit BatchDecode(GraphAdapters adapters)
      : adapters_(std::move(adapters)) {}
  virtual ~BatchDecode() = default;

  // What row `row` runs with from now on.
  void set_adapter(int64_t row, const AdapterChoice& choice) {
    adapters_.set_row(row, choice.index, choice.from);
  }

  // A committed step of `ids` [B] in the rows whose `active` [B] is 1; at least
  // one is. The others are 0: idle, their ids are not read. If it throws, no
  // row has changed.
  virtual void step(std::span<const int64_t> ids,
                    std::span<const int64_t> active) = 0;
  // Raw logits [V] of an active row of the last step, float32 on the host. The
  // next step overwrites them.
  virtual std::span<const float> logits(int64_t row) const = 0;

 protected:
  GraphAdapters adapters_;
};

// For any kind: a plain step over the rows from the first to the last active
// one. `model` and `cache` must outlive it.
std::unique_ptr<BatchDecode> make_plain_decode(const LanguageModel& model,
                                               Cache& cache);

// By recorded steps over all slots, which must be taken. The same lifetimes.
std::unique_ptr<BatchDecode> make_recorded_decode(
    const LanguageModel& model, SlotCache& slots,
    std::shared_ptr<GraphBackend> graphs);

}  // namespace kvcache::model
