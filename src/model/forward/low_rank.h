// src/model/forward/low_rank.h - adapters beside the linears of a decoder.
//
// A decoder has fewer linears than a model has matrices: q, k and v are rows of
// one. An adapter's part of such a linear is added to some of its columns.
// r rank, K inputs, N outputs.
#pragma once

#include <array>
#include <vector>

#include "kvcache/model/adapter.h"
#include "src/model/forward/decoder.h"
#include "src/model/forward/pass.h"

namespace kvcache::model {

// The linears of a layer.
enum class LinearPlace : uint8_t {
  kMixerInputs,  // q | k | v and gates, or those of linear attention
  kMixerOutput,
  kUp,  // gate | up
  kDown
};
inline constexpr size_t kPlaces = 4;

struct LowRank {
  int64_t first = 0;  // column of the linear's output
  Tensor a, b;        // [r, K], [N, r] times the scale; float32
};

// The parts of one linear; several, as q is not a neighbour of its gate.
struct PlacedModule {
  int64_t layer = 0;
  LinearPlace place = LinearPlace::kMixerInputs;
  std::vector<LowRank> parts;
};
PlacedModule placed(const AdapterModule& module, const ModelConfig& config);

// Those of the packed decoder: a row's own loop, so that its bits depend on
// nothing else.
class PackedAdapters final : public DecoderAdapters {
 public:
  PackedAdapters(const std::vector<Adapter>& adapters,
                 const ModelConfig& config);

  const std::vector<LowRank>& parts(int64_t adapter, int64_t layer,
                                    LinearPlace place) const {
    return layers_[static_cast<size_t>(adapter)][static_cast<size_t>(layer)]
                  [static_cast<size_t>(place)];
  }

 private:
  using LayerParts = std::array<std::vector<LowRank>, kPlaces>;
  std::vector<std::vector<LayerParts>> layers_;  // [adapters, layers]; b [r, N]
};

// The adapters of a step's tokens.
class TokenAdapters {
 public:
  // All must outlive it; `options` are on the CPU. Throws for an adapter that
  // is not there.
  TokenAdapters(const PackedAdapters& adapters, const TokenSpans& tokens,
                const ForwardOptions& options);

  bool any() const;  // token that has one
  // y [N, width] of a linear over x [N, width]: adds the adapters' part to the
  // rows that have one.
  void add(int64_t layer, LinearPlace place, const Tensor& x,
           const Tensor& y) const;

 private:
  const PackedAdapters& adapters_;
  std::vector<int64_t> of_token_;  // [B * T]; -1: none, or dead
};

// Those of the operator decoder: matrices of all adapters side by side, chosen
// on the device by each row's number. n adapters.
class OpsAdapters final : public DecoderAdapters {
 public:
  OpsAdapters(const std::vector<Adapter>& adapters, const ModelConfig& config,
              at::Device device);

  struct Part {
    int64_t first = 0;
    Tensor a, b;  // [n, r, K], [n, N, r]; 0 for adapters that lack it
  };
  const std::vector<Part>& parts(int64_t layer, LinearPlace place) const {
    return layers_[static_cast<size_t>(layer)][static_cast<size_t>(place)];
  }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  std::vector<std::array<std::vector<Part>, kPlaces>> layers_;
};

// The adapters of a step's rows, by operators that may be recorded.
class RowAdapters {
 public:
  // `options` on the device.
  RowAdapters(const OpsAdapters& adapters, const Tensor& positions,
              const ForwardOptions& options);
  // y [B, T, width] of a linear over x [B, T, width], in place.
  void add(int64_t layer, LinearPlace place, const Tensor& x,
           const Tensor& y) const;

 private:
  const OpsAdapters& adapters_;
  Tensor index_;  // [B], within the adapters
  Tensor on_;     // [B, T, 1] bool
};

// `x` through a linear of `pass`, and what the adapters of its tokens add.
template <typename AnyLinear, typename AnyPass>
Tensor run_linear(const AnyLinear& linear, const AnyPass& pass, int64_t layer,
                  LinearPlace place, const Tensor& x) {
  Tensor y = linear(x);
  if (pass.adapters != nullptr) pass.adapters->add(layer, place, x, y);
  return y;
}

}  // namespace kvcache::model
