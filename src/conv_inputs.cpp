#include "conv_inputs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>

#include "storage.h"

namespace kvcache {

Tensor extend_inputs(const StepData& step, const StateView& view,
                     const Tensor& x, const Tensor& skips) {
  at::NoGradGuard no_grad;
  const int64_t taps = view.conv.size(2);
  const Tensor out = new_zeros({step.rows, x.size(1), taps + step.tokens},
                               x.scalar_type(), x.device());
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t skip = skips.const_data_ptr<int64_t>()[row];
    const int64_t count = step.taken.const_data_ptr<int64_t>()[row];
    const Tensor row_out = out.select(0, row);
    row_out.narrow(1, skip, taps).copy_(view.conv.select(0, row));
    row_out.narrow(1, skip + taps, count)
        .copy_(x.select(0, row).narrow(1, skip, count));
    view.next_conv.select(0, row).copy_(row_out.narrow(1, skip + count, taps));
  }
  return out;
}

Tensor extend_inputs_by_ops(const StepData& step, const StateView& view,
                            const Tensor& x, const Tensor& skips) {
  at::NoGradGuard no_grad;
  const int64_t taps = view.conv.size(2);
  const int64_t columns = taps + step.tokens;
  const Tensor column =
      at::arange(columns, at::TensorOptions(at::kLong).device(x.device()));
  const Tensor after = column.unsqueeze(0).sub(skips.unsqueeze(1));
  const Tensor live = after.ge(0).logical_and(
      after.lt(step.taken.unsqueeze(1).add(taps)));  // [rows, columns]
  // Saved inputs move to the right by the padding, those of the step stay.
  const Tensor from =
      at::where(after.lt(taps), after, column.unsqueeze(0)).clamp_min(0);
  const auto over_channels = [&](const Tensor& index) {
    return index.unsqueeze(1).expand({step.rows, x.size(1), index.size(1)});
  };
  const Tensor out = at::cat({view.conv, x}, 2)
                         .gather(2, over_channels(from))
                         .masked_fill(live.logical_not().unsqueeze(1), 0);
  const Tensor tail =
      skips.add(step.taken).unsqueeze(1).add(column.narrow(0, 0, taps));
  view.next_conv.copy_(out.gather(2, over_channels(tail)));
  return out;
}

}  // namespace kvcache
