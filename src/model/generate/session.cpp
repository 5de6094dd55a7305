// session.cpp - prefill once, decode one token at a time.

#include "kvcache/model/session.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "feed.h"

namespace kvcache::model {

CacheSession::CacheSession(std::shared_ptr<const LanguageModel> model,
                           const SessionOptions& options)
    : model_(std::move(model)), options_(options) {
  TORCH_CHECK_VALUE(model_, "[CacheSession] the model must not be null.");
  TORCH_CHECK_VALUE(options.kind != CacheKind::kNone,
                    "[CacheSession] a session needs a cache but the kind is "
                    "none; choose concat or preallocated.");
  context_ = effective_context("CacheSession", *model_, options.context,
                               options.chunk);
  // A model that contradicts its own cache is refused here, not at a prefill.
  model_->check_cache(model_->cache_spec(1, context_));
}

int64_t CacheSession::length() const noexcept {
  return cache_ ? cache_->lengths()[0] : 0;
}

int64_t CacheSession::rows() const noexcept {
  return cache_ ? cache_->spec().rows : 0;
}

void CacheSession::check_ids_tensor(const char* function,
                                    const Tensor& ids) const {
  TORCH_CHECK_VALUE(
      ids.defined() && ids.scalar_type() == at::kLong && ids.device().is_cpu(),
      "[", function, "] ids must be int64 on the CPU but got ", ids.toString(),
      ".");
  const Tensor dense = ids.contiguous();
  check_ids(
      function,
      {dense.const_data_ptr<int64_t>(), static_cast<size_t>(dense.numel())},
      model_->vocab_size());
}

Tensor CacheSession::prefill(const Tensor& ids) {
  TORCH_CHECK_VALUE(
      ids.dim() == 2 && ids.size(0) > 0 && ids.size(1) > 0 &&
          ids.size(1) <= context_,
      "[CacheSession::prefill] ids must be a non-empty [B, T] with T up to the "
      "context of ",
      context_, " tokens but got ", ids.sizes(), ".");
  check_ids_tensor("CacheSession::prefill", ids);
  // The old session lives until the new one has its logits.
  auto fresh = make_cache(options_.kind, *model_,
                          {.rows = ids.size(0), .capacity = context_});
  Tensor logits =
      model::prefill(*model_, *fresh, ids, {.chunk = options_.chunk});
  cache_ = std::move(fresh);
  return logits;
}

Tensor CacheSession::decode(const Tensor& ids) {
  TORCH_CHECK_VALUE(cache_,
                    "[CacheSession::decode] the session is empty; call "
                    "prefill() before decode().");
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.size(0) == rows() && ids.size(1) == 1,
                    "[CacheSession::decode] ids must be [", rows(),
                    ", 1], one new token of each row, but got ", ids.sizes(),
                    ".");
  TORCH_CHECK_VALUE(length() < context_,
                    "[CacheSession::decode] the context of ", context_,
                    " tokens is full; prefill the cropped window instead, as "
                    "recompute_window() does.");
  check_ids_tensor("CacheSession::decode", ids);
  return feed(*model_, *cache_, ids, {.role = Role::kDecode});
}

Tensor CacheSession::recompute_window(const Tensor& ids,
                                      std::optional<int64_t> keep) {
  const int64_t kept = keep.value_or(context_);
  TORCH_CHECK_VALUE(kept >= 1 && kept <= context_,
                    "[CacheSession::recompute_window] keep must be between 1 "
                    "and the context of ",
                    context_, " tokens but got ", kept, ".");
  TORCH_CHECK_VALUE(ids.dim() == 2 && ids.size(1) > 0,
                    "[CacheSession::recompute_window] ids must be a non-empty "
                    "[B, N] but got ",
                    ids.sizes(), ".");
  const int64_t count = std::min(kept, ids.size(1));
  return prefill(ids.narrow(1, ids.size(1) - count, count));
}

StorageReport CacheSession::storage() const {
  StorageReport report{.allocation =
                           options_.kind == CacheKind::kConcat
                               ? "grows by concatenation; no unused capacity"
                               : "allocated up front; written in place"};
  if (!cache_) return report;
  const MemoryReport memory = cache_->memory();
  report.positions = length();
  report.logical_bytes = memory.k.used + memory.v.used;
  report.storage_bytes = memory.k.reserved + memory.v.reserved;
  report.dtype = cache_->spec().dtype;
  return report;
}

}  // namespace kvcache::model
