#include "kvcache/concat_cache.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "held_rows.h"
#include "kv_format.h"
#include "kv_report.h"
#include "kvcache/detail/step_data.h"
#include "storage.h"

namespace kvcache {
namespace {

CacheSpec checked(CacheSpec spec) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.kv_format == KvFormat::kPlain,
      "[ConcatCache::ConcatCache] K/V must be plain but the CacheSpec asks "
      "for ",
      format_text(spec.kv_format),
      "; use a PreallocatedCache, WindowCache, SlotCache or StateCache.");
  return spec;
}

}  // namespace

ConcatCache::ConcatCache(CacheSpec spec)
    : Cache(checked(std::move(spec)), States::kSwap),
      layers_(attention_layers(this->spec())) {
  committed_.resize(layers_.size());
  pending_.resize(layers_.size());
}

std::string ConcatCache::describe() const {
  return describe_cache("ConcatCache", *this, layers_);
}

KvTensors ConcatCache::grown(size_t index, std::span<const int64_t> rows,
                             int64_t length) const {
  const AttentionLayer& layer = layers_[index];
  const auto count = static_cast<int64_t>(rows.size());
  KvTensors to;
  for (auto part : {&KvTensors::k, &KvTensors::v}) {
    to.*part = new_empty({count, layer.heads, length, layer.head_dim},
                         spec().dtype, spec().device);
    const Tensor& from = committed_[index].*part;
    for (int64_t i = 0; i < count && from.defined(); ++i) {
      const int64_t held = lengths()[rows[i]];
      (to.*part)
          .narrow(0, i, 1)
          .narrow(2, 0, held)
          .copy_(from.narrow(0, rows[i], 1).narrow(2, 0, held));
    }
  }
  return to;
}

const char* ConcatCache::do_cannot_record() const noexcept {
  return "its addresses move with every commit; use a WindowCache or a "
         "SlotCache";
}

void ConcatCache::do_reserve(StepData& step, int64_t index) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<int64_t> rows(lengths().size());
  std::iota(rows.begin(), rows.end(), 0);
  const int64_t length = std::max(
      step.longest, *std::max_element(lengths().begin(), lengths().end()));
  KvTensors& to = pending_[index];
  to = grown(static_cast<size_t>(index), rows, length);
  KvView& view = step.views[index];
  view.k = to.k.narrow(0, step.first_row, step.rows);
  view.v = to.v.narrow(0, step.first_row, step.rows);
}

void ConcatCache::do_commit(StepData& step) noexcept {
  for (size_t i = 0; i < layers_.size(); ++i) {
    committed_[i] = std::exchange(pending_[i], {});
    step.views[i].k = step.views[i].v = Tensor();  // keep no storage alive
  }
  raise_epoch();
}

void ConcatCache::do_abandon(StepData& step) noexcept {
  for (size_t i = 0; i < layers_.size(); ++i) {
    pending_[i] = {};
    step.views[i].k = step.views[i].v = Tensor();
  }
}

void ConcatCache::do_shrunk() {
  if (std::all_of(lengths().begin(), lengths().end(),
                  [](int64_t n) { return n == 0; })) {
    release();
  }
}

void ConcatCache::release() {
  if (!committed_.empty() && committed_[0].k.defined()) {
    std::fill(committed_.begin(), committed_.end(), KvTensors{});
    raise_epoch();
  }
}

KvTensors ConcatCache::do_row(int64_t row, int64_t index) const {
  const KvTensors& all = committed_[static_cast<size_t>(index)];
  return {all.k.select(0, row), all.v.select(0, row)};
}

void ConcatCache::do_import(int64_t row, const Checkpoint& from, int64_t n) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<int64_t> rows(lengths().size());
  std::iota(rows.begin(), rows.end(), 0);
  int64_t length = n;
  for (const int64_t other : rows) {
    length = std::max(length, lengths()[other]);
  }
  const bool room = !committed_.empty() && committed_[0].k.defined() &&
                    committed_[0].k.size(2) >= length;
  std::vector<KvTensors> next = committed_;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!room) {
      next[i] = grown(i, rows, length);
    }
    put_row(from, i, n, layers_[i].sinks,
            {next[i].k.select(0, row), next[i].v.select(0, row)}, {});
  }
  if (!room) {
    committed_ = std::move(next);
    raise_epoch();
  }
}

void ConcatCache::do_reorder(std::span<const int64_t> rows) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  int64_t length = 0;
  for (const int64_t row : rows) {
    length = std::max(length, lengths()[row]);
  }
  if (length == 0) {
    release();
    return;
  }
  std::vector<KvTensors> next;
  for (size_t i = 0; i < layers_.size(); ++i) {
    next.push_back(grown(i, rows, length));
  }
  committed_ = std::move(next);
  raise_epoch();
}

std::unique_ptr<Cache> ConcatCache::do_make() const {
  return std::make_unique<ConcatCache>(spec());
}

void ConcatCache::do_memory(MemoryReport& report) const {
  add_kv_use(report, *this, layers_);
  StorageBytes k, v;
  for (const KvTensors& pair : committed_) {
    k.add(pair.k);
    v.add(pair.v);
  }
  for (const KvTensors& pair : pending_) {
    k.add(pair.k);
    v.add(pair.v);
  }
  report.k.reserved = k.total();
  report.v.reserved = v.total();
}

void ConcatCache::do_validate(std::vector<std::string>& broken) const {
  const int64_t longest = *std::max_element(lengths().begin(), lengths().end());
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (auto part : {&KvTensors::k, &KvTensors::v}) {
      const Tensor& t = committed_[i].*part;
      const bool sound = t.defined()
                             ? t.size(0) == spec().rows &&
                                   t.size(2) >= longest && !t.requires_grad()
                             : longest == 0;
      if (!sound) {
        broken.push_back("attention layer " + std::to_string(i) +
                         ": K and V hold every row's tokens, but got " +
                         tensor_text(t));
      }
    }
  }
}

}  // namespace kvcache
