// Restore points: made, listed, thinned out.
#include <algorithm>
#include <exception>

#include "cache_impl.h"
#include "kvcache/cache.h"

namespace kvcache {

void Cache::mark() {
  impl_->check_idle("mark");
  impl_->mark_rows(0, impl_->spec.rows);
}

void Cache::mark(int64_t row) {
  impl_->check_idle("mark");
  impl_->check_row("mark", row);
  impl_->mark_rows(row, row + 1);
}

void Cache::Impl::mark_rows(int64_t first, int64_t end) {
  if (states.empty()) {
    return;
  }
  std::vector<RestorePoints> marked(points.begin() + first,
                                    points.begin() + end);
  for (int64_t row = first; row < end; ++row) {
    const int64_t length = lengths[row];
    RestorePoints& of_row = marked[row - first];
    if (length > 0 && (of_row.empty() || of_row.back()->position != length)) {
      of_row.push_back(states.snapshot(row, length));
    }
  }
  std::move(marked.begin(), marked.end(), points.begin() + first);
}

void Cache::unmark(int64_t row, int64_t position) {
  impl_->check_idle("unmark");
  impl_->check_row("unmark", row);
  std::erase_if(impl_->points[row],
                [&](const auto& point) { return point->position == position; });
}

std::vector<int64_t> Cache::restore_points(int64_t row) const {
  impl_->check_idle("restore_points");
  impl_->check_row("restore_points", row);
  std::vector<int64_t> positions;
  for (const auto& point : impl_->points[row]) {
    positions.push_back(point->position);
  }
  return positions;
}

// Of three neighbours the middle one goes where the gap that it leaves is the
// smallest share of the way back to it.
void Cache::Impl::thin_points(int64_t row, size_t most) noexcept {
  RestorePoints& of_row = points[row];
  while (of_row.size() > std::max<size_t>(most, 1)) {
    size_t least = 0;
    double least_share = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i + 1 < of_row.size(); ++i) {  // never the newest
      const int64_t before = i > 0 ? of_row[i - 1]->position : 0;
      const double share =
          static_cast<double>(of_row[i + 1]->position - before) /
          static_cast<double>(lengths[row] - before);
      if (share < least_share) {
        least = i;
        least_share = share;
      }
    }
    of_row.erase(of_row.begin() + static_cast<std::ptrdiff_t>(least));
  }
}

void Cache::mark_and_thin(int64_t row, size_t most) noexcept {
  try {
    impl_->mark_rows(row, row + 1);
  } catch (const std::exception&) {
    return;  // going back then takes a longer replay
  }
  impl_->thin_points(row, most);
}

}  // namespace kvcache
