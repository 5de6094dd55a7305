// The inputs of a short convolution: saved ones, then those of a step.
#pragma once

#include "kvcache/detail/step_data.h"

namespace kvcache {

// `x` [rows, C, T] behind the inputs that `view` saved, as Step::extend_conv()
// says; writes the new saved ones. `skip` [rows] int64 as step.taken.
Tensor extend_inputs(const StepData& step, const StateView& view,
                     const Tensor& x, const Tensor& skip);
// The same by ATen ops, for any device.
Tensor extend_inputs_by_ops(const StepData& step, const StateView& view,
                            const Tensor& x, const Tensor& skip);

}  // namespace kvcache
