// The default write: new tokens of each row into their cells.
#include <ATen/core/Tensor.h>

#include <cstring>

#include "cache_impl.h"
#include "kvcache/cache.h"

namespace kvcache {
namespace {

// Live tokens of one row into cells [start, start + count). CPU, dense D; a
// plain loop, since slicing 60 views a token costs more than the copy.
void write_row(const StepData& step, int64_t row, const Tensor& to,
               const Tensor& from) {
  const auto bytes = static_cast<int64_t>(to.element_size());
  const auto head_bytes = static_cast<size_t>(to.size(3) * bytes);
  const auto* source =
      static_cast<const char*>(from.data_ptr()) +
      (row * from.stride(0) + step.skip[row] * from.stride(2)) * bytes;
  auto* target = static_cast<char*>(to.data_ptr()) +
                 (row * to.stride(0) + step.start[row] * to.stride(2)) * bytes;
  for (int64_t t = 0; t < step.count[row]; ++t) {
    for (int64_t h = 0; h < to.size(1); ++h) {
      std::memcpy(target + (t * to.stride(2) + h * to.stride(1)) * bytes,
                  source + (t * from.stride(2) + h * from.stride(1)) * bytes,
                  head_bytes);
    }
  }
}

void write_one(const StepData& step, const Tensor& to, const Tensor& from) {
  if (to.device().is_cpu() && to.stride(3) == 1 && from.stride(3) == 1) {
    for (int64_t row = 0; row < step.rows; ++row) {
      write_row(step, row, to, from);
    }
    return;
  }
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

}  // namespace

void Cache::do_write(const StepData& step, const KvView& to, const Tensor& k,
                     const Tensor& v) {
  write_one(step, to.k, k);
  write_one(step, to.v, v);
}

}  // namespace kvcache
