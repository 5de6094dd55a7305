// kvcache/step_graph.h - a step recorded once and replayed.
//
// The graph of a window holds the device halves of begin and commit and the
// caller's work between them; every run does the host halves around it. Numbers
// of the step (lengths, live ranges) are on the device, so one graph serves
// every step of its shape and window. docs/cuda-graphs.md says what the work
// must keep.
#pragma once

#include <string>

#include "kvcache/cache.h"
#include "kvcache/graph_backend.h"

namespace kvcache {

struct StepGraphOptions {
  std::shared_ptr<GraphBackend> backend = {};  // null: eager_graphs()
  // Tensors that the work reads or writes beside the cache's. They must stay
  // where they are, and be made before.
  std::vector<Tensor> inputs = {};
  // [B] bool on the cache's device: a row that is set takes no more tokens. The
  // work may set it, for the repeats that follow. Undefined: rows never end.
  Tensor finished = {};
  // Of all graphs of this object. One that does not fit, alone, is not kept.
  std::optional<size_t> byte_budget = {};
};

struct GraphStatistics {
  int64_t captures = 0;
  double capture_seconds = 0;
  int64_t replays = 0;
  int64_t eager_runs = 0;   // of steps whose graph could not be had
  int64_t generations = 0;  // how often all graphs were retired together
  struct Graph {
    int64_t window = 0, repeats = 0;
    size_t bytes = 0;
  };
  std::vector<Graph> graphs = {};          // those of now
  std::vector<std::string> failures = {};  // "window 128: why", the first ones
};

// Over one cache, which must outlive it. Not thread-safe.
//
// A step is as strong as a plain one: if the work throws, lengths, states and
// every committed value are as before.
class StepGraph {
 public:
  // One step, not committed; `repeat` counts from 0. Reads no length and no
  // number of the host: Step::positions(), limits() and the views are tensors.
  using Work = std::function<void(Step& step, int64_t repeat)>;

  // Throws, with the reason, if steps of `cache` cannot be recorded.
  StepGraph(Cache& cache, Work work, const StepGraphOptions& options = {});
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // `repeats` steps of one spec in one replay; recorded first if there is no
  // graph for them. A recording that fails is remembered, and such steps run
  // eagerly. With `may_finish` only the device knows the lengths afterwards:
  // the cache throws until read_back().
  void run(const StepSpec& spec, int64_t repeats = 1, bool may_finish = false);
  // Takes over what the device counted; waits for it. Returns lengths().
  std::span<const int64_t> read_back();

  // Records ahead, over all rows, unless it is there. Leaves no trace in the
  // cache, whatever it holds. Returns the seconds it took; throws if it fails.
  double capture(int64_t window, int64_t tokens = 1, int64_t repeats = 1);
  // Retires all graphs, and forgets which recordings failed.
  void clear();

  const GraphStatistics& statistics() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvcache
