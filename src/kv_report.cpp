#include "kv_report.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iomanip>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>

#include "kv_format.h"
#include "storage.h"

namespace kvcache {
namespace {

// "3" if all are 3, "2..4" otherwise.
std::string range_text(const std::set<int64_t>& values) {
  if (values.empty()) {
    return "0";
  }
  std::string text = std::to_string(*values.begin());
  if (values.size() > 1) {
    text += ".." + std::to_string(*values.rbegin());
  }
  return text;
}

}  // namespace

std::vector<AttentionLayer> attention_layers(const CacheSpec& spec) {
  std::vector<AttentionLayer> found;
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
      found.push_back(*attention);
    }
  }
  return found;
}

size_t token_bytes(const CacheSpec& spec) {
  size_t bytes = 0;
  for (const AttentionLayer& layer : attention_layers(spec)) {
    const int64_t record =
        value_bytes(spec.kv_format, spec.dtype, layer.head_dim) +
        scale_bytes(spec.kv_format);
    bytes += 2 * static_cast<size_t>(layer.heads * record);
  }
  return bytes;
}

void add_kv_use(MemoryReport& report, const Cache& cache,
                const std::vector<AttentionLayer>& layers) {
  const CacheSpec& spec = cache.spec();
  const auto tokens = std::accumulate(cache.lengths().begin(),
                                      cache.lengths().end(), int64_t{0});
  size_t one = 0;  // bytes of K, or of V, of a token in all layers
  for (const AttentionLayer& layer : layers) {
    one += static_cast<size_t>(layer.heads * layer.head_dim) *
           c10::elementSize(spec.dtype);
  }
  for (MemoryUse* use : {&report.k, &report.v}) {
    use->used = static_cast<size_t>(tokens) * one;
    if (spec.capacity) {
      use->capacity = static_cast<size_t>(*spec.capacity * spec.rows) * one;
    } else if (layers.empty()) {
      use->capacity = 0;
    }
  }
}

std::string describe_cache(const char* kind, const Cache& cache,
                           const std::vector<AttentionLayer>& layers) {
  const CacheSpec& spec = cache.spec();
  std::set<int64_t> heads, dims;
  for (const AttentionLayer& layer : layers) {
    heads.insert(layer.heads);
    dims.insert(layer.head_dim);
  }
  const MemoryReport memory = cache.memory();
  const double mib =
      static_cast<double>(memory.total().reserved) / (1024.0 * 1024.0);
  std::ostringstream text;
  text << kind << "(layers=" << spec.layers.size() << ", rows=" << spec.rows
       << ", capacity="
       << (spec.capacity ? std::to_string(*spec.capacity) : "unbounded")
       << ", kv_heads=" << range_text(heads)
       << ", head_dim=" << range_text(dims)
       << ", dtype=" << dtype_text(spec.dtype)
       << (spec.kv_format == KvFormat::kInt8 ? ", K/V in int8, " : ", ")
       << std::fixed << std::setprecision(1) << mib << " MiB, "
       << std::setprecision(0)
       << static_cast<double>(token_bytes(spec)) / 1024.0
       << " KiB/token, length="
       << *std::max_element(cache.lengths().begin(), cache.lengths().end())
       << ")";
  return text.str();
}

}  // namespace kvcache
