// src/model/forward/head.h - the head of the packed decoder: logits of the
// whole vocabulary, or of a few of its tokens.
// M rows, K hidden_size, V vocabulary.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "kvcache/model/weights.h"
#include "src/model/forward/linear.h"

namespace kvcache::model {

class Head {
 public:
  Head() = default;
  // `all` holds the rows `name` of `source`, `bias` [V] in the dtype that they
  // run in or undefined.
  Head(Linear all, std::string name, Tensor bias,
       std::shared_ptr<const WeightSource> source)
      : all_(std::move(all)),
        name_(std::move(name)),
        bias_(std::move(bias)),
        source_(std::move(source)) {}

  // `x` [M, K], contiguous. Returns a new [M, V].
  Tensor operator()(const Tensor& x) const { return all_(x); }

  // Of the tokens `ids` alone, [M, ids.size()], as many rows of weights read.
  // Quantised weights give the bits of the whole product. Dense ones are read
  // from the file and added up in the order of DenseTiles, which is not that of
  // oneDNN: row-exact too.
  Tensor operator()(const Tensor& x, std::span<const int64_t> ids) const;

 private:
  Tensor dense(const Tensor& x, std::span<const int64_t> ids) const;

  Linear all_;
  std::string name_;
  Tensor bias_;
  std::shared_ptr<const WeightSource> source_;
};

}  // namespace kvcache::model
