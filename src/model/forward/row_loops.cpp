// src/model/forward/row_loops.cpp - the row loops of the CPU's instruction set.
#include "src/model/forward/row_loops.h"

#include "src/kernels/cpu_level.h"

namespace kvcache::model {

using kernels::CpuLevel;

template <>
const RowLoops<float>& row_loops<float>() {
#ifdef KVCACHE_ROW_LOOPS_X86
  if (kernels::cpu_level() >= CpuLevel::kAvx512) return avx512::float_loops();
  if (kernels::cpu_level() >= CpuLevel::kAvx2) return avx2::float_loops();
#endif
  return portable::float_loops();
}

template <>
const RowLoops<Bf16>& row_loops<Bf16>() {
#ifdef KVCACHE_ROW_LOOPS_X86
  if (kernels::cpu_level() >= CpuLevel::kAvx512) {
    return avx512::bfloat16_loops();
  }
  if (kernels::cpu_level() >= CpuLevel::kAvx2) return avx2::bfloat16_loops();
#endif
  return portable::bfloat16_loops();
}

}  // namespace kvcache::model
