// Byte counts of what types.h describes.
#include "kvcache/types.h"

#include "storage.h"

namespace kvcache {

size_t Checkpoint::bytes() const {
  StorageBytes counted;
  for (const KvTensors& pair : kv) {
    counted.add(pair.k);
    counted.add(pair.v);
  }
  for (const auto& block : blocks) {
    for (const KvTensors& pair : block->kv) {
      counted.add(pair.k);
      counted.add(pair.v);
    }
  }
  for (const auto& point : points) {
    counted.add(point->conv);
    counted.add(point->state);
  }
  return counted.total();
}

MemoryUse MemoryReport::total() const {
  MemoryUse sum{.capacity = 0};
  for (const MemoryUse* part :
       {&k, &v, &scales, &conv, &recurrent, &restore_points, &graphs}) {
    sum.used += part->used;
    sum.reserved += part->reserved;
    if (!part->capacity) {
      sum.capacity.reset();
    } else if (sum.capacity) {
      *sum.capacity += *part->capacity;
    }
  }
  return sum;
}

}  // namespace kvcache
