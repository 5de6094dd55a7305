// What every K/V kind reports alike.
#pragma once

#include <string>
#include <vector>

#include "kvcache/cache.h"

namespace kvcache {

std::vector<AttentionLayer> attention_layers(const CacheSpec& spec);

// Sets used and capacity bytes of K and V from lengths() and the spec.
void add_kv_use(MemoryReport& report, const Cache& cache,
                const std::vector<AttentionLayer>& layers);

// "<kind>(layers=2, capacity=16, kv_heads=2, head_dim=8, dtype=float32,
// 0.1 MiB, 2 KiB/token, length=3)"
std::string describe_cache(const char* kind, const Cache& cache,
                           const std::vector<AttentionLayer>& layers);

// Bytes of K and V that one more token of one row takes.
size_t token_bytes(const CacheSpec& spec);

}  // namespace kvcache
