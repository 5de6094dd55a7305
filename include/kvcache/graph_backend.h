// kvcache/graph_backend.h - what records work once and replays it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace kvcache {

// Recorded work. Destroying it gives its memory back to its backend.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  virtual void replay() = 0;
  virtual size_t bytes() const = 0;  // held for it beside the caller's tensors
};

// Graphs of one backend share memory, so they are retired together.
class GraphBackend {
 public:
  virtual ~GraphBackend() = default;
  virtual const char* name() const = 0;  // "cuda", "eager"
  // Runs `work` until nothing in it is made lazily, then records it. Throws
  // with the reason if it cannot be recorded; no memory is left behind.
  virtual std::unique_ptr<RecordedWork> record(
      const std::function<void()>& work) = 0;
  virtual void synchronize() = 0;
  // All recorded work is gone: shared memory may go as well.
  virtual void retired() {}
};

// Keeps the function and runs it again: the same bookkeeping and the same
// results on any device, without a graph.
std::shared_ptr<GraphBackend> eager_graphs();

}  // namespace kvcache
