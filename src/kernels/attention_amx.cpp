// kernels/attention_amx.cpp - attention with AVX-512 and its bfloat16
// conversions, and the matrix unit (AMX-BF16).
//
// Compiled with flags of its own. It includes no header with functions that
// other translation units have too: the linker would keep one copy for all, and
// that may be this one, on a CPU that cannot run it.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention_kernels.h"

namespace kvcache::kernels {
namespace amx {
namespace {
// Each builds on the ones before.
// clang-format off
#include "kernels/vec_avx512.inc"
#include "kernels/attention_math.inc"
#include "kernels/attention_tile.inc"
#include "kernels/matrix_unit.inc"
#include "kernels/attention_range.inc"
#include "kernels/attention_codes.inc"
#include "kernels/attention_matrix.inc"
#include "kernels/attention_fold.inc"
#include "kernels/attention_level.inc"
// clang-format on
}  // namespace
}  // namespace amx

const AttentionKernels& attention_amx() { return amx::kKernels; }

}  // namespace kvcache::kernels
