// kvcache/reuse_simulator.h - how much a store would have reused of a recorded
// trace: placement and eviction compared without a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/checkpoint_policy.h"
#include "kvcache/checkpoint_store.h"

namespace kvcache {

struct TraceRequest {
  std::vector<int64_t> tokens = {};  // of the prompt
  std::vector<int64_t> marks = {};   // for PlacementPolicy::positions
};

struct SimulatedModel {
  size_t point_bytes = 0;  // states of one checkpoint; 0: attention only
  size_t token_bytes = 0;  // K and V of one token, all layers
};

struct SimulationResult {
  StoreStats stats = {};
  double reused() const noexcept;  // tokens_reused of all tokens; 0 if none
};

// Every request looks up, continues, and puts what `policy` places. Nothing is
// computed and no tensor has memory; bytes are counted as they would be.
// `budget` in bytes, of all texts together.
SimulationResult simulate(const PlacementPolicy& policy,
                          std::span<const TraceRequest> trace, size_t budget,
                          const SimulatedModel& model,
                          EvictionPolicy eviction = EvictionPolicy::kLru);

}  // namespace kvcache
