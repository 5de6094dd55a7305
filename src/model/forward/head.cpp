// src/model/forward/head.cpp - logits of a few tokens.
#include "src/model/forward/head.h"

#include <ATen/ops/empty.h>

#include <vector>

#include "src/model/forward/row_loops.h"

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
  rows = rows.to(x.scalar_type());
  Tensor out = at::empty({x.size(0), count}, x.options());
  with_row_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    std::vector<T> bias;
    if (bias_.defined()) {
      for (const int64_t id : ids) bias.push_back(data_of<T>(bias_)[id]);
    }
    row_loops<T>().multiply(
        data_of<T>(out), count, data_of<T>(x), x.size(0), data_of<T>(rows),
        bias.empty() ? nullptr : bias.data(), width, 0, count);
  });
  return out;
}

}  // namespace kvcache::model
