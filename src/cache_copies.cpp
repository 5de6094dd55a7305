// The verbs that copy: fork and plain tensors; and reports.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "cache_impl.h"
#include "held_rows.h"
#include "kv_format.h"
#include "kvcache/cache.h"
#include "storage.h"

namespace kvcache {
namespace {

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
    Checkpoint kv{.length = impl.lengths[row],
                  .dtype = impl.spec.dtype,
                  .format = impl.spec.kv_format};
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

KvTensors Cache::take_layer(int64_t row, size_t index, int64_t first) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const AttentionLayer& layer = impl_->attention_layers[index];
  const int64_t length = impl_->lengths[row];
  KvTensors taken;
  const KvTensors from =
      length > 0 ? do_row(row, static_cast<int64_t>(index)) : KvTensors{};
  const HeldRows held{layer.sinks, first, length};
  for (auto part : {&KvTensors::k, &KvTensors::v}) {
    taken.*part =
        length > 0
            ? held.take(from.*part, impl_->layouts[impl_->layout_of[index]])
            : new_empty({layer.heads, 0,
                         record_size(impl_->spec.kv_format, layer.head_dim)},
                        record_dtype(impl_->spec.kv_format, impl_->spec.dtype),
                        impl_->spec.device);
  }
  return taken;
}

void Cache::export_row(int64_t row, Checkpoint& to) const {
  for (size_t i = 0; i < impl_->attention_layers.size(); ++i) {
    to.first.push_back(std::min(impl_->oldest[row][i], to.length));
    to.kv.push_back(take_layer(row, i, to.first[i]));
  }
}

KvTensors Cache::export_kv(int64_t layer) const {
  const Impl& impl = *impl_;
  impl.check_idle("export_kv");
  const AttentionLayer& attention = impl.attention("Cache::export_kv", layer);
  const size_t index = impl.index[impl.local("Cache::export_kv", layer)];
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
    const KvTensors one = take_layer(row, index, first);
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      const Tensor to = (all.*part).select(0, row);
      const Tensor from =
          impl.spec.kv_format == KvFormat::kPlain
              ? one.*part
              : dequantised(one.*part, attention.head_dim, impl.spec.dtype);
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
  std::vector<Checkpoint> rows(lengths.size());  // all that can fail, first
  for (size_t row = 0; row < rows.size(); ++row) {
    Checkpoint& one = rows[row];
    one = {.length = lengths[row],
           .first_layer = impl.spec.first_layer,
           .layers = impl.spec.layers,
           .dtype = impl.spec.dtype,
           .format = impl.spec.kv_format};
    const auto stored = [&](const Tensor& plain) {
      const Tensor part =
          plain.select(0, static_cast<int64_t>(row)).narrow(1, 0, one.length);
      return one.format == KvFormat::kPlain ? part : quantised(part);
    };
    for (const KvTensors& pair : layers) {
      one.kv.push_back({stored(pair.k), stored(pair.v)});
      one.first.push_back(0);
    }
  }
  for (const int64_t row : Impl::longest_first(lengths)) {
    restore(rows[static_cast<size_t>(row)], row);
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
  impl.windows.add_memory(report.restore_points, impl.states);
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
    expect(impl.windows.ends_at(static_cast<int64_t>(row), length),
           name + "a state window ends at the length");
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
  const auto size_of = [](at::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  };
  const int64_t record_unit = size_of(record_dtype(spec.kv_format, spec.dtype));
  const auto add = [&](int64_t unit, std::vector<int64_t> sizes) {
    int64_t product = 2 * unit;
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
      // K and V
      add(record_unit,
          {tokens, a->heads, record_size(spec.kv_format, a->head_dim)});
    } else {
      const auto& r = std::get<RecurrentLayer>(layer);  // current and next
      add(size_of(spec.conv_dtype.value_or(spec.dtype)),
          {r.conv_channels, r.conv_taps});
      if (!r.state_shape.empty()) {
        add(size_of(at::kFloat), r.state_shape);
      }
    }
    ++number;
  }
  return static_cast<size_t>(bytes);
}

}  // namespace kvcache
