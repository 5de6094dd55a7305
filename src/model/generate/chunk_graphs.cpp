// chunk_graphs.cpp - record, replay, remember what failed.
#include "chunk_graphs.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <chrono>
#include <typeinfo>

#include "shared_graphs.h"

namespace kvcache::model {
namespace {

constexpr size_t kMostFailures = 3;  // that are kept as text
constexpr size_t kMostText = 160;    // characters of one

const char* name_of(GraphPart part) {
  switch (part) {
    case GraphPart::kLower:
      return "lo";
    case GraphPart::kUpper:
      return "up0";
    case GraphPart::kUpperAdapter:
      return "up1";
  }
  return "";
}

std::string first_line(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      ours != nullptr ? ours->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

ChunkGraphs::ChunkGraphs(std::shared_ptr<const RoutedModel> model,
                         const ChoiceOptions& options)
    : model_(std::move(model)),
      lengths_(options.lengths),
      spans_(options.spans),
      lower_cache_(model_->cache_spec(ModelPart::kLower, spans_.back()),
                   spans_),
      upper_cache_(model_->cache_spec(ModelPart::kUpper, spans_.back()),
                   spans_),
      ids_(at::zeros({1, lengths_.back()},
                     at::TensorOptions(at::kLong).device(model_->device()))),
      hidden_(at::zeros({1, spans_.back() + 1, model_->hidden_size()},
                        at::TensorOptions(at::kFloat).device(ids_.device()))),
      features_(model_->router()
                    ? at::zeros({model_->hidden_size()}, hidden_.options())
                    : Tensor()),
      slot_(at::zeros({1}, ids_.options())),
      positions_(at::full({1, options.max_slots}, -1, ids_.options())),
      chosen_(at::zeros({1, options.max_slots, model_->hidden_size()},
                        hidden_.options())),
      backend_(shared_graphs(options.graphs)),
      lower_(lower_cache_, lower_work(),
             {.backend = backend_, .inputs = {ids_, hidden_, features_}}),
      upper_(upper_cache_, upper_work(false),
             {.backend = backend_, .inputs = {hidden_, positions_, chosen_}}),
      adapter_(upper_cache_, upper_work(true),
               {.backend = backend_,
                .inputs = {hidden_, positions_, chosen_, slot_}}) {}

// Where the hidden states of a step's tokens are kept.
Tensor ChunkGraphs::places(const Step& step) const {
  return at::where(step.limits().gt(0), step.positions(), spans_.back())
      .view(-1);
}

StepGraph::Work ChunkGraphs::lower_work() {
  return [this](Step& step, int64_t) {
    const Tensor ids = ids_.narrow(1, 0, step.tokens());
    hidden_.index_copy_(1, places(step), model_->lower(ids, step, features_));
  };
}

StepGraph::Work ChunkGraphs::upper_work(bool adapter) {
  return [this, adapter](Step& step, int64_t) {
    const Tensor hidden = hidden_.index_select(1, places(step));
    chosen_.copy_(
        model_->upper(hidden, step, adapter ? slot_ : Tensor(), positions_));
  };
}

StepGraph& ChunkGraphs::graph(GraphPart part) noexcept {
  switch (part) {
    case GraphPart::kLower:
      return lower_;
    case GraphPart::kUpper:
      return upper_;
    case GraphPart::kUpperAdapter:
      break;
  }
  return adapter_;
}

int64_t ChunkGraphs::padded(int64_t tokens) const {
  const auto at = std::lower_bound(lengths_.begin(), lengths_.end(), tokens);
  return at == lengths_.end() ? 0 : *at;
}

std::optional<ChunkGraphs::Shape> ChunkGraphs::shape(const Chunk& chunk) const {
  const int64_t length = padded(chunk.second - chunk.first);
  const auto span =
      std::lower_bound(spans_.begin(), spans_.end(), chunk.first + length);
  if (length == 0 || span == spans_.end()) return {};
  return Shape{*span, length};
}

// A key that failed is not tried again until clear().
bool ChunkGraphs::capture(const Key& key) {
  if (captured_.contains(key)) return true;
  if (failed_.contains(key)) return false;
  const auto start = std::chrono::steady_clock::now();
  bool recorded = true;
  try {
    positions_.fill_(-1);  // those of a longer chunk may lie outside
    graph(key.part).capture(key.span, key.length);
    captured_.insert(key);
  } catch (const std::exception& error) {
    recorded = false;
    const std::string text =
        c10::str("(", name_of(key.part), ", ", key.span, ", ", key.length,
                 "): ", c10::demangle(typeid(error).name()), ": ",
                 first_line(error))
            .substr(0, kMostText);
    failed_.emplace(key, text);
    ++failure_count_;
    if (failures_.size() < kMostFailures) failures_.push_back(text);
  }
  ++captures_;
  seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  return recorded;
}

bool ChunkGraphs::ensure(const std::vector<Chunk>& chunks,
                         const std::vector<GraphPart>& parts) {
  for (const Chunk& chunk : chunks) {
    const auto of = shape(chunk);
    if (!of) return false;
    for (const GraphPart part : parts) {
      if (!capture({part, of->span, of->length})) return false;
    }
  }
  return true;
}

void ChunkGraphs::run(GraphPart part, const Chunk& chunk) {
  const Shape of = *shape(chunk);
  const std::vector<int64_t> live = {chunk.second - chunk.first};
  cache(part == GraphPart::kLower ? ModelPart::kLower : ModelPart::kUpper)
      .read(of.span);
  graph(part).run({.tokens = of.length, .count = live});
}

void ChunkGraphs::run_lower(const std::vector<int64_t>& ids,
                            const Chunk& chunk) {
  const auto& [first, last] = chunk;
  const Tensor given = at::tensor(
      at::ArrayRef<int64_t>(ids).slice(first, last - first), at::kLong);
  ids_.zero_().narrow(1, 0, last - first).copy_(given.unsqueeze(0));
  run(GraphPart::kLower, chunk);
}

const Tensor& ChunkGraphs::run_upper(GraphPart part, const Chunk& chunk,
                                     const std::vector<int64_t>& slots) {
  std::vector<int64_t> in_chunk(static_cast<size_t>(positions_.size(1)), -1);
  for (size_t i = 0; i < slots.size(); ++i) {
    in_chunk[i] = slots[i] - chunk.first;
  }
  positions_.copy_(at::tensor(in_chunk, at::kLong).unsqueeze(0));
  run(part, chunk);
  return chosen_;
}

PrecaptureResult ChunkGraphs::precapture(std::mutex* lock) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<GraphPart> parts = {GraphPart::kLower, GraphPart::kUpper};
  if (!model_->routes().empty()) parts.push_back(GraphPart::kUpperAdapter);
  for (const int64_t span : spans_) {
    for (const int64_t length : lengths_) {
      if (length > span) break;
      for (const GraphPart part : parts) {
        std::unique_lock<std::mutex> held;
        if (lock != nullptr) held = std::unique_lock(*lock);
        capture({part, span, length});
      }
    }
  }
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  return {static_cast<int64_t>(captured_.size()), took.count(), failures_};
}

void ChunkGraphs::clear() {
  for (StepGraph* graph : {&lower_, &upper_, &adapter_}) graph->clear();
  captured_.clear();
  failed_.clear();
}

void ChunkGraphs::add_to(ChoiceInfo& info) const {
  info.graphs = static_cast<int64_t>(captured_.size());
  info.captures = captures_;
  info.capture_seconds = seconds_;
  info.failures = failure_count_;
  info.failed = failures_;
}

}  // namespace kvcache::model
