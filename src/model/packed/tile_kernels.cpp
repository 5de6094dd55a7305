// src/model/packed/tile_kernels.cpp - the tile kernels of the CPU's instruction
// set.
#include "src/model/packed/tile_kernels.h"

#ifdef KVCACHE_TILE_KERNELS_X86
#include <cpuid.h>
#endif

#include "src/kernels/cpu_level.h"

namespace kvcache::model {
#ifdef KVCACHE_TILE_KERNELS_X86
namespace {

// F16C; clang 14's builtin does not know it. Its registers are AVX's, which
// cpu_level() has asked the system about.
bool converts_halves() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

const TileKernels& tile_kernels() {
#ifdef KVCACHE_TILE_KERNELS_X86
  using kernels::CpuLevel;
  static const bool halves = converts_halves();
  const CpuLevel level = kernels::cpu_level();
  static const bool vnni = __builtin_cpu_supports("avx512vnni");
  if (level >= CpuLevel::kAmx) return amx::tile_kernels();
  if (level >= CpuLevel::kAvx512Bf16 && vnni) {
    return avx512_vnni::tile_kernels();
  }
  if (level >= CpuLevel::kAvx512) return avx512::tile_kernels();
  if (level >= CpuLevel::kAvxVnni && halves) return avx_vnni::tile_kernels();
  if (level >= CpuLevel::kAvx2 && halves) return avx2::tile_kernels();
#endif
  return portable::tile_kernels();
}

}  // namespace kvcache::model
