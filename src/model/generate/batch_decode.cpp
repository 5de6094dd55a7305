// batch_decode.cpp - the shared decode step as a plain step of any cache.

#include "batch_decode.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "feed.h"
#include "kvcache/model/graph_model.h"

namespace kvcache::model {
namespace {

class PlainDecode final : public BatchDecode {
 public:
  PlainDecode(const LanguageModel& model, Cache& cache)
      : BatchDecode(GraphAdapters(model, cache.spec().rows)),
        model_(model),
        cache_(cache),
        ids_(at::zeros({cache.spec().rows, 1}, at::kLong)) {}

  void step(std::span<const int64_t> ids,
            std::span<const int64_t> active) override {
    const auto first =
        std::find(active.begin(), active.end(), 1) - active.begin();
    const auto end =
        active.rend() - std::find(active.rbegin(), active.rend(), 1);
    choose_rows(first, end - first);
    std::copy(ids.begin(), ids.end(), ids_.mutable_data_ptr<int64_t>());
    const c10::InferenceMode guard;
    Step step =
        cache_.begin_step({.count = active.subspan(static_cast<size_t>(first_),
                                                   static_cast<size_t>(rows_)),
                           .first_row = first_,
                           .rows = rows_});
    const Tensor logits =
        model_
            .forward(chosen_, step,
                     adapters_.in({.role = Role::kDecode}, first_, rows_))
            .to(at::kCPU)
            .contiguous();
    logits_row(logits);  // what is no logits must not be committed
    step.commit();
    logits_ = logits;
  }

  std::span<const float> logits(int64_t row) const override {
    return logits_row(logits_, row - first_);
  }

 private:
  void choose_rows(int64_t first, int64_t rows) {
    if (chosen_.defined() && first == first_ && rows == rows_) return;
    chosen_ = ids_.narrow(0, first, rows);
    first_ = first;
    rows_ = rows;
  }

  const LanguageModel& model_;
  Cache& cache_;
  Tensor ids_;     // [B, 1]
  Tensor chosen_;  // rows [first_, first_ + rows_) of it
  int64_t first_ = 0, rows_ = 0;
  Tensor logits_;  // [rows_, 1, V]
};

class RecordedDecode final : public BatchDecode {
 public:
  RecordedDecode(const LanguageModel& model, SlotCache& slots,
                 std::shared_ptr<GraphBackend> graphs)
      : BatchDecode(GraphAdapters(model, slots.spec().rows)),
        decoder_(graph_model(model, adapters_), slots,
                 {.backend = std::move(graphs)}),
        ids_(at::zeros({slots.spec().rows, 1}, at::kLong)) {}

  void step(std::span<const int64_t> ids,
            std::span<const int64_t> active) override {
    std::copy(ids.begin(), ids.end(), ids_.mutable_data_ptr<int64_t>());
    active_.assign(active.begin(), active.end());
    const c10::InferenceMode guard;
    logits_ = decoder_.step(ids_, active_).to(at::kCPU);
  }

  std::span<const float> logits(int64_t row) const override {
    return logits_row(logits_, row);
  }

 private:
  SlotGraphDecoder decoder_;
  Tensor ids_;  // [B, 1]
  std::vector<uint8_t> active_;
  Tensor logits_;  // [B, 1, V]; on the CPU the decoder's own
};

}  // namespace

std::unique_ptr<BatchDecode> make_recorded_decode(
    const LanguageModel& model, SlotCache& slots,
    std::shared_ptr<GraphBackend> graphs) {
  return std::make_unique<RecordedDecode>(model, slots, std::move(graphs));
}

std::unique_ptr<BatchDecode> make_plain_decode(const LanguageModel& model,
                                               Cache& cache) {
  return std::make_unique<PlainDecode>(model, cache);
}

}  // namespace kvcache::model
