#include "kvcache/detail/in_place_cache.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "held_rows.h"
#include "kv_format.h"
#include "kv_report.h"
#include "storage.h"

namespace kvcache {
namespace {

// Cells behind the sinks that positions take in turn; 0: all of them are kept.
int64_t ring_of(const AttentionLayer& layer, const CacheSpec& spec,
                const std::optional<RingOptions>& rings) {
  if (!rings || layer.sliding == 0 || !spec.capacity) {
    return 0;
  }
  const int64_t capacity = *spec.capacity;
  const int64_t step = std::min(spec.max_step.value_or(capacity), capacity);
  const int64_t wanted[] = {layer.sinks, layer.sliding - 1, step,
                            rings->rollback};
  int64_t left = capacity;  // no sum that could wrap
  for (const int64_t part : wanted) {
    if (part >= left) {
      return 0;
    }
    left -= part;
  }
  return capacity - left - layer.sinks;
}

}  // namespace

InPlaceCache::InPlaceCache(CacheSpec spec, const InPlaceOptions& options)
    : Cache(std::move(spec), States::kCopy),
      options_(options),
      layers_(attention_layers(this->spec())) {
  TORCH_CHECK_VALUE(!options.rings || options.rings->rollback >= 0, "[",
                    options.kind, "::", options.kind,
                    "] rollback of the rings must be >= 0 but got ",
                    options.rings ? options.rings->rollback : 0,
                    "; 0 keeps what the next step sees.");
  plan_groups();
  adopt(allocate(this->spec().rows, options.cells), options.cells);
}

void InPlaceCache::plan_groups() {
  for (const AttentionLayer& layer : layers_) {
    const int64_t ring = ring_of(layer, spec(), options_.rings);
    const Group wanted{0, layer.heads, layer.head_dim,
                       ring > 0 ? layer.sinks + ring : 0};
    auto group = std::find_if(plan_.begin(), plan_.end(), [&](const Group& g) {
      return g.heads == wanted.heads && g.head_dim == wanted.head_dim &&
             g.ring_cells == wanted.ring_cells;
    });
    if (group == plan_.end()) {
      group = plan_.insert(plan_.end(), wanted);
    }
    places_.push_back(
        {static_cast<size_t>(group - plan_.begin()), group->layers++});
    layouts_.push_back({ring > 0 ? layer.sinks : 0, ring, -1});
  }
}

// The spare cell included. Rings have one of their own in every kind, so that
// dead tokens of any device have a place.
int64_t InPlaceCache::cells_of(const Group& group, int64_t cells) const {
  return group.ring_cells > 0 ? group.ring_cells + 1
                              : cells + (options_.spare ? 1 : 0);
}

std::vector<KvTensors> InPlaceCache::allocate(int64_t rows,
                                              int64_t cells) const {
  std::vector<KvTensors> groups;
  for (const Group& g : plan_) {
    const int64_t S = cells_of(g, cells);
    const int64_t R = record_size(spec().kv_format, g.head_dim);
    const auto sizes =
        options_.head_major
            ? std::vector<int64_t>{g.layers, rows, g.heads, S, R}
            : std::vector<int64_t>{g.layers, rows, S, g.heads, R};
    const at::ScalarType dtype = record_dtype(spec().kv_format, spec().dtype);
    groups.push_back({new_zeros(sizes, dtype, spec().device),
                      new_zeros(sizes, dtype, spec().device)});
  }
  return groups;
}

void InPlaceCache::adopt(std::vector<KvTensors> groups, int64_t cells) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<KvTensors> views;
  const auto view = [&](const Tensor& group, int64_t layer) {
    const Tensor one = group.select(0, layer);
    return options_.head_major ? one : one.permute({0, 2, 1, 3});
  };
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    const KvTensors& group = groups[place.group];
    views.push_back({view(group.k, place.layer), view(group.v, place.layer)});
    if (options_.spare || layouts_[i].ring > 0) {
      layouts_[i].dead = views[i].k.size(2) - 1;
    }
  }
  place_cells(layouts_);
  groups_ = std::move(groups);
  views_ = std::move(views);
  cells_ = cells;
}

// [layers, B, .., cells, ..] of the first `cells` cells.
Tensor InPlaceCache::live_part(const Tensor& group, int64_t cells) const {
  const int64_t dim = options_.head_major ? 3 : 2;
  return group.narrow(dim, 0, std::min(cells, group.size(dim)));
}

void InPlaceCache::resize(int64_t cells) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t kept = std::min(cells, cells_);
  std::vector<KvTensors> groups = allocate(spec().rows, cells);
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t of_group = cells_of(plan_[g], kept);
    live_part(groups[g].k, of_group).copy_(live_part(groups_[g].k, of_group));
    live_part(groups[g].v, of_group).copy_(live_part(groups_[g].v, of_group));
  }
  adopt(std::move(groups), cells);
  raise_epoch();
}

const KvTensors& InPlaceCache::cells(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(views_.size()),
                    "[InPlaceCache::cells] index must be in [0, ",
                    views_.size(), "), one for each attention layer, but got ",
                    index, ".");
  return views_[static_cast<size_t>(index)];
}

int64_t InPlaceCache::ring(int64_t index) const {
  cells(index);  // checks it
  return layouts_[static_cast<size_t>(index)].ring;
}

size_t InPlaceCache::bytes() const {
  size_t bytes = 0;
  for (const KvTensors& group : groups_) {
    bytes += group.k.nbytes() + group.v.nbytes();
  }
  return bytes;
}

double InPlaceCache::mib() const {
  return static_cast<double>(bytes()) / (1024.0 * 1024.0);
}

size_t InPlaceCache::bytes_per_token() const { return token_bytes(spec()); }

std::string InPlaceCache::describe() const {
  return describe_cache(options_.kind, *this, layers_);
}

void InPlaceCache::do_shape(StepData& step) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < layers_.size(); ++i) {
    KvView& view = step.views[i];
    view.format = spec().kv_format;
    view.k = views_[i].k.narrow(0, step.first_row, step.rows);
    view.v = views_[i].v.narrow(0, step.first_row, step.rows);
    if (view.format == KvFormat::kInt8) {
      view.k_scale = scales_of(view.k);
      view.v_scale = scales_of(view.v);
      view.k = codes_of(view.k, layers_[i].head_dim);
      view.v = codes_of(view.v, layers_[i].head_dim);
    }
  }
}

KvTensors InPlaceCache::do_row(int64_t row, int64_t index) const {
  const KvTensors& all = views_[static_cast<size_t>(index)];
  return {all.k.select(0, row), all.v.select(0, row)};
}

void InPlaceCache::do_import(int64_t row, const Checkpoint& from, int64_t n) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    put_row(from, i, n, layers_[i].sinks, do_row(row, static_cast<int64_t>(i)),
            layouts_[i]);
  }
}

void InPlaceCache::do_reorder(std::span<const int64_t> rows) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(rows.size());
  int64_t longest = 0;
  for (const int64_t row : rows) {
    longest = std::max(longest, lengths()[row]);
  }
  const Tensor index =
      at::tensor(at::IntArrayRef(rows.data(), rows.size()), at::kLong)
          .to(spec().device);
  std::vector<KvTensors> gathered;  // duplicates make an in-place order wrong
  for (const KvTensors& group : groups_) {
    gathered.push_back({live_part(group.k, longest).index_select(1, index),
                        live_part(group.v, longest).index_select(1, index)});
  }
  std::vector<KvTensors> groups =
      count == spec().rows ? groups_ : allocate(count, cells_);
  for (size_t g = 0; g < groups.size(); ++g) {
    live_part(groups[g].k, longest).copy_(gathered[g].k);
    live_part(groups[g].v, longest).copy_(gathered[g].v);
  }
  if (count != spec().rows) {
    adopt(std::move(groups), cells_);
  }
}

// Of each record, values and scale are counted apart.
void InPlaceCache::do_memory(MemoryReport& report) const {
  const bool bounded = spec().capacity || layers_.empty();
  if (bounded) {
    report.k.capacity = report.scales.capacity = 0;
  }
  for (const Group& group : plan_) {
    const auto values = static_cast<size_t>(
        group.heads *
        value_bytes(spec().kv_format, spec().dtype, group.head_dim));
    const auto scales =
        static_cast<size_t>(2 * group.heads * scale_bytes(spec().kv_format));
    const auto add = [&](int64_t cells, auto of) {
      const auto count = static_cast<size_t>(cells * group.layers);
      of(report.k) += count * values;
      of(report.scales) += count * scales;
    };
    add(spec().rows * cells_of(group, cells_),
        [](MemoryUse& use) -> size_t& { return use.reserved; });
    for (const int64_t length : lengths()) {
      add(group.ring_cells > 0 ? std::min(length, group.ring_cells) : length,
          [](MemoryUse& use) -> size_t& { return use.used; });
    }
    if (bounded) {
      add(spec().rows * cells_of(group, spec().capacity.value_or(0)),
          [](MemoryUse& use) -> size_t& { return *use.capacity; });
    }
  }
  report.v = report.k;
  if (spec().kv_format == KvFormat::kInt8 && !bounded) {
    report.scales.capacity.reset();
  }
}

void InPlaceCache::do_validate(std::vector<std::string>& broken) const {
  const int64_t longest = *std::max_element(lengths().begin(), lengths().end());
  if (longest > cells_) {
    broken.push_back("length " + std::to_string(longest) + " within the " +
                     std::to_string(cells_) + " allocated cells");
  }
  for (size_t i = 0; i < views_.size(); ++i) {
    const Tensor& k = views_[i].k;
    const Place& place = places_[i];
    if (k.requires_grad() || k.size(0) != spec().rows ||
        k.size(2) != cells_of(plan_[place.group], cells_) ||
        k.storage().unsafeGetStorageImpl() !=
            groups_[place.group].k.storage().unsafeGetStorageImpl()) {
      broken.push_back("attention layer " + std::to_string(i) +
                       ": its view shows the storage, but got " +
                       tensor_text(k));
    }
  }
}

}  // namespace kvcache
