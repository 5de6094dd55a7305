// src/model/packed/tile_kernels_avx512.cpp - the tile kernels, compiled for
// avx512.
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/model/packed/tile_table.h"

namespace kvcache::model::avx512 {
namespace {
// clang-format off
#include "src/model/packed/tile_vec_avx512.inc"
#include "src/model/packed/tile_kernels.inc"
// clang-format on
}  // namespace

const TileKernels& tile_kernels() { return kTileKernels; }

}  // namespace kvcache::model::avx512
