// src/model/forward/gated_delta_portable.cpp - the gated delta rule, compiled
// for any CPU.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "src/model/forward/gated_delta_table.h"

namespace kvcache::model::portable {
namespace {
// clang-format off
#include "kernels/vec_portable.inc"
#include "src/model/forward/gated_delta.inc"
// clang-format on
}  // namespace

const DeltaKernel<float>& float_delta() { return kDelta<float>; }
const DeltaKernel<Bf16>& bfloat16_delta() { return kDelta<Bf16>; }

}  // namespace kvcache::model::portable
