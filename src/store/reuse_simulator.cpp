#include "kvcache/reuse_simulator.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace kvcache {
namespace {

constexpr int64_t kBlock = 64;  // tokens, as BlockOptions has it

Tensor without_memory(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).device(at::kMeta));
}

KvBlocks blocks_of(int64_t tokens, const Hit& hit, size_t token_bytes) {
  KvBlocks blocks;
  int64_t end = 0;
  if (hit.text != nullptr) {
    for (const auto& block : hit.text->parts[0].blocks) {
      const int64_t last = block->first + block->tokens;
      if (last > hit.position || last % kBlock != 0) break;
      blocks.push_back(block);
      end = last;
    }
  }
  for (; end < tokens; end += kBlock - end % kBlock) {
    auto block = std::make_shared<KvBlock>();
    block->first = end;
    block->tokens = std::min(tokens - end, kBlock);
    const auto count = static_cast<size_t>(block->tokens);
    block->kv.push_back({.k = without_memory(count * token_bytes), .v = {}});
    blocks.push_back(std::move(block));
  }
  return blocks;
}

Checkpoint memory_of(int64_t tokens, const Hit& hit,
                     const std::vector<int64_t>& positions,
                     const SimulatedModel& model) {
  Checkpoint part{.length = tokens,
                  .layers = {AttentionLayer{.heads = 1, .head_dim = 1}}};
  part.blocks = blocks_of(tokens, hit, model.token_bytes);
  if (model.point_bytes == 0) return part;
  part.layers.emplace_back(RecurrentLayer{.state_shape = {1}});
  for (const int64_t position : positions) {
    RestorePoint point{.position = position, .conv = {}, .state = {}};
    point.state = without_memory(model.point_bytes);
    part.points.push_back(
        std::make_shared<const RestorePoint>(std::move(point)));
  }
  return part;
}

}  // namespace

double SimulationResult::reused() const noexcept {
  const int64_t tokens = stats.tokens_reused + stats.tokens_computed;
  return tokens == 0 ? 0
                     : static_cast<double>(stats.tokens_reused) /
                           static_cast<double>(tokens);
}

SimulationResult simulate(const PlacementPolicy& policy,
                          std::span<const TraceRequest> trace, size_t budget,
                          const SimulatedModel& model,
                          EvictionPolicy eviction) {
  CheckpointStore store(
      {.max_bytes = budget,
       .min_prefix = std::max<int64_t>(policy.options().min_prefix, 1),
       .eviction = eviction});
  for (const TraceRequest& request : trace) {
    const Hit hit = store.lookup({.tokens = request.tokens});
    // All but the last token, as a generation has it when it begins.
    const auto n = static_cast<int64_t>(request.tokens.size()) - 1;
    std::vector<int64_t> positions;
    if (n > hit.position) {
      positions = policy.positions(hit.position, n, request.marks,
                                   hit.report.divergence);
    }
    if (positions.empty()) continue;
    const int64_t length = positions.back();
    const int64_t fresh = length - hit.position + kBlock;
    PutRequest put;
    put.tokens = std::span(request.tokens).first(length);
    put.positions = positions;
    put.bytes = static_cast<size_t>(fresh) * model.token_bytes +
                positions.size() * model.point_bytes;
    store.put(put, [&] {
      return StoredText{.parts = {memory_of(length, hit, positions, model)}};
    });
  }
  return {.stats = store.stats()};
}

}  // namespace kvcache
