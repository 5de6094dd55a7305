// A row out of a cache and into one: checkpoint, restore.
#include <c10/util/Exception.h>

#include <algorithm>

#include "cache_impl.h"
#include "held_rows.h"
#include "kv_format.h"
#include "kvcache/cache.h"
#include "storage.h"

namespace kvcache {
namespace {

void check_same_model(const Checkpoint& from, const CacheSpec& spec) {
  TORCH_CHECK_VALUE(from.first_layer == spec.first_layer &&
                        from.layers.size() == spec.layers.size(),
                    "[Cache::restore] a checkpoint of layers [",
                    spec.first_layer, ", ",
                    spec.first_layer + static_cast<int64_t>(spec.layers.size()),
                    ") is needed but got [", from.first_layer, ", ",
                    from.first_layer + static_cast<int64_t>(from.layers.size()),
                    "); take it from a cache of the same model part.");
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    TORCH_CHECK_VALUE(from.layers[i] == spec.layers[i],
                      "[Cache::restore] layer ",
                      spec.first_layer + static_cast<int64_t>(i),
                      " of the checkpoint differs from the cache's; take it "
                      "from a cache of the same model.");
  }
  TORCH_CHECK_VALUE(from.dtype == spec.dtype,
                    "[Cache::restore] the cache holds ", dtype_text(spec.dtype),
                    " but got a checkpoint in ", dtype_text(from.dtype),
                    "; values would change, so make the cache in that dtype.");
  TORCH_CHECK_VALUE(from.format == spec.kv_format,
                    "[Cache::restore] the cache holds ",
                    format_text(spec.kv_format),
                    " K/V but got a checkpoint with ", format_text(from.format),
                    " K/V; values would change, so make the cache with that "
                    "CacheSpec::kv_format.");
}

void check_kv(const KvTensors& pair, const AttentionLayer& layer,
              int64_t tokens, const Checkpoint& from, size_t index) {
  const int64_t size = record_size(from.format, layer.head_dim);
  const at::ScalarType dtype = record_dtype(from.format, from.dtype);
  for (const Tensor* t : {&pair.k, &pair.v}) {
    TORCH_CHECK_VALUE(t->defined() && t->dim() == 3 &&
                          t->size(0) == layer.heads && t->size(1) == tokens &&
                          t->size(2) == size && t->scalar_type() == dtype,
                      "[Cache::restore] K and V of attention layer ", index,
                      " must be [", layer.heads, ", ", tokens, ", ", size, "] ",
                      dtype_text(dtype), " but got ", tensor_text(*t),
                      "; use checkpoints as checkpoint() made them.");
  }
}

// Nothing at all is no block.
bool in_blocks(const Checkpoint& from) {
  return !from.blocks.empty() || (from.length == 0 && from.kv.empty());
}

void check_blocks(const Checkpoint& from,
                  const std::vector<AttentionLayer>& layers) {
  int64_t end = 0;
  for (const auto& block : from.blocks) {
    TORCH_CHECK_VALUE(
        block != nullptr && block->first == end && block->tokens > 0 &&
            block->tokens <= from.length - end &&
            block->kv.size() == layers.size() && from.kv.empty(),
        "[Cache::restore] blocks must follow each other from 0 to ",
        from.length, " but token ", end,
        " is not the first of one; use checkpoints as checkpoint() made them.");
    for (size_t i = 0; i < layers.size(); ++i) {
      check_kv(block->kv[i], layers[i], block->tokens, from, i);
    }
    end += block->tokens;
  }
  TORCH_CHECK_VALUE(end == from.length, "[Cache::restore] blocks must hold ",
                    from.length, " tokens but hold ", end,
                    "; use checkpoints as checkpoint() made them.");
}

// A checkpoint may come from anywhere: nothing in it is used unchecked.
void check_contents(const Checkpoint& from,
                    const std::vector<AttentionLayer>& layers,
                    const RowStates& states) {
  const bool blocks = in_blocks(from);
  if (blocks) {
    check_blocks(from, layers);
  }
  for (size_t i = 0; !blocks && i < layers.size(); ++i) {
    const bool there = i < from.kv.size() && i < from.first.size();
    const int64_t first = there ? from.first[i] : 0;
    const int64_t held =
        first < 0 ? -1 : std::min(layers[i].sinks, first) + from.length - first;
    check_kv(there ? from.kv[i] : KvTensors{}, layers[i], held, from, i);
  }
  int64_t previous = 0;
  for (const auto& point : from.points) {
    TORCH_CHECK_VALUE(point != nullptr && point->position > previous &&
                          point->position <= from.length,
                      "[Cache::restore] restore points must ascend within (0, ",
                      from.length, "] but got ",
                      point == nullptr ? int64_t{-1} : point->position,
                      "; use checkpoints as checkpoint() made them.");
    previous = point->position;
    TORCH_CHECK_VALUE(states.holds(*point), "[Cache::restore] the states at ",
                      previous, " must be ", states.point_text(), " but got ",
                      tensor_text(point->conv), " and ",
                      tensor_text(point->state),
                      "; take them from a cache of the same model and "
                      "conv_dtype.");
  }
}

}  // namespace

Checkpoint Cache::Impl::without_kv(int64_t row) const {
  return {.length = lengths[row],
          .first_layer = spec.first_layer,
          .layers = spec.layers,
          .dtype = spec.dtype,
          .format = spec.kv_format,
          .points = points[row]};
}

void Cache::Impl::add_last_point(int64_t row, Checkpoint& to) const {
  const bool marked =
      !to.points.empty() && to.points.back()->position == to.length;
  if (!states.empty() && to.length > 0 && !marked) {
    to.points.push_back(states.snapshot(row, to.length));
  }
}

Checkpoint Cache::checkpoint(int64_t row) const {
  const Impl& impl = *impl_;
  impl.check_idle("checkpoint");
  impl.check_row("checkpoint", row);
  Checkpoint result = impl.without_kv(row);
  export_row(row, result);
  impl.add_last_point(row, result);
  return result;
}

Checkpoint Cache::checkpoint(int64_t row, const BlockOptions& options) const {
  const Impl& impl = *impl_;
  impl.check_idle("checkpoint");
  impl.check_row("checkpoint", row);
  TORCH_CHECK_VALUE(options.block > 0,
                    "[Cache::checkpoint] a block must have tokens but got ",
                    options.block, ".");
  TORCH_CHECK_VALUE(!options.length || *options.length >= 0,
                    "[Cache::checkpoint] the length must be >= 0 but got ",
                    options.length.value_or(0), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::all_of(impl.layouts.begin(), impl.layouts.end(),
                  [](const CellLayout& to) { return to.ring == 0; }) &&
          std::all_of(impl.oldest[row].begin(), impl.oldest[row].end(),
                      [](int64_t first) { return first == 0; }),
      "[Cache::checkpoint] blocks hold every position but this cache keeps "
      "rings; take a plain checkpoint, or store sliding layers in full.");
  Checkpoint result = impl.without_kv(row);
  const int64_t length = options.length.value_or(result.length);
  if (length < result.length) {
    std::erase_if(result.points,
                  [&](const auto& point) { return point->position > length; });
    const int64_t newest =
        result.points.empty() ? 0 : result.points.back()->position;
    result.length = impl.states.empty() ? length : newest;
  }
  impl.add_last_point(row, result);
  add_blocks(row, options, result);
  return result;
}

void Cache::add_blocks(int64_t row, const BlockOptions& options,
                       Checkpoint& to) const {
  const int64_t length = to.length;
  int64_t end = 0;
  if (options.shared != nullptr) {
    for (const auto& block : options.shared->blocks) {
      const int64_t last = block->first + block->tokens;
      if (last > std::min(options.same, length) ||
          (last % options.block != 0 && last != length)) {
        break;
      }
      to.blocks.push_back(block);
      end = last;
    }
  }
  if (end == length) return;
  std::vector<KvTensors> rows;
  for (size_t i = 0; i < impl_->attention_layers.size(); ++i) {
    rows.push_back(do_row(row, static_cast<int64_t>(i)));
  }
  while (end < length) {
    const int64_t next = end - end % options.block + options.block;
    const int64_t tokens = std::min(next, length) - end;
    to.blocks.push_back(take_block(rows, end, tokens));
    end += tokens;
  }
}

Truncation Cache::restore(const Checkpoint& from, int64_t row,
                          std::optional<int64_t> length) {
  Impl& impl = *impl_;
  impl.check_idle("restore");
  impl.check_row("restore", row);
  check_same_model(from, impl.spec);
  check_contents(from, impl.attention_layers, impl.states);
  const std::vector<int64_t> whole(impl.attention_layers.size(), 0);
  const std::vector<int64_t>& first = in_blocks(from) ? whole : from.first;
  const int64_t target = length.value_or(from.length);
  TORCH_CHECK_VALUE(target >= 0 && target <= from.length,
                    "[Cache::restore] length must be in [0, ", from.length,
                    "] but got ", target,
                    "; a checkpoint has only its own tokens.");
  const Impl::Cut cut = impl.find_cut(
      from.points, target, [&](int64_t n) { return impl.keeps(first, n); });
  TORCH_CHECK_VALUE(cut.length <= capacity(), "[Cache::restore] ", cut.length,
                    " tokens exceed capacity ", capacity(),
                    "; restore fewer or raise CacheSpec::capacity.");
  Truncation result{.reason = cut.reason,
                    .replay = std::vector<int64_t>(impl.lengths.size(), 0)};
  result.replay[row] = target - cut.length;
  RestorePoints points;
  std::copy_if(
      from.points.begin(), from.points.end(), std::back_inserter(points),
      [&](const auto& point) { return point->position <= cut.length; });
  do_import(row, from, cut.length);  // the last thing that can fail
  const bool shrunk = cut.length < impl.lengths[row];
  impl.clear_row(row);
  impl.set_state(row, cut.point.get());
  impl.points[row] = std::move(points);
  impl.lengths[row] = cut.length;
  if (cut.length > 0) {
    impl.oldest[row] = first;
    impl.raise_floor(row, cut.length);
  }
  if (shrunk) {
    do_shrunk();
  }
  return result;
}

}  // namespace kvcache
