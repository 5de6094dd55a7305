// The verbs that copy: fork, checkpoint, restore, plain tensors, and reports.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "cache_impl.h"
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
  TORCH_CHECK_VALUE(from.format == KvFormat::kPlain,
                    "[Cache::restore] the cache stores plain K/V but got "
                    "another format; values would change.");
}

// A checkpoint may come from anywhere: nothing in it is used unchecked.
void check_contents(const Checkpoint& from, const CacheSpec& spec,
                    const RowStates& states) {
  size_t i = 0;
  for (const LayerSpec& layer : spec.layers) {
    const auto* a = std::get_if<AttentionLayer>(&layer);
    if (a == nullptr) {
      continue;
    }
    const bool there = i < from.kv.size() && i < from.first.size();
    const int64_t first = there ? from.first[i] : 0;
    const int64_t held = std::min(a->sinks, first) + from.length - first;
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      const Tensor t = there ? from.kv[i].*part : Tensor();
      TORCH_CHECK_VALUE(
          t.defined() && first >= 0 && first <= from.length && t.dim() == 3 &&
              t.size(0) == a->heads && t.size(1) == held &&
              t.size(2) == a->head_dim && t.scalar_type() == spec.dtype,
          "[Cache::restore] K and V of attention layer ", i, " must be [",
          a->heads, ", ", held, ", ", a->head_dim, "] ", dtype_text(spec.dtype),
          " but got ", tensor_text(t),
          "; use checkpoints as checkpoint() made them.");
    }
    ++i;
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

void check_import(const KvTensors& pair, const CacheSpec& spec, size_t layer,
                  std::span<const int64_t> lengths) {
  const auto& attention = std::get<AttentionLayer>(spec.layers[layer]);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  for (const Tensor* t : {&pair.k, &pair.v}) {
    TORCH_CHECK_VALUE(
        t->defined() && t->dim() == 4 && t->size(0) == spec.rows &&
            t->size(1) == attention.heads && t->size(2) >= longest &&
            t->size(3) == attention.head_dim && t->scalar_type() == spec.dtype,
        "[Cache::import_kv] layer ",
        spec.first_layer + static_cast<int64_t>(layer), " must be [", spec.rows,
        ", ", attention.heads, ", >= ", longest, ", ", attention.head_dim, "] ",
        dtype_text(spec.dtype), " but got ", tensor_text(*t),
        "; export it from a cache of the same model.");
  }
}

}  // namespace

std::unique_ptr<Cache> Cache::fork() const {
  const Impl& impl = *impl_;
  impl.check_idle("fork");
  std::unique_ptr<Cache> copy = do_make();
  for (const int64_t row : Impl::longest_first(impl.lengths)) {
    Checkpoint kv{.length = impl.lengths[row], .dtype = impl.spec.dtype};
    export_row(row, kv);
    copy->do_import(row, kv, kv.length);
    copy->impl_->lengths[row] = kv.length;  // the next import keeps this row
  }
  copy->impl_->states.copy_from(impl.states);
  copy->impl_->points = impl.points;
  copy->impl_->oldest = impl.oldest;
  return copy;
}

std::vector<int64_t> Cache::Impl::longest_first(
    std::span<const int64_t> lengths) {
  std::vector<int64_t> rows(lengths.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
    return lengths[a] > lengths[b];
  });
  return rows;
}

void Cache::export_row(int64_t row, Checkpoint& to) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < impl_->attention_layers.size(); ++i) {
    const int64_t first = std::min(impl_->oldest[row][i], to.length);
    to.kv.push_back(do_export(row, static_cast<int64_t>(i), first));
    to.first.push_back(first);
  }
}

Checkpoint Cache::checkpoint(int64_t row) const {
  const Impl& impl = *impl_;
  impl.check_idle("checkpoint");
  impl.check_row("checkpoint", row);
  Checkpoint result{.length = impl.lengths[row],
                    .first_layer = impl.spec.first_layer,
                    .layers = impl.spec.layers,
                    .dtype = impl.spec.dtype,
                    .points = impl.points[row]};
  export_row(row, result);
  const bool marked =
      !result.points.empty() && result.points.back()->position == result.length;
  if (!impl.states.empty() && result.length > 0 && !marked) {
    result.points.push_back(impl.states.snapshot(row, result.length));
  }
  return result;
}

Truncation Cache::restore(const Checkpoint& from, int64_t row,
                          std::optional<int64_t> length) {
  Impl& impl = *impl_;
  impl.check_idle("restore");
  impl.check_row("restore", row);
  check_same_model(from, impl.spec);
  check_contents(from, impl.spec, impl.states);
  const int64_t target = length.value_or(from.length);
  TORCH_CHECK_VALUE(target >= 0 && target <= from.length,
                    "[Cache::restore] length must be in [0, ", from.length,
                    "] but got ", target,
                    "; a checkpoint has only its own tokens.");
  const Impl::Cut cut = impl.find_cut(from.points, target, [&](int64_t n) {
    return impl.keeps(from.first, n);
  });
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
    impl.oldest[row] = from.first;
    impl.raise_floor(row, cut.length);
  }
  if (shrunk) {
    do_shrunk();
  }
  return result;
}

KvTensors Cache::export_kv(int64_t layer) const {
  const Impl& impl = *impl_;
  impl.check_idle("export_kv");
  const AttentionLayer& attention = impl.attention("Cache::export_kv", layer);
  const auto index =
      static_cast<int64_t>(impl.index[impl.local("Cache::export_kv", layer)]);
  at::NoGradGuard no_grad;
  const int64_t longest =
      *std::max_element(impl.lengths.begin(), impl.lengths.end());
  KvTensors all;
  for (Tensor* t : {&all.k, &all.v}) {
    *t = new_zeros(
        {impl.spec.rows, attention.heads, longest, attention.head_dim},
        impl.spec.dtype, impl.spec.device);
  }
  for (int64_t row = 0; row < impl.spec.rows; ++row) {
    const int64_t length = impl.lengths[row];
    const int64_t first = std::min(impl.oldest[row][index], length);
    const int64_t sinks = std::min(attention.sinks, first);
    const KvTensors one = do_export(row, index, first);
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      const Tensor to = (all.*part).select(0, row);
      const Tensor& from = one.*part;
      to.narrow(1, 0, sinks).copy_(from.narrow(1, 0, sinks));
      to.narrow(1, first, length - first)
          .copy_(from.narrow(1, sinks, length - first));
    }
  }
  return all;
}

void Cache::import_kv(std::span<const KvTensors> layers,
                      std::span<const int64_t> lengths) {
  const Impl& impl = *impl_;
  impl.check_idle("import_kv");
  TORCH_CHECK_VALUE(impl.states.empty(),
                    "[Cache::import_kv] only attention layers can be imported "
                    "but this cache has ",
                    impl.states.layers(), " recurrent ones; use restore().");
  TORCH_CHECK_VALUE(layers.size() == impl.spec.layers.size(),
                    "[Cache::import_kv] layers must be ",
                    impl.spec.layers.size(), " pairs but got ", layers.size(),
                    "; pass one per layer.");
  TORCH_CHECK_VALUE(lengths.size() == impl.lengths.size(),
                    "[Cache::import_kv] lengths must have one entry per row, ",
                    impl.lengths.size(), ", but got ", lengths.size(), ".");
  for (const int64_t length : lengths) {
    TORCH_CHECK_VALUE(length >= 0 && length <= capacity(),
                      "[Cache::import_kv] a length must be in [0, ", capacity(),
                      "] but got ", length,
                      "; import fewer or raise CacheSpec::capacity.");
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    check_import(layers[i], impl.spec, i, lengths);
  }
  at::NoGradGuard no_grad;
  for (const int64_t row : Impl::longest_first(lengths)) {
    Checkpoint one{.length = lengths[row],
                   .first_layer = impl.spec.first_layer,
                   .layers = impl.spec.layers,
                   .dtype = impl.spec.dtype};
    for (const KvTensors& pair : layers) {
      one.kv.push_back({pair.k.select(0, row).narrow(1, 0, one.length),
                        pair.v.select(0, row).narrow(1, 0, one.length)});
      one.first.push_back(0);
    }
    restore(one, row);
  }
}

MemoryReport Cache::memory() const {
  const Impl& impl = *impl_;
  MemoryReport report;
  report.scales.capacity = 0;
  report.graphs = {.used = impl.graph_bytes, .reserved = impl.graph_bytes};
  if (do_cannot_record() != nullptr) {
    report.graphs.capacity = 0;
  }
  const auto live = std::count_if(impl.lengths.begin(), impl.lengths.end(),
                                  [](int64_t n) { return n > 0; });
  impl.states.add_memory(report, live);
  StorageBytes points;
  for (const RestorePoints& row : impl.points) {
    for (const auto& point : row) {
      points.add(point->conv);
      points.add(point->state);
    }
  }
  report.restore_points = {.used = points.total(), .reserved = points.total()};
  if (impl.states.empty()) {
    report.restore_points.capacity = 0;
  }
  do_memory(report);
  return report;
}

std::vector<std::string> Cache::validate() const {
  const Impl& impl = *impl_;
  std::vector<std::string> broken;
  const auto expect = [&](bool holds, const std::string& text) {
    if (!holds) {
      broken.push_back(text);
    }
  };
  expect(impl.lengths.size() == static_cast<size_t>(impl.spec.rows) &&
             impl.points.size() == impl.lengths.size(),
         "one length and one list of restore points per row");
  for (size_t row = 0; row < impl.lengths.size(); ++row) {
    const int64_t length = impl.lengths[row];
    const std::string name = "row " + std::to_string(row) + ": ";
    expect(length >= 0 && length <= capacity(),
           name + "length " + std::to_string(length) + " within [0, " +
               std::to_string(capacity()) + "]");
    int64_t previous = 0;
    for (const auto& point : impl.points[row]) {
      expect(point->position > previous && point->position <= length,
             name + "restore points ascend up to the length, but one is at " +
                 std::to_string(point->position));
      previous = point->position;
    }
  }
  for (const Tensor& t : {impl.states.conv(), impl.states.state()}) {
    expect(!t.defined() || (!t.requires_grad() && t.size(0) == impl.spec.rows),
           "states need no gradient and have one row per cache row");
  }
  do_validate(broken);
  return broken;
}

size_t bytes_needed(const CacheSpec& spec, int64_t tokens) {
  TORCH_CHECK_VALUE(tokens >= 0,
                    "[kvcache::bytes_needed] tokens must be >= 0 but got ",
                    tokens, "; ask for the tokens of a row.");
  int64_t bytes = 0;
  int64_t number = spec.first_layer;
  const auto add = [&](at::ScalarType dtype, std::vector<int64_t> sizes) {
    int64_t product = 2 * static_cast<int64_t>(c10::elementSize(dtype));
    sizes.push_back(spec.rows);
    bool sound = true;  // sizes come from files: no product may wrap
    for (const int64_t size : sizes) {
      sound = sound && size >= 0 &&
              !__builtin_mul_overflow(product, size, &product);
    }
    TORCH_CHECK_VALUE(sound && !__builtin_add_overflow(bytes, product, &bytes),
                      "[kvcache::bytes_needed] layer ", number,
                      " must need less than 2^63 bytes but its sizes are ",
                      at::IntArrayRef(sizes), "; fix the CacheSpec.");
  };
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
      add(spec.dtype, {tokens, a->heads, a->head_dim});  // K and V
    } else {
      const auto& r = std::get<RecurrentLayer>(layer);  // current and next
      add(spec.conv_dtype.value_or(spec.dtype), {r.conv_channels, r.conv_taps});
      if (!r.state_shape.empty()) {
        add(at::kFloat, r.state_shape);
      }
    }
    ++number;
  }
  return static_cast<size_t>(bytes);
}

}  // namespace kvcache
