// support/toy_replay.h - recorded steps of a toy model, one token per row.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "kvcache/step_graph.h"
#include "kvcache/window_cache.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {

inline constexpr int64_t kCapacity = 24;
inline const std::vector<int64_t> kBuckets = {4, 8, 16, kCapacity};

// Records work over `ids`, a static buffer of one token per row.
class Replayed {
 public:
  Replayed(Cache& cache, const Model& model, StepGraphOptions options = {})
      : cache_(cache),
        model_(model),
        ids_(static_cast<size_t>(cache.spec().rows), kDead),
        graph_(
            cache, [this](Step& step, int64_t i) { work(step, i); }, options) {}

  // One token per row; kDead for a row that is idle.
  std::vector<Floats> feed(const Ids& ids) {
    ids_ = ids;
    std::vector<int64_t> count;
    for (const int id : ids) {
      count.push_back(id == kDead ? 0 : 1);
    }
    graph_.run({.tokens = 1, .count = count});
    std::vector<Floats> rows;
    for (size_t row = 0; row < ids.size(); ++row) {
      rows.emplace_back(hidden_.begin() + row * kWidth,
                        hidden_.begin() + (row + 1) * kWidth);
    }
    return rows;
  }

  StepGraph& graph() { return graph_; }
  std::function<void(Step&step, int64_t repeat)> before = {}, after = {};
  Ids& ids() { return ids_; }

 private:
  void work(Step& step, int64_t repeat) {
    if (before) {
      before(step, repeat);
    }
    hidden_ = forward(model_, step, ids_, options_for(cache_));
    if (after) {
      after(step, repeat);
    }
  }

  Cache& cache_;
  const Model& model_;
  Ids ids_;
  Floats hidden_;
  StepGraph graph_;
};

inline std::unique_ptr<WindowCache> make_bucketed(
    const Model& model, int64_t rows = 1, at::ScalarType dtype = at::kFloat) {
  auto cache =
      std::make_unique<WindowCache>(spec_of(model, rows, kCapacity, dtype),
                                    WindowOptions{.buckets = kBuckets});
  poison(*cache);
  return cache;
}

}  // namespace kvcache::toy
