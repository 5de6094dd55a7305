// graphs.h - recorded steps for `--cache window`.
#pragma once

#include <memory>

#include "examples/cli/engine.h"
#include "kvcache/model/graph_model.h"

namespace kvcache::cli {

// What --graph asks for; null: plain steps.
std::shared_ptr<GraphBackend> graphs_for(const ModelOptions& options);

// The recorded steps of one text after another over `cache`; null unless it is
// a window and --graph is not off. Ends of replays are those of `engine`.
std::unique_ptr<model::GraphRunner> runner_for(
    const Engine& engine, const ModelOptions& options,
    const model::GenerateOptions& generate, Cache* cache);

}  // namespace kvcache::cli
