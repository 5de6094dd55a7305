// src/model/packed/tile_kernels.h - the tile kernels that run here.
#pragma once

#include "src/model/packed/tile_table.h"

namespace kvcache::model {

// Those of kernels::cpu_level().
const TileKernels& tile_kernels();

}  // namespace kvcache::model
