// src/model/forward/fused_layers.h - layers over tiles for a step of few
// tokens, in few parallel regions.
//
// From what one mixer made to what the next one reads is a single region of
// four products, a team's own barriers between them. The bits are those of the
// blocks: the same loops, in the same order of additions.
// M tokens.
#pragma once

#include <span>

#include "src/model/forward/blocks.h"
#include "src/model/forward/team.h"
#include "src/model/packed/activations.h"

namespace kvcache::model {

class FusedLayers {
 public:
  // More tokens are faster block by block.
  static constexpr int64_t kMostTokens = 16;
  // Whether `layers` are of tiles throughout, and `pass` is small and of base
  // weights alone.
  static bool serves(const Pass& pass, std::span<const Layer> layers);

  FusedLayers(Pass& pass, std::span<const Layer> layers);

  // Runs `layers`, the first of which is the model's layer `first`; adds all
  // that they make to pass.hidden.
  void run(int64_t first);

 private:
  void region(const Layer* before, const Layer* after);
  // Quantised rows that fill(rows, token) writes one of. That of one token each
  // member works out for itself, which is faster than to meet; several are
  // shared out.
  template <typename F>
  TileRows share_rows(int64_t width, const Member& member, const F& fill);
  TileRows quantise(const Tensor& x, const Member& member);
  TileRows normalise(const Normalisation& norm, const Member& member);
  // What `down` reads, shared out by columns.
  TileRows activate(const FeedForward& layer, const Member& member);
  // This member's columns of x W^T + bias into `out` [M, N]; returns them.
  struct Columns {
    int64_t first = 0, end = 0;
  };
  Columns multiply(const Linear& linear, const TileRows& x, const Tensor& out,
                   const Member& member) const;
  void multiply_and_add(const Linear& linear, const TileRows& x,
                        const Member& member) const;

  Pass& pass_;
  std::span<const Layer> layers_;
  const TileKernels& kernels_;
  const RowLoops<float>& loops_;
  int64_t tokens_, width_;        // M, hidden_size
  Tensor made_, mixed_;           // of mixers: [M, N] read, [M, K] written
  Tensor up_, delta_;             // [M, N], [M, hidden_size]
  Tensor normed_;                 // [members, hidden_size]
  std::span<RowBuffer> buffers_;  // of each member; the first is the shared one
};

}  // namespace kvcache::model
