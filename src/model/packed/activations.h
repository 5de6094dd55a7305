// src/model/packed/activations.h - a product with tiles, on several threads.
#pragma once

#include <cstdint>

#include "src/model/packed/tile_table.h"

namespace kvcache::model {

// out[M, N] = x[M, inputs] W^T, dense, on at most at::get_num_threads()
// threads: outputs are shared out, so their number changes no bit. The
// quantised activations are kept per thread: a steady decode allocates nothing.
void multiply_tiles(const TileMatrix& w, const float* x, int64_t inputs,
                    int64_t rows, float* out);

}  // namespace kvcache::model
