// chunk_graphs.h - the chunks of a request as recorded steps.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/model/choice_runner.h"
#include "kvcache/step_graph.h"
#include "kvcache/window_cache.h"

namespace kvcache::model {

// A window cache whose next steps read a span that is given, not the smallest
// that their live tokens fit into.
class SpanCache final : public WindowCache {
 public:
  SpanCache(CacheSpec spec, const std::vector<int64_t>& spans)
      : WindowCache(std::move(spec), {.buckets = spans}) {}
  void read(int64_t span) noexcept { span_ = span; }

 private:
  int64_t do_window(int64_t longest) const override {
    return std::max(bucket(longest), span_);
  }
  int64_t span_ = 0;
};

// Half-open range of positions.
using Chunk = std::pair<int64_t, int64_t>;

// What is recorded by itself. A chunk of the whole model is kLower and one of
// the others: no graph is recorded twice.
enum class GraphPart : uint8_t {
  kLower,        // "lo"
  kUpper,        // "up0": no adapter
  kUpperAdapter  // "up1": the adapter of a device index
};

// Graphs of one row, by part, span and padded length, over a cache for each
// part of the model; and the buffers that they read and write.
class ChunkGraphs {
 public:
  ChunkGraphs(std::shared_ptr<const RoutedModel> model,
              const ChoiceOptions& options);

  SpanCache& cache(ModelPart part) noexcept {
    return part == ModelPart::kLower ? lower_cache_ : upper_cache_;
  }
  // Of the row so far; undefined: there is no router.
  const Tensor& features() const noexcept { return features_; }
  void set_slot(int64_t index) { slot_.fill_(index); }

  // Span and padded length; empty: there are none for it.
  struct Shape {
    int64_t span = 0, length = 0;
  };
  std::optional<Shape> shape(const Chunk& chunk) const;
  int64_t padded(int64_t tokens) const;  // 0: longer than every length

  // Records what is missing of these; false if any cannot be had.
  bool ensure(const std::vector<Chunk>& chunks,
              const std::vector<GraphPart>& parts);
  // Of chunks that ensure() has seen. The lower part keeps the hidden states
  // that the upper one reads. `slots`: positions of the row to give the hidden
  // state of, [1, max_slots, W]; a buffer that the next run overwrites.
  void run_lower(const std::vector<int64_t>& ids, const Chunk& chunk);
  const Tensor& run_upper(GraphPart part, const Chunk& chunk,
                          const std::vector<int64_t>& slots = {});

  PrecaptureResult precapture(std::mutex* lock);
  void clear();
  void synchronize() { backend_->synchronize(); }
  void add_to(ChoiceInfo& info) const;

 private:
  struct Key {
    GraphPart part = GraphPart::kLower;
    int64_t span = 0, length = 0;
    auto operator<=>(const Key&) const = default;
  };
  StepGraph& graph(GraphPart part) noexcept;
  bool capture(const Key& key);
  void run(GraphPart part, const Chunk& chunk);
  Tensor places(const Step& step) const;
  StepGraph::Work lower_work();
  StepGraph::Work upper_work(bool adapter);

  std::shared_ptr<const RoutedModel> model_;
  std::vector<int64_t> lengths_, spans_;
  SpanCache lower_cache_, upper_cache_;
  Tensor ids_;        // [1, longest]
  Tensor hidden_;     // [1, largest span + 1, W]; the last one for dead tokens
  Tensor features_;   // [W]
  Tensor slot_;       // [1]
  Tensor positions_;  // [1, max_slots]
  Tensor chosen_;     // [1, max_slots, W]
  std::shared_ptr<GraphBackend> backend_;
  StepGraph lower_, upper_, adapter_;
  std::set<Key> captured_;
  std::map<Key, std::string> failed_;
  std::vector<std::string> failures_;  // the first ones, ever
  int64_t captures_ = 0, failure_count_ = 0;
  double seconds_ = 0;
};

}  // namespace kvcache::model
