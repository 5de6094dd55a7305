#include "kvcache/preallocated_cache.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "kv_report.h"
#include "kvcache/detail/step_data.h"
#include "storage.h"

namespace kvcache {
namespace {

// All four numbers that make a shape, or an error that names them.
CacheSpec checked(CacheSpec spec, const PreallocatedOptions& options) {
  const std::vector<AttentionLayer> layers = attention_layers(spec);
  int64_t heads = layers.empty() ? 1 : layers[0].heads;
  int64_t head_dim = layers.empty() ? 1 : layers[0].head_dim;
  for (const AttentionLayer& layer : layers) {
    heads = std::min(heads, layer.heads);
    head_dim = std::min(head_dim, layer.head_dim);
  }
  const bool growing = options.growth != Growth::kNone;
  const int64_t capacity = spec.capacity.value_or(growing ? 1 : 0);
  TORCH_CHECK_VALUE(
      !spec.layers.empty() && capacity >= 1 && heads >= 1 && head_dim >= 1,
      "[PreallocatedCache::PreallocatedCache] layers, capacity, kv_heads and "
      "head_dim must be >= 1 but got layers=",
      spec.layers.size(), " capacity=", capacity, " kv_heads=", heads,
      " head_dim=", head_dim, "; fix the CacheSpec.");
  TORCH_CHECK_VALUE(options.multiple >= 1,
                    "[PreallocatedCache::PreallocatedCache] multiple must be "
                    ">= 1 but got ",
                    options.multiple, "; 1 allocates exactly.");
  TORCH_CHECK_VALUE(
      !options.initial ||
          (growing && *options.initial >= 0 &&
           *options.initial <= spec.capacity.value_or(*options.initial)),
      "[PreallocatedCache::PreallocatedCache] initial must be in [0, capacity] "
      "of a growing cache but got ",
      options.initial.value_or(0), "; set PreallocatedOptions::growth.");
  return spec;
}

}  // namespace

PreallocatedCache::PreallocatedCache(CacheSpec spec,
                                     const PreallocatedOptions& options)
    : Cache(checked(std::move(spec), options), States::kCopy),
      options_(options),
      layers_(attention_layers(this->spec())) {
  std::vector<std::pair<AttentionLayer, int64_t>> groups;  // shape, layers
  for (const AttentionLayer& layer : layers_) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return g.first.heads == layer.heads && g.first.head_dim == layer.head_dim;
    });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {layer, 0});
    }
    places_.push_back(
        {static_cast<size_t>(group - groups.begin()), group->second++});
  }
  const int64_t cells = options_.growth == Growth::kNone
                            ? *this->spec().capacity
                            : rounded(options_.initial.value_or(0));
  adopt(allocate(this->spec().rows, cells), cells);
}

int64_t PreallocatedCache::rounded(int64_t cells) const {
  const int64_t over = cells % options_.multiple;
  const int64_t more = over == 0 ? 0 : options_.multiple - over;
  return more > capacity() - cells ? capacity() : cells + more;
}

std::vector<KvTensors> PreallocatedCache::allocate(int64_t rows,
                                                   int64_t cells) const {
  std::vector<int64_t> layers;  // of each group
  std::vector<AttentionLayer> shapes;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (places_[i].group == layers.size()) {
      layers.push_back(0);
      shapes.push_back(layers_[i]);
    }
    ++layers[places_[i].group];
  }
  std::vector<KvTensors> groups;
  for (size_t g = 0; g < layers.size(); ++g) {
    const std::vector<int64_t> sizes{layers[g], rows, cells, shapes[g].heads,
                                     shapes[g].head_dim};
    groups.push_back({new_zeros(sizes, spec().dtype, spec().device),
                      new_zeros(sizes, spec().dtype, spec().device)});
  }
  return groups;
}

void PreallocatedCache::adopt(std::vector<KvTensors> groups, int64_t cells) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<KvTensors> views;
  for (const Place& place : places_) {
    const KvTensors& group = groups[place.group];
    views.push_back({group.k.select(0, place.layer).permute({0, 2, 1, 3}),
                     group.v.select(0, place.layer).permute({0, 2, 1, 3})});
  }
  groups_ = std::move(groups);
  views_ = std::move(views);
  allocated_ = cells;
}

void PreallocatedCache::grow(int64_t needed) {
  int64_t cells = needed;
  if (options_.growth == Growth::kDoubling) {
    cells = std::max(cells, std::min(allocated_, capacity() / 2) * 2);
  }
  cells = rounded(cells);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<KvTensors> groups = allocate(spec().rows, cells);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].k.narrow(2, 0, allocated_).copy_(groups_[g].k);
    groups[g].v.narrow(2, 0, allocated_).copy_(groups_[g].v);
  }
  adopt(std::move(groups), cells);
  raise_epoch();
}

void PreallocatedCache::reserve(int64_t tokens) {
  TORCH_CHECK_VALUE(tokens >= 0 && tokens <= capacity(),
                    "[PreallocatedCache::reserve] tokens must be in [0, ",
                    capacity(), "] but got ", tokens,
                    "; raise CacheSpec::capacity.");
  check_idle("reserve");
  if (tokens > allocated_) {
    grow(tokens);
  }
}

size_t PreallocatedCache::bytes() const {
  size_t bytes = 0;
  for (const KvTensors& group : groups_) {
    bytes += group.k.nbytes() + group.v.nbytes();
  }
  return bytes;
}

double PreallocatedCache::mib() const {
  return static_cast<double>(bytes()) / (1024.0 * 1024.0);
}

size_t PreallocatedCache::bytes_per_token() const {
  return token_bytes(spec());
}

std::string PreallocatedCache::describe() const {
  return describe_cache("PreallocatedCache", *this, layers_);
}

void PreallocatedCache::do_begin_host(StepData& step) {
  if (step.longest > allocated_) {
    grow(step.longest);
  }
}

void PreallocatedCache::do_begin_device(StepData& step) {
  if (!step.reshaped) {
    return;
  }
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < layers_.size(); ++i) {
    KvView& view = step.views[i];
    view.k = views_[i].k.narrow(0, step.first_row, step.rows);
    view.v = views_[i].v.narrow(0, step.first_row, step.rows);
    view.sliding = layers_[i].sliding;
  }
}

KvTensors PreallocatedCache::do_export(int64_t row, int64_t index) const {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const int64_t length = lengths()[row];
  const auto copy = [&](const Tensor& view) {
    return view.select(0, row)
        .narrow(1, 0, length)
        .clone(at::MemoryFormat::Contiguous);
  };
  return {copy(views_[index].k), copy(views_[index].v)};
}

void PreallocatedCache::do_import(int64_t row, const Checkpoint& from,
                                  int64_t n) {
  if (n > allocated_) {
    grow(n);
  }
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int64_t first = std::min(from.first[i], n);
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      (views_[i].*part)
          .select(0, row)
          .narrow(1, first, n - first)
          .copy_((from.kv[i].*part).narrow(1, 0, n - first));
    }
  }
}

void PreallocatedCache::do_reorder(std::span<const int64_t> rows) {
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
    gathered.push_back({group.k.narrow(2, 0, longest).index_select(1, index),
                        group.v.narrow(2, 0, longest).index_select(1, index)});
  }
  if (count != spec().rows) {
    std::vector<KvTensors> groups = allocate(count, allocated_);
    for (size_t g = 0; g < groups.size(); ++g) {
      groups[g].k.narrow(2, 0, longest).copy_(gathered[g].k);
      groups[g].v.narrow(2, 0, longest).copy_(gathered[g].v);
    }
    adopt(std::move(groups), allocated_);
    return;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].k.narrow(2, 0, longest).copy_(gathered[g].k);
    groups_[g].v.narrow(2, 0, longest).copy_(gathered[g].v);
  }
}

std::unique_ptr<Cache> PreallocatedCache::do_make() const {
  PreallocatedOptions options = options_;
  if (options.growth != Growth::kNone) {
    options.initial = allocated_;
  }
  return std::make_unique<PreallocatedCache>(spec(), options);
}

void PreallocatedCache::do_memory(MemoryReport& report) const {
  add_kv_use(report, *this, layers_);
  StorageBytes k, v;
  for (const KvTensors& group : groups_) {
    k.add(group.k);
    v.add(group.v);
  }
  report.k.reserved = k.total();
  report.v.reserved = v.total();
}

void PreallocatedCache::do_validate(std::vector<std::string>& broken) const {
  const int64_t longest = *std::max_element(lengths().begin(), lengths().end());
  if (longest > allocated_) {
    broken.push_back("length " + std::to_string(longest) + " within the " +
                     std::to_string(allocated_) + " allocated cells");
  }
  for (size_t i = 0; i < views_.size(); ++i) {
    const Tensor& k = views_[i].k;
    const KvTensors& group = groups_[places_[i].group];
    if (k.requires_grad() || k.size(0) != spec().rows ||
        k.size(2) != allocated_ ||
        k.storage().unsafeGetStorageImpl() !=
            group.k.storage().unsafeGetStorageImpl()) {
      broken.push_back("attention layer " + std::to_string(i) +
                       ": its view shows the storage, but got " +
                       tensor_text(k));
    }
  }
}

}  // namespace kvcache
