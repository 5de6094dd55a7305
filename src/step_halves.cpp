// The halves of a step, host and device, and the default hooks of a kind.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "cache_impl.h"
#include "kvcache/cache.h"

namespace kvcache {
namespace {

// Positions, limits and cells of a step are addressable: 3 x 8 bytes each.
constexpr int64_t kMostNumbers = std::numeric_limits<int64_t>::max() / 24;

// Spans of the spec over the step's rows, defaults filled in; all checked.
void read_spec(const StepSpec& spec, int64_t all_rows, StepData& step) {
  TORCH_CHECK_VALUE(spec.tokens >= 1,
                    "[Cache::begin_step] tokens must be >= 1 but got ",
                    spec.tokens, "; a step has at least one token.");
  const int64_t left =  // rows from first_row on
      spec.first_row >= 0 && spec.first_row < all_rows
          ? all_rows - spec.first_row
          : 0;
  const int64_t rows = spec.rows.value_or(left);
  TORCH_CHECK_VALUE(rows >= 1 && rows <= left,
                    "[Cache::begin_step] rows must lie in [0, ", all_rows,
                    ") but got ", rows, " from row ", spec.first_row,
                    "; fix first_row and rows.");
  TORCH_CHECK_VALUE(
      spec.tokens <= kMostNumbers / rows,
      "[Cache::begin_step] tokens must be <= ", kMostNumbers / rows, " for ",
      rows, " rows but got ", spec.tokens, "; padding counts too.");
  for (const auto& [name, list] :
       {std::pair{"skip", spec.skip}, std::pair{"count", spec.count}}) {
    TORCH_CHECK_VALUE(list.empty() || static_cast<int64_t>(list.size()) == rows,
                      "[Cache::begin_step] ", name,
                      " must have one entry per row, ", rows, ", but got ",
                      list.size(), "; leave it empty for the default.");
  }
  step.tokens = spec.tokens;
  step.first_row = spec.first_row;
  step.state_window = spec.state_window;
  step.rows = rows;
  step.skip.resize(static_cast<size_t>(rows));
  step.count.resize(static_cast<size_t>(rows));
  step.start.resize(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t skip = spec.skip.empty() ? 0 : spec.skip[row];
    const int64_t room =
        skip >= 0 && skip <= spec.tokens ? spec.tokens - skip : -1;
    const int64_t count = spec.count.empty() ? room : spec.count[row];
    TORCH_CHECK_VALUE(count >= 0 && count <= room, "[Cache::begin_step] row ",
                      spec.first_row + row, ": skip + count must be within ",
                      spec.tokens, " tokens but got ", skip, " + ", count,
                      "; the live range lies inside the step.");
    step.skip[row] = skip;
    step.count[row] = count;
  }
}

// Of `count` more tokens `repeats` times; the largest number if it is beyond.
int64_t end_of(int64_t length, int64_t count, int64_t repeats) {
  int64_t end = 0;
  if (__builtin_mul_overflow(count, repeats, &end) ||
      __builtin_add_overflow(end, length, &end)) {
    return std::numeric_limits<int64_t>::max();
  }
  return end;
}

}  // namespace

// Numbers of the step and the window. The floor of rings moves here, since a
// step that is dropped may have overwritten old cells by then.
void Cache::begin_host(const StepSpec& spec, int64_t repeats,
                       std::optional<int64_t> window) {
  Impl& impl = *impl_;
  impl.check_idle("begin_step");
  StepData& step = impl.step;
  read_spec(spec, impl.spec.rows, step);
  do_default_count(spec, step.count);
  step.longest = 0;
  step.uniform = true;
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t length = impl.lengths[step.first_row + row];
    const int64_t count = step.count[row];
    const int64_t room = capacity() - length;
    TORCH_CHECK(count <= room / repeats, "[Cache::begin_step] row ",
                step.first_row + row, " would need slots [", length, ", ",
                end_of(length, count, repeats), ") but capacity is ",
                capacity(), "; truncate() first or raise CacheSpec::capacity.");
    TORCH_CHECK_VALUE(count <= impl.most_live / repeats,
                      "[Cache::begin_step] row ", step.first_row + row,
                      ": a step over ring storage has at "
                      "most ",
                      impl.most_live, " live tokens a row but got ",
                      end_of(0, count, repeats),
                      "; cut it, or raise CacheSpec::max_step.");
    step.start[row] = length;
    step.longest = std::max(step.longest, length + count * repeats);
    step.uniform =
        step.uniform && count == step.tokens && length == step.start[0];
  }
  step.window = window.value_or(do_window(step.longest));
  step.recorded = false;
  do_begin_host(step);
  shape_step();
  impl.numbers.upload(impl.lengths, step);
  for (int64_t row = 0; row < step.rows; ++row) {
    impl.raise_floor(step.first_row + row,
                     step.start[row] + step.count[row] * repeats);
  }
  if (step.state_window) {
    impl.windows.drop_all();  // their memory is this step's
  }
}

// Buffers and views for the step's shape; those of the last step are kept.
void Cache::shape_step() {
  Impl& impl = *impl_;
  StepData& step = impl.step;
  const Impl::StepKey key{step.rows, step.tokens, step.first_row, impl.epoch,
                          step.state_window};
  if (impl.step_key == key) {
    return;
  }
  impl.step_key.reset();  // if anything below throws
  impl.numbers.shape(step);
  impl.states.fill(step);
  impl.windows.fill(step, impl.states);
  for (size_t i = 0; i < step.views.size(); ++i) {
    const AttentionLayer& layer = impl.attention_layers[i];
    KvView& view = step.views[i];
    view.limits = step.limits;
    view.cells = step.cells[impl.layout_of[i]];
    view.sliding = layer.sliding;
    view.sinks = layer.sinks;
    view.ring = impl.layouts[impl.layout_of[i]].ring;
  }
  do_shape(step);
  impl.step_key = key;
}

void Cache::begin_device() {
  Impl& impl = *impl_;
  StepData& step = impl.step;
  std::fill(step.done.begin(), step.done.end(), false);
  std::fill(step.conv_done.begin(), step.conv_done.end(), false);
  std::fill(step.window_done.begin(), step.window_done.end(), false);
  impl.numbers.fill(step);
  for (size_t i = 0; i < step.views.size(); ++i) {
    const CellLayout& layout = impl.layouts[impl.layout_of[i]];
    KvView& view = step.views[i];
    // All of the cells means the spare one too: packed kernels take no slice.
    const int64_t window =
        step.window == layout.dead ? step.window + 1 : step.window;
    view.window = layout.ring > 0 ? layout.sinks + layout.ring : window;
    view.uniform = step.uniform && !step.recorded && layout.ring == 0;
  }
}

void Cache::commit_device() {
  StepData& step = impl_->step;
  if (impl_->states.commit(step, impl_->numbers.by_ops())) {
    raise_epoch();
  }
  impl_->numbers.advance(step);
}

void Cache::commit_host(int64_t repeats) noexcept {
  StepData& step = impl_->step;
  do_commit(step);
  for (int64_t row = 0; row < step.rows; ++row) {
    impl_->lengths[step.first_row + row] += step.count[row] * repeats;
  }
  impl_->windows.committed(step);
  impl_->numbers.note_advance(step, repeats);
  do_committed(step);
}

void Cache::Impl::raise_floor(int64_t row, int64_t end) {
  for (size_t i = 0; i < attention_layers.size(); ++i) {
    const CellLayout& layout = layouts[layout_of[i]];
    const int64_t floor = end - layout.ring;
    if (layout.ring > 0 && floor > layout.sinks) {
      oldest[row][i] = std::max(oldest[row][i], floor);
    }
  }
}

void Cache::place_cells(const std::vector<CellLayout>& layouts) {
  Impl& impl = *impl_;
  bool same = layouts.size() == impl.layout_of.size();
  for (size_t i = 0; same && i < layouts.size(); ++i) {
    same = impl.layouts[impl.layout_of[i]] == layouts[i];
  }
  if (same) {
    return;
  }
  impl.layouts.clear();
  impl.layout_of.clear();
  impl.most_live = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto known =
        std::find(impl.layouts.begin(), impl.layouts.end(), layouts[i]);
    impl.layout_of.push_back(static_cast<size_t>(known - impl.layouts.begin()));
    if (known == impl.layouts.end()) {
      impl.layouts.push_back(layouts[i]);
    }
    if (layouts[i].ring > 0) {
      const int64_t sliding = impl.attention_layers[i].sliding;
      impl.most_live = std::min(impl.most_live, layouts[i].ring - sliding + 1);
    }
  }
  impl.numbers = impl.numbers.like(impl.spec.rows, impl.layouts);
  impl.step_key.reset();
}

const char* Cache::do_cannot_record() const noexcept {
  return "its steps have no static window; use a WindowCache or a SlotCache";
}
int64_t Cache::do_window(int64_t longest) const { return longest; }
void Cache::do_default_count(const StepSpec&, std::vector<int64_t>&) const {}
void Cache::do_shape(StepData&) {}
void Cache::do_begin_host(StepData&) {}
void Cache::do_reserve(StepData&, int64_t) {}
void Cache::do_commit(StepData&) noexcept {}
void Cache::do_abandon(StepData&) noexcept {}
void Cache::do_committed(const StepData&) noexcept {}
void Cache::do_shrunk() {}
void Cache::do_cut_in_window(int64_t, int64_t) noexcept {}
void Cache::do_validate(std::vector<std::string>&) const {}

}  // namespace kvcache
