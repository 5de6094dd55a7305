// src/model/forward/packed_linear.cpp - packing, the product, and its probe.
#include "src/model/forward/packed_linear.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "src/model/forward/row_loops.h"

namespace kvcache::model {
namespace {

using Scalars = c10::List<std::optional<at::Scalar>>;
using ReorderWeight = Tensor(const Tensor&, std::optional<int64_t>);
using LinearPointwise = Tensor(const Tensor&, const Tensor&,
                               const std::optional<Tensor>&, std::string_view,
                               Scalars, std::optional<std::string_view>);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .template typed<Signature>();
}

Tensor reorder_weight(const Tensor& weight) {
  static const auto reorder =
      find_operator<ReorderWeight>("mkldnn::_reorder_linear_weight");
  return reorder.call(weight, std::nullopt);
}

Tensor linear_pointwise(const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
  static const auto linear =
      find_operator<LinearPointwise>("mkldnn::_linear_pointwise");
  static const Scalars no_scalars;
  return linear.call(x, weight, bias, "none", no_scalars, "");
}

// Whether the operators exist and take the dtype: tried, since what the CPU has
// and what oneDNN was told to use are separate switches.
bool try_packing(at::ScalarType dtype) {
  if (!at::hasMKLDNN() || !at::globalContext().userEnabledMkldnn())
    return false;
  try {
    const Tensor weight = at::zeros({16, 16}, at::TensorOptions(dtype));
    linear_pointwise(weight, reorder_weight(weight), std::nullopt);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Numbers in [-1, 1) that are the same on every run.
class Noise {
 public:
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(state_ >> 8) * 0x1p-23f - 1.0f;
  }

 private:
  uint32_t state_ = 1;
};

Tensor random_rows(int64_t rows, int64_t width, at::ScalarType dtype) {
  Tensor filled = at::empty({rows, width}, at::TensorOptions(at::kFloat));
  Noise noise;
  float* to = filled.mutable_data_ptr<float>();
  for (int64_t i = 0; i < rows * width; ++i) to[i] = noise.next();
  return filled.to(dtype);
}

bool same_bits(const Tensor& a, int64_t row_a, const Tensor& b, int64_t row_b,
               int64_t rows) {
  const size_t row_bytes = static_cast<size_t>(a.size(1)) * a.element_size();
  const auto* from = static_cast<const char*>(a.const_data_ptr());
  const auto* to = static_cast<const char*>(b.const_data_ptr());
  return std::memcmp(from + static_cast<size_t>(row_a) * row_bytes,
                     to + static_cast<size_t>(row_b) * row_bytes,
                     static_cast<size_t>(rows) * row_bytes) == 0;
}

// One thread for as long as the object lives.
class OneThread {
 public:
  OneThread() : threads_(at::get_num_threads()) {
    if (threads_ > 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (threads_ > 1) at::set_num_threads(threads_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_;
};

}  // namespace

bool PackedLinear::packs(at::ScalarType dtype) {
  static const bool packs_float = try_packing(at::kFloat);
  // On a matrix unit, its sums depend on how many rows there are.
  static const bool packs_bfloat16 =
      !DenseTiles::have_matrix_unit() && try_packing(at::kBFloat16);
  if (dtype == at::kFloat) return packs_float;
  return dtype == at::kBFloat16 && packs_bfloat16;
}

PackedLinear::PackedLinear(const Tensor& weight, const Tensor& bias,
                           TileArena& arena)
    : inputs_(weight.size(1)),
      outputs_(weight.size(0)),
      dtype_(weight.scalar_type()) {
  const c10::InferenceMode inference;
  if (packs(dtype_)) {
    weight_ = reorder_weight(weight);
    if (bias.defined()) bias_ = bias;
  } else {
    tiles_.emplace(weight, arena);
    if (bias.defined()) bias_ = bias.to(at::kFloat);
  }
}

PackedLinear::PackedLinear(const Tensor& weight, const Tensor& bias) {
  TileArena own;
  *this = PackedLinear(weight, bias, own);
}

int64_t PackedLinear::padded_rows(int64_t rows) {
  if (rows <= 2) return 2;
  const auto more = static_cast<uint64_t>(rows);
  if (rows <= 32) return static_cast<int64_t>(std::bit_ceil(more));
  const auto step =
      std::max<int64_t>(32, static_cast<int64_t>(std::bit_ceil(more)) / 8);
  return (rows + step - 1) / step * step;
}

Tensor PackedLinear::operator()(const Tensor& x) const {
  const int64_t rows = x.size(0), padded = padded_rows(rows);
  if (rows == padded || tiles_) return multiply(x);
  const Tensor all = at::zeros({padded, inputs_}, x.options());
  all.narrow(0, 0, rows).copy_(x);
  return multiply(all).narrow(0, 0, rows);
}

Tensor PackedLinear::multiply(const Tensor& x) const {
  if (!tiles_) return linear_pointwise(x, weight_, bias_);
  return tiles_->rounded(x, bias_.value_or(Tensor()));
}

bool PackedLinear::probe_row_exact() const {
  // The counts of a token and of a chunk of a long prompt. A head is not run
  // for so many rows.
  constexpr int64_t kLargeWeights = int64_t{1} << 23;
  const int64_t most = inputs_ * outputs_ < kLargeWeights ? 256 : 16;
  const c10::InferenceMode inference;
  Tensor x = random_rows(most, inputs_, dtype());
  const Tensor all = multiply(x);
  const auto agrees = [&](int64_t first, int64_t rows) {
    return same_bits((*this)(x.narrow(0, first, rows)), 0, all, first, rows);
  };
  for (const int64_t first : {int64_t{0}, int64_t{5}, most - 2}) {
    if (!agrees(first, 1) || !agrees(first, 2)) return false;
  }
  if (most > 16) {  // a large head is split over its outputs in any case
    const OneThread alone;
    if (!agrees(3, 2)) return false;
  }
  // One row of many among rows that are no numbers.
  const Tensor kept = x.narrow(0, 9, 1).clone();
  x.fill_(std::numeric_limits<double>::quiet_NaN());
  x.narrow(0, 9, 1).copy_(kept);
  return same_bits(multiply(x), 9, all, 9, 1);
}

}  // namespace kvcache::model
