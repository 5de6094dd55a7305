// attention.cpp - attend(): checks the view, then runs the CPU kernels.

#include "kvcache/attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_kernels.h"

namespace kvcache {
namespace {

using kernels::AttentionCall;

// A tensor in the words of an error message: [2, 3, 1, 64] bfloat16 on cpu.
std::string describe(const Tensor& x) {
  if (!x.defined()) return "an undefined tensor";
  return c10::str(x.sizes(), " ", x.scalar_type(), " on ", x.device());
}

void check_tensors(const Tensor& q, const KvView& view) {
  TORCH_CHECK_VALUE(q.defined() && view.k.defined() && view.v.defined() &&
                        view.limits.defined(),
                    "[attend] q, view.k, view.v and view.limits must be "
                    "defined but got ",
                    describe(q), ", ", describe(view.k), ", ", describe(view.v),
                    " and ", describe(view.limits), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(q.device().is_cpu(), "[attend] q is on ",
                              q.device(), ", but attend on ", q.device().type(),
                              " needs the ", q.device().type(),
                              " target, which this build has not; move q and "
                              "the cache to cpu.");
  TORCH_CHECK_TYPE(
      q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16,
      "[attend] q must be float32 or bfloat16 but got ", q.scalar_type(),
      "; convert the model and its cache to one of them.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      view.format == KvFormat::kPlain && !view.blocks.defined() &&
          !view.k_scale.defined() && !view.v_scale.defined(),
      "[attend] the view must be plain but is quantised or paged; use a cache "
      "kind that stores K and V plainly.");
  TORCH_CHECK_VALUE(q.dim() == 4, "[attend] q must be [B, Hq, T, D] but got ",
                    describe(q), ".");
  for (const auto& [name, x] :
       {std::pair<const char*, const Tensor&>{"view.k", view.k},
        {"view.v", view.v}}) {
    TORCH_CHECK_VALUE(
        x.dim() == 4 && x.size(0) == q.size(0) && x.size(3) == q.size(3) &&
            x.scalar_type() == q.scalar_type() && x.device() == q.device(),
        "[attend] ", name, " must be [", q.size(0), ", H, S, ", q.size(3), "] ",
        q.scalar_type(), " on ", q.device(), " like q but got ", describe(x),
        ".");
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
                    describe(q), ".");
  for (const auto& [name, x] : {std::pair<const char*, const Tensor&>{"q", q},
                                {"view.k", view.k},
                                {"view.v", view.v}}) {
    TORCH_CHECK_VALUE(x.stride(3) == 1 || x.size(3) == 1, "[attend] ", name,
                      " must have a dense last dimension but its strides are ",
                      x.strides(), "; call contiguous() first.");
  }
  const Tensor& limits = view.limits;
  TORCH_CHECK_VALUE(
      limits.dim() == 2 && limits.size(0) == q.size(0) &&
          limits.size(1) == q.size(2) && limits.scalar_type() == at::kLong &&
          limits.device() == q.device(),
      "[attend] view.limits must be [", q.size(0), ", ", q.size(2),
      "] Long on ", q.device(), " but got ", describe(limits), ".");
}

// Every visible key must lie in a cell that exists.
void check_ranges(const AttentionCall& call, const KvView& view) {
  const int64_t cells = view.k.size(2);
  TORCH_CHECK_VALUE(view.window >= 0 && view.window <= cells,
                    "[attend] view.window must be within [0, ", cells,
                    "], the cells of view.k, but got ", view.window, ".");
  TORCH_CHECK_VALUE(view.sliding >= 0,
                    "[attend] view.sliding must be 0 or more but got ",
                    view.sliding, ".");
  TORCH_CHECK_VALUE(view.ring >= 0 && view.ring <= cells,
                    "[attend] view.ring must be within [0, ", cells,
                    "], the cells of view.k, but got ", view.ring, ".");
  const int64_t readable = view.window > 0 ? view.window : cells;
  const int64_t most = view.ring > 0 ? view.ring : readable;
  for (int64_t b = 0; b < call.rows; ++b) {
    for (int64_t t = 0; t < call.tokens; ++t) {
      const int64_t limit =
          call.limits[b * call.limits_row + t * call.limits_token];
      const int64_t seen = view.ring > 0 && view.sliding > 0
                               ? std::min(limit, view.sliding)
                               : limit;
      TORCH_CHECK_VALUE(limit >= 0 && seen <= most, "[attend] query ", t,
                        " of row ", b, " must see at most the ", most,
                        view.ring > 0 ? " keys of the ring" : " cells it may",
                        " but its limit is ", limit, ".");
    }
  }
}

template <typename T>
void attend_query(const AttentionCall& call, int64_t b, int64_t hq, int64_t t) {
  using kernels::kKeyBlock;
  const int64_t D = call.head_dim;
  const int64_t heads = call.heads * call.group;
  const T* q = static_cast<const T*>(call.q) + b * call.q_row +
               hq * call.q_head + t * call.q_token;
  const T* k = static_cast<const T*>(call.k) + b * call.k_row +
               hq / call.group * call.k_head;
  const T* v = static_cast<const T*>(call.v) + b * call.v_row +
               hq / call.group * call.v_head;
  T* out = static_cast<T*>(call.out) + ((b * call.tokens + t) * heads + hq) * D;
  const int64_t end = call.limits[b * call.limits_row + t * call.limits_token];
  const int64_t begin =
      call.sliding > 0 ? std::max<int64_t>(0, end - call.sliding) : 0;
  std::vector<float> total(D), part(D);
  float top = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t block = begin / kKeyBlock * kKeyBlock; block < end;
       block += kKeyBlock) {
    const int64_t first = std::max(begin, block);
    const int64_t last = std::min(end, block + kKeyBlock);
    float scores[kKeyBlock];
    float block_top = -std::numeric_limits<float>::infinity();
    for (int64_t p = first; p < last; ++p) {
      const T* key = k + (call.ring > 0 ? p % call.ring : p) * call.k_cell;
      float dot = 0;
      for (int64_t d = 0; d < D; ++d) {
        dot += static_cast<float>(q[d]) * static_cast<float>(key[d]);
      }
      scores[p - first] = dot * call.scale;
      block_top = std::max(block_top, scores[p - first]);
    }
    std::fill(part.begin(), part.end(), 0.0F);
    float block_sum = 0;
    for (int64_t p = first; p < last; ++p) {
      const T* value = v + (call.ring > 0 ? p % call.ring : p) * call.v_cell;
      const float weight = std::exp2(scores[p - first] - block_top);
      block_sum += weight;
      for (int64_t d = 0; d < D; ++d) {
        part[d] += weight * static_cast<float>(value[d]);
      }
    }
    const float new_top = std::max(top, block_top);
    const float keep = std::exp2(top - new_top);
    const float add = std::exp2(block_top - new_top);
    for (int64_t d = 0; d < D; ++d) total[d] = total[d] * keep + part[d] * add;
    sum = sum * keep + block_sum * add;
    top = new_top;
  }
  for (int64_t d = 0; d < D; ++d) {
    out[d] = static_cast<T>(end == 0 ? 0.0F : total[d] / sum);
  }
}

template <typename T>
void attend_all(const AttentionCall& call) {
  for (int64_t b = 0; b < call.rows; ++b) {
    for (int64_t t = 0; t < call.tokens; ++t) {
      for (int64_t hq = 0; hq < call.heads * call.group; ++hq) {
        attend_query<T>(call, b, hq, t);
      }
    }
  }
}

}  // namespace

Tensor attend(const Tensor& q, const KvView& view,
              const AttendOptions& options) {
  check_tensors(q, view);
  const int64_t B = q.size(0), Hq = q.size(1), T = q.size(2), D = q.size(3);
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  TORCH_CHECK_VALUE(std::isfinite(scale),
                    "[attend] scale must be finite but got ", scale, ".");
  AttentionCall call;
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
  call.rows = B, call.heads = view.k.size(1), call.group = Hq / call.heads;
  call.tokens = T, call.head_dim = D;
  call.sliding = view.sliding, call.ring = view.ring;
  call.scale = static_cast<float>(scale * std::numbers::log2e);
  check_ranges(call, view);

  Tensor out = at::empty({B, T, Hq, D}, q.options());
  call.out = out.mutable_data_ptr();
  if (q.scalar_type() == at::kFloat) {
    attend_all<float>(call);
  } else {
    attend_all<at::BFloat16>(call);
  }
  return out.transpose(1, 2);
}

}  // namespace kvcache
