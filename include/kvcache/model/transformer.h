// kvcache/model/transformer.h - a decoder driven by configuration.
//
// One forward for every family: norms, positions, attention and feed-forward
// are chosen by the ModelConfig. Its memory is a Step of any Cache.
// B rows, T tokens, V vocabulary.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "kvcache/cache.h"
#include "kvcache/model/config.h"
#include "kvcache/model/log.h"
#include "kvcache/model/weights.h"

namespace kvcache::model {

struct LoadOptions {
  std::optional<at::ScalarType> dtype = {};  // empty: auto, see load_model()
  LogSink log = {};
  std::function<void(double fraction)> progress = {};  // 0 to 1
};

struct ForwardOptions {
  Role role = Role::kPrefill;
  bool all_logits = false;  // else of each row's last live token only
};

// Weights and the forward over them. Immutable after load: safe to share
// between threads, each with a cache of its own. Evaluation only.
class Transformer {
 public:
  // Weights from `source`, checked against `config`, packed once.
  Transformer(ModelConfig config, const WeightSource& source,
              const LoadOptions& options = {});
  ~Transformer();

  const ModelConfig& config() const noexcept;
  at::ScalarType dtype() const noexcept;  // of weights, activations, K/V
  // A row's bits depend on nothing but its own inputs; probed at load.
  bool row_exact(Role role) const noexcept;
  bool roles_agree() const noexcept;
  size_t weight_bytes() const noexcept;
  // What a cache for this model must be made for.
  CacheSpec cache_spec(int64_t rows, std::optional<int64_t> capacity) const;
  // Throws, naming the layer, if a cache was not made for this model.
  void check_cache(const CacheSpec& spec) const;

  // `ids` [B, T] int64, as the step's rows and tokens; ids of dead tokens are
  // not read. Returns float32 logits [B, 1, V], or [B, T, V] with all_logits;
  // 0 for dead tokens and idle rows. Does not commit.
  Tensor forward(const Tensor& ids, Step& step,
                 const ForwardOptions& options = {}) const;
  // The oracle: no memory at all, positions from 0, every key recomputed.
  Tensor forward(const Tensor& ids, const ForwardOptions& options = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A model folder or a .gguf. dtype auto: bfloat16 for a quantised file; else
// the file's own, float16 as bfloat16; float32 where the CPU has no bfloat16
// packing that is row-exact.
std::shared_ptr<const Transformer> load_model(const std::string& path,
                                              const LoadOptions& options = {});

}  // namespace kvcache::model
