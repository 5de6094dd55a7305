// src/model/forward/gated_delta_avx2.cpp - the gated delta rule, compiled for
// avx2.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "src/model/forward/gated_delta_table.h"

namespace kvcache::model::avx2 {
namespace {
// clang-format off
#include "kernels/vec_avx2.inc"
#include "src/model/forward/gated_delta.inc"
// clang-format on
}  // namespace

const DeltaKernel<float>& float_delta() { return kDelta<float>; }
const DeltaKernel<Bf16>& bfloat16_delta() { return kDelta<Bf16>; }

}  // namespace kvcache::model::avx2
