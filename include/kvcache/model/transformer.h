// kvcache/model/transformer.h - a decoder driven by configuration.
//
// One forward for every family: norms, positions, attention and feed-forward
// are chosen by the ModelConfig. Its memory is a Step of any Cache. Two sets of
// arithmetic, one meaning: see ForwardKind.
// B rows, T tokens, V vocabulary.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/model/adapter.h"
#include "kvcache/model/config.h"
#include "kvcache/model/language_model.h"
#include "kvcache/model/log.h"
#include "kvcache/model/weights.h"

namespace kvcache::model {

enum class ForwardKind : uint8_t {
  kAuto,       // packed on the CPU, operators elsewhere
  kPackedCpu,  // own kernels over packed weights; row-exact, see row_exact()
  kOps         // LibTorch's operators, on any device
};

// How linears are kept on the CPU. Packed ones are multiplied as they are, with
// activations of 16-bit integers: K/V are bfloat16, all else float32, and a
// token is a few times faster, as it reads that much less memory.
enum class WeightPacking : uint8_t {
  kNone,  // in `dtype`
  kAuto,  // Q4_0, Q4_1, Q5_0 and Q8_0 of a file as they are, all else as kQ8
  kQ8,    // what is not kept: 8 bits, a scale per 32 inputs
  kQ4     // what is not kept: 4 bits, a scale and a minimum per 32 inputs
};

struct LoadOptions {
  std::optional<at::ScalarType> dtype = {};   // empty: auto, see load_model()
  std::optional<WeightPacking> packing = {};  // empty: auto, see load_model()
  // An error if the program does not link it, or there is none of that index.
  at::Device device = at::kCPU;
  ForwardKind forward = ForwardKind::kAuto;
  LogSink log = {};
  std::function<void(double fraction)> progress = {};  // 0 to 1
};

// Weights and the forward over them. Immutable after load: safe to share
// between threads, each with a cache of its own. Evaluation only.
class Transformer final : public LanguageModel {
 public:
  // Weights of `source`, checked against `config`, packed or moved once. On the
  // CPU `source` is kept, as the packed forward reads embeddings from it row by
  // row. No dtype: float32.
  Transformer(ModelConfig config, std::shared_ptr<const WeightSource> source,
              const LoadOptions& options = {});
  ~Transformer() override;

  // The same weights, not a copy of them, with these adapters beside them in
  // place of any there are. Adapters are kept and computed in float32. Throws
  // for one that does not fit, and for two of one name.
  std::shared_ptr<const Transformer> with_adapters(
      const std::vector<Adapter>& adapters) const;
  std::span<const AdapterInfo> adapters() const noexcept override;

  const ModelConfig& config() const noexcept;
  at::ScalarType dtype() const noexcept;  // of K/V; not packed: of all else too
  WeightPacking packing() const noexcept;
  at::Device device() const noexcept;         // of weights, K/V and logits
  ForwardKind forward_kind() const noexcept;  // never kAuto
  // A row's bits depend on nothing but its own inputs; probed at load. False
  // for kOps: LibTorch's linears change their order of additions with the
  // number of rows. Equal calls still give equal bits, so prefill in canonical
  // chunks makes a warm run repeat a cold one.
  bool row_exact(Role role) const noexcept override;
  // Prefilled tokens have the bits of decoded ones. False for kOps.
  bool roles_agree() const noexcept override;
  size_t weight_bytes() const noexcept;  // of linears and norms

  int64_t vocab_size() const noexcept override { return config().vocab_size; }
  int64_t context_length() const noexcept override {
    return config().context_length;
  }
  std::span<const int64_t> end_tokens() const noexcept override {
    return config().eos_ids;
  }
  CacheSpec cache_spec(int64_t rows,
                       std::optional<int64_t> capacity) const override;
  // Of layers [first, last) alone: the memory of a part of the model.
  CacheSpec cache_spec(int64_t rows, std::optional<int64_t> capacity,
                       int64_t first, int64_t last) const;
  void check_cache(const CacheSpec& spec) const override;
  // Two parts, one after the other, give the bits of the whole where the
  // forward is row-exact, as do logits of chosen tokens; layers [L, L) of a
  // model of L layers are its head alone.
  //
  // `ids` on the CPU are checked, and copied to the model's device. On another
  // device nothing is read back, so that a step may be recorded in a CUDA
  // graph: ids there are not checked but clamped to the vocabulary, as are
  // logit_ids, and positions there to the context, likewise logit_positions to
  // the step and adapters to those there are. Logits are on the model's device.
  Tensor forward(const Tensor& ids, Step& step,
                 const ForwardOptions& options = {}) const override;
  Tensor forward(const Tensor& ids,
                 const ForwardOptions& options = {}) const override;

 private:
  struct Impl;
  struct Beside;  // adapters
  Transformer(std::shared_ptr<const Impl> impl,
              std::shared_ptr<const Beside> beside);

  std::shared_ptr<const Impl> impl_;
  std::shared_ptr<const Beside> beside_;  // null: none
};

// A model folder or a .gguf. Without a dtype the weights of a quantised file
// stay packed on the CPU, elsewhere it runs in bfloat16. Any other file runs in
// its own dtype, float16 as bfloat16; in float32 for the CPU's forward where
// that has no row-exact product of bfloat16.
std::shared_ptr<const Transformer> load_model(const std::string& path,
                                              const LoadOptions& options = {});

}  // namespace kvcache::model
