#include "kvcache/slot_cache.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace kvcache {

SlotCache::SlotCache(CacheSpec spec, const WindowOptions& options)
    : WindowCache("SlotCache", std::move(spec), options),
      taken_(static_cast<size_t>(this->spec().rows), false) {}

std::optional<int64_t> SlotCache::acquire() {
  check_idle("acquire");
  const auto free = std::find(taken_.begin(), taken_.end(), false);
  if (free == taken_.end()) {
    return {};
  }
  const int64_t slot = free - taken_.begin();
  reset(slot);
  *free = true;
  return slot;
}

std::optional<int64_t> SlotCache::admit(const Checkpoint& from) {
  const std::optional<int64_t> slot = acquire();
  if (!slot) {
    return {};
  }
  try {
    restore(from, *slot);
  } catch (...) {
    release(*slot);
    throw;
  }
  return slot;
}

void SlotCache::release(int64_t slot) {
  check_idle("release");
  TORCH_CHECK_VALUE(taken(slot), "[SlotCache::release] slot ", slot,
                    " must be taken but is free; release it once.");
  reset(slot);
  taken_[static_cast<size_t>(slot)] = false;
}

bool SlotCache::taken(int64_t slot) const {
  TORCH_CHECK_INDEX(slot >= 0 && slot < spec().rows,
                    "[SlotCache::taken] slot must be in [0, ", spec().rows,
                    ") but got ", slot, "; use one that acquire() gave.");
  return taken_[static_cast<size_t>(slot)];
}

int64_t SlotCache::free_slots() const noexcept {
  return std::count(taken_.begin(), taken_.end(), false);
}

void SlotCache::do_default_count(const StepSpec& spec,
                                 std::vector<int64_t>& count) const {
  if (!spec.count.empty()) {
    return;
  }
  for (size_t row = 0; row < count.size(); ++row) {
    if (!taken_[static_cast<size_t>(spec.first_row) + row]) {
      count[row] = 0;
    }
  }
}

void SlotCache::do_reorder(std::span<const int64_t> rows) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(rows.size()) == spec().rows,
                    "[SlotCache::reorder] rows must name all ", spec().rows,
                    " slots but got ", rows.size(),
                    "; acquire() and release() change how many are in use.");
  std::vector<bool> taken;
  for (const int64_t row : rows) {
    taken.push_back(taken_[static_cast<size_t>(row)]);
  }
  WindowCache::do_reorder(rows);
  taken_ = std::move(taken);
}

std::unique_ptr<Cache> SlotCache::do_make() const {
  auto made = std::make_unique<SlotCache>(spec(), options());
  made->taken_ = taken_;
  return made;
}

}  // namespace kvcache
