// The default write: new tokens of each row into their cells.
#include <ATen/core/Tensor.h>

#include <cstring>

#include "cache_impl.h"
#include "kernels/quantise.h"
#include "kvcache/cache.h"

namespace kvcache {
namespace {

// Live tokens of one row into their cells. CPU, dense D; a plain loop, since
// slicing 60 views a token costs more than the copy.
void write_row(const StepData& step, int64_t row, const Tensor& cells,
               const Tensor& to, const Tensor& from) {
  const auto bytes = static_cast<int64_t>(to.element_size());
  const auto head_bytes = static_cast<size_t>(to.size(3) * bytes);
  const int64_t taken = step.taken.const_data_ptr<int64_t>()[row];
  const int64_t* cell =
      cells.const_data_ptr<int64_t>() + row * step.tokens + step.skip[row];
  const auto* source =
      static_cast<const char*>(from.data_ptr()) +
      (row * from.stride(0) + step.skip[row] * from.stride(2)) * bytes;
  auto* target = static_cast<char*>(to.data_ptr()) + row * to.stride(0) * bytes;
  for (int64_t t = 0; t < taken; ++t) {
    for (int64_t h = 0; h < to.size(1); ++h) {
      std::memcpy(target + (cell[t] * to.stride(2) + h * to.stride(1)) * bytes,
                  source + (t * from.stride(2) + h * from.stride(1)) * bytes,
                  head_bytes);
    }
  }
}

// One row after the other; the host's numbers say where, so never recorded.
void write_slices(const StepData& step, const Tensor& to, const Tensor& from) {
  if (step.uniform) {  // one slice copy where rows align
    to.narrow(2, step.start[0], step.tokens).copy_(from);
    return;
  }
  // Slices only: an output of a recorded graph must not be select()ed.
  for (int64_t row = 0; row < step.rows; ++row) {
    if (step.count[row] > 0) {
      to.narrow(0, row, 1)
          .narrow(2, step.start[row], step.count[row])
          .copy_(from.narrow(0, row, 1).narrow(2, step.skip[row],
                                               step.count[row]));
    }
  }
}

void write_one(const StepData& step, const CellLayout& layout, bool by_ops,
               const Tensor& cells, const Tensor& to, const Tensor& from) {
  if (!by_ops && to.stride(3) == 1 && from.stride(3) == 1) {
    for (int64_t row = 0; row < step.rows; ++row) {
      write_row(step, row, cells, to, from);
    }
    return;
  }
  if (layout.dead < 0 && layout.ring == 0) {
    write_slices(step, to, from);
    return;
  }
  // Dead tokens go to the spare cell.
  const Tensor index =
      cells.view({step.rows, 1, step.tokens, 1}).expand(from.sizes());
  Tensor(to).scatter_(2, index, from);
}

// Live tokens of one row as codes and scales into their cells.
template <typename T>
void quantise_live(const StepData& step, int64_t row, const KvView& view,
                   const Tensor& codes, const Tensor& scales,
                   const Tensor& from) {
  const int64_t taken = step.taken.const_data_ptr<int64_t>()[row];
  const int64_t* cell =
      view.cells.const_data_ptr<int64_t>() + row * step.tokens + step.skip[row];
  const auto* source = static_cast<const T*>(from.const_data_ptr()) +
                       row * from.stride(0) + step.skip[row] * from.stride(2);
  auto* code = codes.mutable_data_ptr<int8_t>() + row * codes.stride(0);
  auto* scale = scales.mutable_data_ptr<float>() + row * scales.stride(0);
  for (int64_t t = 0; t < taken; ++t) {
    for (int64_t h = 0; h < codes.size(1); ++h) {
      kernels::quantise_row(
          source + t * from.stride(2) + h * from.stride(1), codes.size(3),
          code + cell[t] * codes.stride(2) + h * codes.stride(1),
          scale + cell[t] * scales.stride(2) + h * scales.stride(1));
    }
  }
}

void write_codes(const StepData& step, const KvView& view, const Tensor& codes,
                 const Tensor& scales, const Tensor& values) {
  const Tensor from = values.stride(3) == 1 ? values : values.contiguous();
  for (int64_t row = 0; row < step.rows; ++row) {
    if (from.scalar_type() == at::kFloat) {
      quantise_live<float>(step, row, view, codes, scales, from);
    } else {
      quantise_live<uint16_t>(step, row, view, codes, scales, from);
    }
  }
}

}  // namespace

void Cache::do_write(const StepData& step, int64_t index, const Tensor& k,
                     const Tensor& v) {
  const auto i = static_cast<size_t>(index);
  const KvView& to = step.views[i];
  if (to.format == KvFormat::kInt8) {
    write_codes(step, to, to.k, to.k_scale, k);
    write_codes(step, to, to.v, to.v_scale, v);
    return;
  }
  const CellLayout& layout = impl_->layouts[impl_->layout_of[i]];
  const bool by_ops = impl_->numbers.by_ops();
  write_one(step, layout, by_ops, to.cells, to.k, k);
  write_one(step, layout, by_ops, to.cells, to.v, v);
}

}  // namespace kvcache
