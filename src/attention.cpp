// attention.cpp - attend(): checks the view, then runs the CPU kernels or, on
// other devices, ATen ops.

#include "kvcache/attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "attention_ops.h"
#include "kernels/attention_schedule.h"
#include "kv_format.h"
#include "storage.h"  // tensor_text

namespace kvcache {
namespace {

using kernels::AttentionCall;

void check_scales(const KvView& view) {
  for (const auto& [name, x] :
       {std::pair<const char*, const Tensor&>{"view.k_scale", view.k_scale},
        {"view.v_scale", view.v_scale}}) {
    TORCH_CHECK_VALUE(
        x.dim() == 4 && x.sizes().slice(0, 3) == view.k.sizes().slice(0, 3) &&
            x.size(3) == 1 && x.scalar_type() == at::kFloat && x.is_cpu(),
        "[attend] ", name, " must be [", view.k.size(0), ", ", view.k.size(1),
        ", ", view.k.size(2), ", 1] float32 on cpu but got ", tensor_text(x),
        ".");
  }
}

void check_tensors(const Tensor& q, const KvView& view) {
  TORCH_CHECK_VALUE(q.defined() && view.k.defined() && view.v.defined() &&
                        view.limits.defined(),
                    "[attend] q, view.k, view.v and view.limits must be "
                    "defined but got ",
                    tensor_text(q), ", ", tensor_text(view.k), ", ",
                    tensor_text(view.v), " and ", tensor_text(view.limits),
                    ".");
  const bool half = q.scalar_type() == at::kHalf && !q.is_cpu();
  TORCH_CHECK_TYPE(
      q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16 || half,
      "[attend] q must be ",
      q.is_cpu() ? "float32 or bfloat16" : "float32, bfloat16 or float16",
      " on ", q.device().type(), " but got ", dtype_text(q.scalar_type()),
      "; convert the model and its cache to one of them.");
  const bool int8 = view.format == KvFormat::kInt8;
  TORCH_CHECK_NOT_IMPLEMENTED(
      (view.format == KvFormat::kPlain || (int8 && q.is_cpu())) &&
          !view.blocks.defined() && view.k_scale.defined() == int8 &&
          view.v_scale.defined() == int8,
      "[attend] the view must be plain, or int8 with scales and on the CPU, "
      "but is quantised otherwise or paged; use a cache kind that stores K and "
      "V plainly.");
  TORCH_CHECK_VALUE(q.dim() == 4, "[attend] q must be [B, Hq, T, D] but got ",
                    tensor_text(q), ".");
  const at::ScalarType stored = int8 ? at::kChar : q.scalar_type();
  for (const auto& [name, x] :
       {std::pair<const char*, const Tensor&>{"view.k", view.k},
        {"view.v", view.v}}) {
    TORCH_CHECK_VALUE(x.dim() == 4 && x.size(0) == q.size(0) &&
                          x.size(3) == q.size(3) && x.scalar_type() == stored &&
                          x.device() == q.device(),
                      "[attend] ", name, " must be [", q.size(0), ", H, S, ",
                      q.size(3), "] ", dtype_text(stored), " on ", q.device(),
                      int8 ? "" : " like q", " but got ", tensor_text(x), ".");
  }
  TORCH_CHECK_VALUE(view.k.sizes() == view.v.sizes(),
                    "[attend] view.k and view.v must have one shape but got ",
                    view.k.sizes(), " and ", view.v.sizes(), ".");
  TORCH_CHECK_VALUE(
      view.k.size(1) > 0 && q.size(1) % view.k.size(1) == 0,
      "[attend] the query heads must be a multiple of the key/value heads but "
      "got ",
      q.size(1), " and ", view.k.size(1), ".");
  TORCH_CHECK_VALUE(q.size(3) > 0, "[attend] D must be positive but q is ",
                    tensor_text(q), ".");
  for (const auto& [name, x] : {std::pair<const char*, const Tensor&>{"q", q},
                                {"view.k", view.k},
                                {"view.v", view.v}}) {
    TORCH_CHECK_VALUE(x.stride(3) == 1 || x.size(3) == 1, "[attend] ", name,
                      " must have a dense last dimension but its strides are ",
                      x.strides(), "; call contiguous() first.");
  }
  if (int8) check_scales(view);
  const Tensor& limits = view.limits;
  TORCH_CHECK_VALUE(
      limits.dim() == 2 && limits.size(0) == q.size(0) &&
          limits.size(1) == q.size(2) && limits.scalar_type() == at::kLong &&
          limits.device() == q.device(),
      "[attend] view.limits must be [", q.size(0), ", ", q.size(2),
      "] int64 on ", q.device(), " but got ", tensor_text(limits), ".");
}

// Beyond, block numbers times their size would not be an int64.
constexpr int64_t kMostTokens = int64_t{1} << 62;

void check_sinks(const KvView& view) {
  TORCH_CHECK_VALUE(view.sinks >= 0 && view.sinks <= kernels::kKeyBlock,
                    "[attend] view.sinks must be within [0, ",
                    kernels::kKeyBlock, "] but got ", view.sinks, ".");
  TORCH_CHECK_VALUE(view.sinks == 0 || view.sliding > 0,
                    "[attend] view.sinks must be 0 without a sliding window "
                    "but got ",
                    view.sinks,
                    "; set view.sliding, or leave sinks out: without it every "
                    "key is seen anyway.");
}

// The numbers of the view against its cells.
void check_cells(const KvView& view) {
  const int64_t cells = view.k.size(2);
  TORCH_CHECK_VALUE(view.window >= 0 && view.window <= cells,
                    "[attend] view.window must be within [0, ", cells,
                    "], the cells of view.k, but got ", view.window, ".");
  TORCH_CHECK_VALUE(view.sliding >= 0,
                    "[attend] view.sliding must be 0 or more but got ",
                    view.sliding, ".");
  check_sinks(view);
  TORCH_CHECK_VALUE(view.ring >= 0 && view.ring <= cells,
                    "[attend] view.ring must be within [0, ", cells,
                    "], the cells of view.k, but got ", view.ring, ".");
  TORCH_CHECK_VALUE(view.ring == 0 || view.sinks + view.ring <= cells,
                    "[attend] view.k must have cells for view.sinks and "
                    "view.ring but got ",
                    cells, " for ", view.sinks, " and ", view.ring, ".");
}

// Every visible key must lie in a cell that exists.
void check_limits(const AttentionCall& call, const KvView& view) {
  const int64_t readable = view.window > 0 ? view.window : view.k.size(2);
  const int64_t most = view.ring > 0 ? view.ring : readable;
  const char* beside_sinks =
      view.ring > 0 && view.sinks > 0 ? " beside the sinks" : "";
  for (int64_t b = 0; b < call.rows; ++b) {
    for (int64_t t = 0; t < call.tokens; ++t) {
      const int64_t limit =
          call.limits[b * call.limits_row + t * call.limits_token];
      const int64_t seen =
          view.ring > 0 && view.sliding > 0
              ? std::min(std::max<int64_t>(limit, 0) - view.sinks, view.sliding)
              : limit;
      TORCH_CHECK_VALUE(limit >= 0 && limit <= kMostTokens && seen <= most,
                        "[attend] query ", t, " of row ", b,
                        " must see at most the ", most,
                        view.ring > 0 ? " keys of the ring" : " cells it may",
                        beside_sinks, " but its limit is ", limit, ".");
    }
  }
}

void set_scales(const KvView& view, AttentionCall& call) {
  const Tensor &k = view.k_scale, &v = view.v_scale;
  call.k_scale = k.const_data_ptr<float>();
  call.v_scale = v.const_data_ptr<float>();
  call.k_scale_row = k.stride(0), call.k_scale_head = k.stride(1);
  call.k_scale_cell = k.stride(2);
  call.v_scale_row = v.stride(0), call.v_scale_head = v.stride(1);
  call.v_scale_cell = v.stride(2);
  // Of in-place kinds the scale follows its codes.
  call.key_bytes = record_size(view.format, view.k.size(3));
}

// All but the output.
AttentionCall call_of(const Tensor& q, const KvView& view, double scale) {
  AttentionCall call;
  call.element = q.scalar_type() == at::kFloat ? kernels::Element::kFloat32
                                               : kernels::Element::kBFloat16;
  call.q = q.const_data_ptr();
  call.k = view.k.const_data_ptr();
  call.v = view.v.const_data_ptr();
  call.limits = view.limits.const_data_ptr<int64_t>();
  call.q_row = q.stride(0), call.q_head = q.stride(1);
  call.q_token = q.stride(2);
  call.k_row = view.k.stride(0), call.k_head = view.k.stride(1);
  call.k_cell = view.k.stride(2);
  call.v_row = view.v.stride(0), call.v_head = view.v.stride(1);
  call.v_cell = view.v.stride(2);
  call.limits_row = view.limits.stride(0);
  call.limits_token = view.limits.stride(1);
  call.rows = q.size(0), call.heads = view.k.size(1);
  call.group = q.size(1) / call.heads;
  call.tokens = q.size(2), call.head_dim = q.size(3);
  call.element_bytes = static_cast<int64_t>(view.k.element_size());
  call.key_bytes = call.element_bytes * call.head_dim;
  if (view.format == KvFormat::kInt8) set_scales(view, call);
  call.sliding = view.sliding, call.sinks = view.sinks;
  call.ring = view.ring;
  call.scale = static_cast<float>(scale * std::numbers::log2e);
  return call;
}

// Up to here the decode role shares out keys: with more queries the partial
// results would cost more than they spread.
constexpr int64_t kFewTokens = 32;

}  // namespace

Tensor attend(const Tensor& q, const KvView& view,
              const AttendOptions& options) {
  if (q.is_neg()) {  // kernels read memory, where the sign is not
    return attend(q.resolve_neg(), view, options);
  }
  check_tensors(q, view);
  check_cells(view);
  const int64_t B = q.size(0), Hq = q.size(1), T = q.size(2), D = q.size(3);
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  TORCH_CHECK_VALUE(std::isfinite(scale),
                    "[attend] scale must be finite but got ", scale, ".");
  if (!q.is_cpu()) {
    return attend_by_ops(
        q, view, options,
        varlen_serves(q, view) ? AttentionOps::kVarlen : AttentionOps::kMasked);
  }
  AttentionCall call = call_of(q, view, scale);
  check_limits(call, view);  // elsewhere they would have to be waited for
  Tensor out = at::empty({B, T, Hq, D}, q.options());
  call.out = out.mutable_data_ptr();
  const bool by_keys = options.role == Role::kDecode && T <= kFewTokens;
  kernels::run_attention(call, by_keys ? kernels::AttentionSplit::kKeys
                                       : kernels::AttentionSplit::kQueries);
  return out.transpose(1, 2);
}

}  // namespace kvcache
