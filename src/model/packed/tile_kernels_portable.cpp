// src/model/packed/tile_kernels_portable.cpp - the tile kernels, compiled for
// portable.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "src/model/packed/tile_table.h"

namespace kvcache::model::portable {
namespace {
// clang-format off
#include "src/model/packed/tile_vec_portable.inc"
#include "src/model/packed/tile_kernels.inc"
// clang-format on
}  // namespace

const TileKernels& tile_kernels() { return kTileKernels; }

}  // namespace kvcache::model::portable
