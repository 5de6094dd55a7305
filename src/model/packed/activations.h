// src/model/packed/activations.h - a product with tiles, on several threads.
#pragma once

#include <cstdint>

#include "src/kernels/scratch_buffer.h"
#include "src/model/packed/tile_table.h"

namespace kvcache::model {

// Memory of quantised rows. Grows and never shrinks, up to what long prompts
// need.
class RowBuffer {
 public:
  // Good until the next call; does not allocate where an earlier one was as
  // large.
  TileRows rows(int64_t count, int64_t groups);

 private:
  kernels::ScratchBuffer memory_;
};

// out[M, N] = x[M, inputs] W^T, dense, on at most at::get_num_threads()
// threads: outputs are shared out, so their number changes no bit. The
// quantised activations are kept per thread: a steady decode allocates nothing.
void multiply_tiles(const TileMatrix& w, const float* x, int64_t inputs,
                    int64_t rows, float* out);

}  // namespace kvcache::model
