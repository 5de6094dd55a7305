// feed.cpp - token ids through a model: checks, chunks, logits.

#include "feed.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace kvcache::model {

void check_ids(const char* function, std::span<const int64_t> ids,
               int64_t vocab_size) {
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](int64_t id) {
    return id < 0 || id >= vocab_size;
  });
  TORCH_CHECK_INDEX(bad == ids.end(), "[", function,
                    "] token ids must be in [0, ", vocab_size, ") but id ",
                    bad - ids.begin(), " is ", *bad, ".");
}

void check_model_cache(const char* function, const LanguageModel& model,
                       const Cache& cache, int64_t rows) {
  model.check_cache(cache.spec());
  TORCH_CHECK_VALUE(cache.spec().rows == rows, "[", function,
                    "] the cache must have ", rows, " row(s) but got ",
                    cache.spec().rows, ".");
}

int64_t effective_context(const char* function, const LanguageModel& model,
                          std::optional<int64_t> context, int64_t chunk) {
  TORCH_CHECK_VALUE(chunk >= 1, "[", function,
                    "] the chunk must be at least 1 token but got ", chunk,
                    ".");
  if (!context) return model.context_length();
  TORCH_CHECK_VALUE(*context >= 1 && *context <= model.context_length(), "[",
                    function, "] the context must be between 1 and ",
                    model.context_length(), " tokens, the model's, but got ",
                    *context, ".");
  return *context;
}

Tensor ids_tensor(std::span<const int64_t> ids) {
  Tensor tensor = at::empty({1, static_cast<int64_t>(ids.size())}, at::kLong);
  std::memcpy(tensor.mutable_data_ptr<int64_t>(), ids.data(), ids.size_bytes());
  return tensor;
}

std::span<const float> logits_row(const Tensor& logits, int64_t row) {
  TORCH_CHECK_VALUE(logits.dim() == 3 && logits.scalar_type() == at::kFloat &&
                        logits.is_contiguous() && logits.device().is_cpu(),
                    "[LanguageModel::forward] logits must be a dense float32 "
                    "[B, T, V] on the CPU but got ",
                    logits.toString(), " ", logits.sizes(), ".");
  const auto width = static_cast<size_t>(logits.size(2));
  return {logits.const_data_ptr<float>() + static_cast<size_t>(row) * width,
          width};
}

namespace {

// Where the sampler reads them; waits for a device.
Tensor on_cpu(const Tensor& logits) { return logits.cpu().contiguous(); }

}  // namespace

Tensor feed(const LanguageModel& model, Cache& cache, const Tensor& ids,
            const ForwardOptions& options, int64_t first_row,
            bool state_window) {
  const c10::InferenceMode guard;
  Step step = cache.begin_step({.tokens = ids.size(1),
                                .first_row = first_row,
                                .rows = ids.size(0),
                                .state_window = state_window});
  Tensor logits = model.forward(ids, step, options);
  step.commit();
  return on_cpu(logits);
}

Tensor feed(const LanguageModel& model, const Tensor& ids,
            const ForwardOptions& options) {
  const c10::InferenceMode guard;
  return on_cpu(model.forward(ids, options));
}

Tensor prefill(const LanguageModel& model, Cache& cache, const Tensor& ids,
               const PrefillOptions& options) {
  const int64_t total = ids.size(1);
  const int64_t start = cache.lengths()[0];
  const bool all = static_cast<bool>(options.all_logits);
  Tensor logits;
  for (int64_t done = 0; done < total;) {
    if (options.stop.stop_requested()) return {};
    const int64_t room = options.chunk - (start + done) % options.chunk;
    const int64_t count = std::min(room, total - done);
    logits = feed(model, cache, ids.narrow(1, done, count),
                  with_adapter({.role = Role::kPrefill, .all_logits = all},
                               options.adapter));
    done += count;
    if (all) options.all_logits(logits);
    if (options.progress) options.progress(done, total);
  }
  return all ? Tensor() : logits;
}

}  // namespace kvcache::model
