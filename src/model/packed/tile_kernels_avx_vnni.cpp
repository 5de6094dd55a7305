// src/model/packed/tile_kernels_avx_vnni.cpp - the tile kernels, compiled for
// avx2 with its integer dot products.
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/model/packed/tile_table.h"

namespace kvcache::model::avx_vnni {
namespace {
// clang-format off
#include "src/model/packed/tile_vec_avx2.inc"
#include "src/model/packed/tile_kernels.inc"
// clang-format on
}  // namespace

const TileKernels& tile_kernels() { return kTileKernels; }

}  // namespace kvcache::model::avx_vnni
