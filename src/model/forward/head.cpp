// src/model/forward/head.cpp - logits of a few tokens.
#include "src/model/forward/head.h"

#include <ATen/ops/empty.h>

#include "src/model/packed/dense_tiles.h"

namespace kvcache::model {

Tensor Head::operator()(const Tensor& x, std::span<const int64_t> ids) const {
  return all_.tiles() != nullptr ? all_.tiles()->outputs_of(x, ids)
                                 : dense(x, ids);
}

Tensor Head::dense(const Tensor& x, std::span<const int64_t> ids) const {
  const int64_t width = x.size(1), count = std::ssize(ids);
  Tensor rows = at::empty({count, width}, at::TensorOptions(at::kFloat));
  for (int64_t i = 0; i < count; ++i) {
    source_->read_rows(name_, ids[static_cast<size_t>(i)], 1,
                       rows.mutable_data_ptr<float>() + i * width);
  }
  const DenseTiles tiles(rows.to(x.scalar_type()));
  Tensor sums = tiles(x);
  if (bias_.defined()) {
    const Tensor bias = bias_.to(at::kFloat);
    for (int64_t i = 0; i < count; ++i) {
      sums.select(1, i).add_(bias.select(0, ids[static_cast<size_t>(i)]));
    }
  }
  return sums.to(x.scalar_type());
}

}  // namespace kvcache::model
