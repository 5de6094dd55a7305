// kvcache/cuda_graphs.h - CUDA graphs for StepGraph; link kvcache::cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include "kvcache/graph_backend.h"

namespace kvcache {

// Graphs on one CUDA device, in one memory pool of their own. Work is run twice
// on a side stream, then captured there in thread-local mode, so that other
// threads may go on using CUDA. A replay goes to the current stream.
// Throws if `device` is no CUDA device of this machine. Not thread-safe.
std::shared_ptr<GraphBackend> cuda_graphs(at::Device device);

}  // namespace kvcache
