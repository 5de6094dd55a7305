// src/model/forward/fused_layers.cpp - layers of a small step in few regions.
#include "src/model/forward/fused_layers.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "src/model/forward/row_loops.h"
#include "src/model/packed/tile_kernels.h"

namespace kvcache::model {
namespace {

Tensor floats(at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions(at::kFloat));
}

// Rows for each thread that may become a member, as large as the widest linear
// needs.
std::span<RowBuffer> member_buffers(std::span<const Layer> layers,
                                    int64_t tokens) {
  static thread_local std::vector<RowBuffer> buffers;
  const auto members = static_cast<size_t>(at::get_num_threads());
  if (buffers.size() < members) buffers.resize(members);
  int64_t groups = 0;
  for (const Layer& layer : layers) {
    for (const Linear* linear :
         {&layer.mixer->input(), &layer.mixer->output(),
          &layer.feed_forward.up(), &layer.feed_forward.down()}) {
      groups = std::max(groups, linear->tiles()->matrix().groups);
    }
  }
  for (RowBuffer& buffer : buffers) buffer.rows(tokens, groups);
  return buffers;
}

}  // namespace

bool FusedLayers::serves(const Pass& pass, std::span<const Layer> layers) {
  return !layers.empty() && layers.front().mixer->input().tiles() != nullptr &&
         pass.adapters == nullptr && pass.tokens.count() <= kMostTokens;
}

FusedLayers::FusedLayers(Pass& pass, std::span<const Layer> layers)
    : pass_(pass),
      layers_(layers),
      kernels_(tile_kernels()),
      loops_(row_loops<float>()),
      tokens_(pass.tokens.count()),
      width_(pass.hidden.size(1)),
      delta_(floats({tokens_, width_})),
      normed_(floats({at::get_num_threads(), width_})),
      buffers_(member_buffers(layers, tokens_)) {}

void FusedLayers::run(int64_t first) {
  region(nullptr, &layers_.front());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    mixed_ = layer.mixer->mix(pass_, first + static_cast<int64_t>(i), made_);
    region(&layer, i + 1 < layers_.size() ? &layers_[i + 1] : nullptr);
  }
}

void FusedLayers::region(const Layer* before, const Layer* after) {
  const auto result_of = [&](const Linear& linear) {
    return floats({tokens_, linear.tiles()->outputs()});
  };
  if (before != nullptr) up_ = result_of(before->feed_forward.up());
  if (after != nullptr) made_ = result_of(after->mixer->input());
  on_team([&](const Member& member) {
    if (before != nullptr) {
      multiply_and_add(before->mixer->output(), quantise(mixed_, member),
                       member);
      member.meet();
      const FeedForward& feed_forward = before->feed_forward;
      multiply(feed_forward.up(), normalise(before->feed_forward_norm, member),
               up_, member);
      member.meet();
      multiply_and_add(feed_forward.down(), activate(feed_forward, member),
                       member);
      member.meet();
    }
    if (after != nullptr) {
      multiply(after->mixer->input(), normalise(after->mixer_norm, member),
               made_, member);
    }
  });
}

template <typename F>
TileRows FusedLayers::share_rows(int64_t width, const Member& member,
                                 const F& fill) {
  const bool alone = tokens_ == 1;
  const auto buffer = static_cast<size_t>(alone ? member.index : 0);
  const TileRows rows = buffers_[buffer].rows(tokens_, tile_groups(width));
  const int64_t last = alone ? 1 : member.last(tokens_);
  for (int64_t i = alone ? 0 : member.first(tokens_); i < last; ++i) {
    fill(rows, i);
  }
  if (!alone) member.meet();
  return rows;
}

TileRows FusedLayers::quantise(const Tensor& x, const Member& member) {
  const int64_t width = x.size(1);
  const auto* from = x.const_data_ptr<float>();
  return share_rows(width, member, [&](const TileRows& rows, int64_t i) {
    kernels_.quantise(from + i * width, width, rows, i);
  });
}

TileRows FusedLayers::normalise(const Normalisation& norm,
                                const Member& member) {
  const NormParameters parameters = norm.parameters();
  auto* hidden = data_of<float>(pass_.hidden);
  float* normed = data_of<float>(normed_) + member.index * width_;
  return share_rows(width_, member, [&](const TileRows& rows, int64_t i) {
    loops_.add_norm(normed, hidden + i * width_, nullptr, parameters, width_);
    kernels_.quantise(normed, width_, rows, i);
  });
}

TileRows FusedLayers::activate(const FeedForward& layer, const Member& member) {
  const int64_t width = layer.down().tiles()->inputs();
  const int64_t stride = up_.size(1);
  const TileRows rows = buffers_[0].rows(tokens_, tile_groups(width));
  const int64_t group = member.first(tile_groups(width));
  const int64_t first = group * kTileInputs;
  const int64_t end =
      std::min(width, member.last(tile_groups(width)) * kTileInputs);
  if (first < end) {
    const auto activation = layer.loop<float>();
    const TileRows mine{rows.rows, rows.q + group * rows.rows * kTileInputs,
                        rows.scale + group * rows.rows,
                        rows.offset + group * rows.rows};
    for (int64_t i = 0; i < tokens_; ++i) {
      const float* x = up_.const_data_ptr<float>() + i * stride + first;
      float* y = data_of<float>(pass_.activated) + i * width + first;
      activation(y, x, layer.gated() ? x + width : nullptr, end - first);
      kernels_.quantise(y, end - first, mine, i);
    }
  }
  member.meet();
  return rows;
}

FusedLayers::Columns FusedLayers::multiply(const Linear& linear,
                                           const TileRows& x, const Tensor& out,
                                           const Member& member) const {
  const TiledLinear& tiles = *linear.tiles();
  const int64_t first = member.first(tiles.matrix().blocks());
  const int64_t last = member.last(tiles.matrix().blocks());
  const int64_t width = tiles.outputs();
  const Columns mine{first * kTileOutputs,
                     std::min(last * kTileOutputs, width)};
  if (mine.first >= mine.end) return {};
  float* to = data_of<float>(out);
  kernels_.multiply(tiles.matrix(), x, to, width, first, last);
  if (!tiles.bias().defined()) return mine;
  const auto* bias = tiles.bias().const_data_ptr<float>();
  for (int64_t i = 0; i < tokens_; ++i) {
    loops_.add(to + i * width + mine.first, bias + mine.first,
               mine.end - mine.first);
  }
  return mine;
}

void FusedLayers::multiply_and_add(const Linear& linear, const TileRows& x,
                                   const Member& member) const {
  const Columns mine = multiply(linear, x, delta_, member);
  for (int64_t i = 0; i < tokens_; ++i) {
    const int64_t at = i * width_ + mine.first;
    loops_.add(data_of<float>(pass_.hidden) + at,
               delta_.const_data_ptr<float>() + at, mine.end - mine.first);
  }
}

}  // namespace kvcache::model
