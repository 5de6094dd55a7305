// graphs.cpp - recorded steps for `--cache window`.

#include "examples/cli/graphs.h"

#ifdef KVCACHE_CLI_CUDA
#include "kvcache/cuda_graphs.h"
#endif

namespace kvcache::cli {

std::shared_ptr<GraphBackend> graphs_for(const ModelOptions& options) {
  if (!options.is_window() || options.graph == "off") {
    return nullptr;
  }
#ifdef KVCACHE_CLI_CUDA
  const at::Device device = options.torch_device();
  if (device.is_cuda() && options.graph != "eager") return cuda_graphs(device);
#endif
  return eager_graphs();
}

std::unique_ptr<model::GraphRunner> runner_for(
    const Engine& engine, const ModelOptions& options,
    const model::GenerateOptions& generate, Cache* cache) {
  auto graphs = graphs_for(options);
  auto* window = dynamic_cast<WindowCache*>(cache);
  if (!graphs || window == nullptr) return nullptr;
  std::vector<int64_t> ends;
  if (!generate.ignore_eos) {
    const auto declared = engine.model->end_tokens();
    ends.assign(declared.begin(), declared.end());
  }
  return std::make_unique<model::GraphRunner>(
      *engine.model, *window,
      model::GraphRunnerOptions{.backend = std::move(graphs),
                                .steps_per_replay = options.steps_per_replay,
                                .sampling = generate.sampling,
                                .end_tokens = std::move(ends)});
}

}  // namespace kvcache::cli
