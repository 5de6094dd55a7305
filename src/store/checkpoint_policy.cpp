#include "kvcache/checkpoint_policy.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace kvcache {
namespace {

using Positions = std::set<int64_t>;

// Where gaps are longer than a chunk, checkpoints at chunk lengths from the
// last one on.
std::vector<int64_t> with_cuts(const Positions& ends, int64_t from,
                               int64_t chunk) {
  std::vector<int64_t> all;
  for (const int64_t end : ends) {
    while (chunk > 0 && end - from > chunk) all.push_back(from += chunk);
    all.push_back(from = end);
  }
  return all;
}

}  // namespace

PlacementPolicy::PlacementPolicy(const PlacementOptions& options)
    : options_(options) {
  const PlacementOptions& o = options_;
  TORCH_CHECK_VALUE(o.stride >= 0 && o.tail >= 0 && o.align >= 0 &&
                        o.max_chunk >= 0 && o.min_prefix >= 0,
                    "[PlacementPolicy::PlacementPolicy] counts must be >= 0 "
                    "but got stride ",
                    o.stride, ", tail ", o.tail, ", align ", o.align,
                    ", max_chunk ", o.max_chunk, ", min_prefix ", o.min_prefix,
                    ".");
  TORCH_CHECK_VALUE(o.align == 0 || o.stride % o.align == 0,
                    "[PlacementPolicy::PlacementPolicy] stride must be a "
                    "multiple of align, ",
                    o.align, ", but got ", o.stride,
                    "; chunks could not start there.");
  TORCH_CHECK_VALUE(o.ladder == 0 || (o.ladder >= 1 && std::isfinite(o.ladder)),
                    "[PlacementPolicy::PlacementPolicy] ladder must be 0 or >= "
                    "1 but got ",
                    o.ladder, ".");
  TORCH_CHECK_VALUE(o.budget == 0 || o.point_bytes > 0,
                    "[PlacementPolicy::PlacementPolicy] a budget of ", o.budget,
                    " bytes needs point_bytes, the bytes of one checkpoint.");
}

int64_t PlacementPolicy::align_down(int64_t position) const noexcept {
  return options_.align == 0 ? position : position - position % options_.align;
}

std::vector<int64_t> PlacementPolicy::chunk_ends(int64_t from,
                                                 int64_t length) const {
  const int64_t end = align_down(length);
  Positions ends;
  if (options_.stride > 0) {
    for (int64_t at = from - from % options_.stride + options_.stride; at < end;
         at += options_.stride) {
      ends.insert(at);
    }
  }
  const int64_t before = std::max<int64_t>(length - options_.tail, 0);
  if (options_.tail > 0 && align_down(before) > from) {
    ends.insert(align_down(before));
  }
  if (end > from) ends.insert(end);
  return with_cuts(ends, from, options_.max_chunk);
}

// From most to least wanted.
std::vector<int64_t> PlacementPolicy::wanted(
    int64_t length, std::span<const int64_t> marks,
    std::optional<int64_t> divergence) const {
  std::vector<int64_t> wanted = {length};
  if (options_.divergence && divergence) wanted.push_back(*divergence);
  if (options_.marks) {
    std::vector<int64_t> last_first(marks.begin(), marks.end());
    std::sort(last_first.rbegin(), last_first.rend());
    wanted.insert(wanted.end(), last_first.begin(), last_first.end());
  }
  if (options_.stride > 0 && options_.ladder > 0) {
    double distance = static_cast<double>(options_.stride);
    while (distance < static_cast<double>(length)) {
      wanted.push_back(length - static_cast<int64_t>(distance));
      distance = options_.ladder > 1
                     ? distance * options_.ladder
                     : distance + static_cast<double>(options_.stride);
    }
  }
  return wanted;
}

std::vector<int64_t> PlacementPolicy::positions(
    int64_t from, int64_t length, std::span<const int64_t> marks,
    std::optional<int64_t> divergence) const {
  TORCH_CHECK_VALUE(from >= 0 && from <= length,
                    "[PlacementPolicy::positions] from must be in [0, ", length,
                    "] but got ", from, ".");
  if (align_down(length) < options_.min_prefix) return {};
  const size_t most =
      options_.budget == 0
          ? static_cast<size_t>(length)
          : std::max<size_t>(options_.budget / options_.point_bytes, 1);
  if (options_.rule == PlacementRule::kChunkEnds) {
    std::vector<int64_t> ends = chunk_ends(from, length);
    if (ends.size() > most) ends.erase(ends.begin(), ends.end() - most);
    return ends;
  }
  Positions chosen;
  for (const int64_t position : wanted(length, marks, divergence)) {
    const int64_t at = align_down(std::min(position, length));
    if (at > from && chosen.size() < most) chosen.insert(at);
  }
  return {chosen.begin(), chosen.end()};
}

}  // namespace kvcache
