// src/model/packed/tile_kernels.cpp - the tile kernels of the CPU's instruction
// set.
#include "src/model/packed/tile_kernels.h"

#include "src/kernels/cpu_level.h"

namespace kvcache::model {

const TileKernels& tile_kernels() {
#ifdef KVCACHE_TILE_KERNELS_X86
  using kernels::CpuLevel;
  static const bool halves = __builtin_cpu_supports("f16c");
  const CpuLevel level = kernels::cpu_level();
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  if (level >= CpuLevel::kAvx512Bf16 && vnni) {
    return avx512_vnni::tile_kernels();
  }
  if (level >= CpuLevel::kAvx512) return avx512::tile_kernels();
  if (level >= CpuLevel::kAvx2 && halves) return avx2::tile_kernels();
#endif
  return portable::tile_kernels();
}

}  // namespace kvcache::model
