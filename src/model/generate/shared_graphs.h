// shared_graphs.h - one backend for several StepGraphs.
#pragma once

#include <memory>

#include "kvcache/graph_backend.h"

namespace kvcache::model {

// A backend's memory may go only when the graphs of all of them are gone, and
// each of them knows its own only.
std::shared_ptr<GraphBackend> shared_graphs(
    std::shared_ptr<GraphBackend> backend);

}  // namespace kvcache::model
