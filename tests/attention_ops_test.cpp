// attention_ops_test.cpp - attention by ATen ops against the CPU's kernels.

#include "src/attention_ops.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sub.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

// float32: the same sums in another order, of a few hundred terms of size 1.
// bfloat16: both round weights and results to 8 bits, of values up to about 4.
constexpr double kFloatTolerance = 5e-6;
constexpr double kBFloat16Tolerance = 2 * 2.0 / 256 * 4;
// float16: weights and results rounded to 11 bits.
constexpr double kHalfTolerance = 2 * 2.0 / 2048 * 4;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor masked(const AttentionCase& c, const AttendOptions& options = {}) {
  return attend_by_ops(c.q, c.view, options, AttentionOps::kMasked);
}

double distance(const Tensor& a, const Tensor& b) {
  return at::sub(a.to(at::kDouble), b.to(at::kDouble))
      .abs()
      .max()
      .item<double>();
}

void expect_kernels(const AttentionCase& c, const AttendOptions& options = {}) {
  const Tensor out = masked(c, options);
  ASSERT_EQ(out.sizes(), c.q.sizes());
  ASSERT_EQ(out.scalar_type(), c.q.scalar_type());
  ASSERT_TRUE(out.transpose(1, 2).is_contiguous());
  ASSERT_TRUE(at::isfinite(out).all().item<bool>());
  EXPECT_LE(
      distance(out, attend(c.q, c.view, options)),
      c.q.scalar_type() == at::kFloat ? kFloatTolerance : kBFloat16Tolerance);
}

// The case with `value` in each cell that no query of its row sees.
AttentionCase with_unseen(const AttentionCase& c, double value) {
  AttentionCase filled = c;
  filled.view.k = at::full_like(c.view.k, value);
  filled.view.v = at::full_like(c.view.v, value);
  for (int64_t b = 0; b < c.q.size(0); ++b) {
    for (int64_t t = 0; t < c.q.size(2); ++t) {
      const int64_t limit = c.view.limits[b][t].item<int64_t>();
      for (const int64_t p : positions_seen(c.view, limit)) {
        const int64_t cell = cell_of(p, c.view.sinks, c.view.ring);
        filled.view.k[b].select(1, cell).copy_(c.view.k[b].select(1, cell));
        filled.view.v[b].select(1, cell).copy_(c.view.v[b].select(1, cell));
      }
    }
  }
  return filled;
}

class MaskedAttention : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, MaskedAttention,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param));
                         });

TEST_P(MaskedAttention, GroupsTokensAndPrefixes) {
  for (const int64_t group : {1, 3, 4}) {
    for (const int64_t tokens : {1, 7}) {
      for (const int64_t prefix : {0, 5, 130, 300}) {
        SCOPED_TRACE(
            c10::str("group ", group, ", ", tokens, " after ", prefix));
        expect_kernels(make_case({.rows = 2,
                                  .heads = 2,
                                  .group = group,
                                  .head_dim = 20,
                                  .prefix = prefix,
                                  .tokens = tokens,
                                  .capacity = 310,
                                  .position_major = group == 3,
                                  .dtype = GetParam()}));
      }
    }
  }
}

TEST_P(MaskedAttention, SlidingRingAndSinks) {
  for (const int64_t sliding : {1, 5, 40}) {
    for (const int64_t ring : {0, 46, 50}) {
      for (const int64_t sinks : {0, 1, 4}) {
        for (const int64_t prefix : {0, 3, 43, 90}) {
          for (const int64_t tokens : {1, 7}) {
            SCOPED_TRACE(c10::str("sliding ", sliding, ", ring ", ring, ", ",
                                  sinks, " sinks, ", tokens, " after ",
                                  prefix));
            expect_kernels(make_case({.rows = 2,
                                      .heads = 2,
                                      .group = 3,
                                      .head_dim = 16,
                                      .prefix = prefix,
                                      .tokens = tokens,
                                      .sliding = sliding,
                                      .sinks = sinks,
                                      .ring = ring,
                                      .position_major = ring == 50,
                                      .dtype = GetParam()}));
          }
        }
      }
    }
  }
}

TEST_P(MaskedAttention, RingWithoutWindow) {
  for (const int64_t prefix : {0, 20, 60}) {
    expect_kernels(make_case({.rows = 2,
                              .heads = 2,
                              .prefix = prefix,
                              .tokens = 4,
                              .ring = 64,
                              .dtype = GetParam()}));
  }
}

// The same result from every window that holds what is seen; cells beyond it
// are not read.
TEST_P(MaskedAttention, WindowBuckets) {
  AttentionCase c = make_case({.rows = 2,
                               .heads = 2,
                               .group = 3,
                               .prefix = 60,
                               .capacity = 256,
                               .dtype = GetParam()});
  for (const int64_t window : {0, 61, 64, 128, 256}) {
    c.view.window = window;
    expect_kernels(c);
  }
}

// Rows of other lengths than their neighbours, padded on either side, and one
// that is all padding.
TEST_P(MaskedAttention, DeadQueriesAndRows) {
  for (const int64_t ring : {0, 30}) {
    AttentionCase c = make_case({.rows = 4,
                                 .heads = 2,
                                 .group = 3,
                                 .prefix = 20,
                                 .tokens = 7,
                                 .sliding = 9,
                                 .sinks = 2,
                                 .ring = ring,
                                 .dtype = GetParam()});
    for (int64_t t = 0; t < 7; ++t) {
      c.view.limits[1][t].fill_(t < 3 ? 0 : t - 2);
      c.view.limits[2][t].fill_(t < 5 ? 11 + t : 0);
      c.view.limits[3][t].fill_(0);
    }
    c.q[3].fill_(kNaN);
    c = with_unseen(c, kNaN);
    expect_kernels(c);
    const Tensor out = masked(c);
    EXPECT_EQ(out[3].abs().max().item<float>(), 0);
    EXPECT_EQ(out[1].narrow(1, 0, 3).abs().max().item<float>(), 0);
    EXPECT_EQ(out[2].narrow(1, 5, 2).abs().max().item<float>(), 0);
  }
}

TEST_P(MaskedAttention, WhatNobodySeesDoesNotChangeABit) {
  for (const int64_t tokens : {1, 7}) {
    for (const int64_t ring : {0, 12, 40}) {
      for (const int64_t sinks : {0, 3}) {
        const AttentionCase c = make_case({.rows = 2,
                                           .heads = 2,
                                           .group = 4,
                                           .head_dim = 16,
                                           .prefix = 30,
                                           .tokens = tokens,
                                           .capacity = 64,
                                           .sliding = 5,
                                           .sinks = sinks,
                                           .ring = ring,
                                           .dtype = GetParam()});
        const Tensor expected = masked(with_unseen(c, 0));
        for (const double value : {kNaN, kInfinity, -kInfinity}) {
          EXPECT_TRUE(at::equal(expected, masked(with_unseen(c, value))));
        }
      }
    }
  }
}

// K59: exactly the last three keys and two sinks, as a prefill and one by one.
TEST_P(MaskedAttention, WindowOfThreeSeesThreeKeysAndTwoSinks) {
  for (const int64_t ring : {0, 10}) {
    AttentionCase c = make_case({.head_dim = 9,
                                 .tokens = 9,
                                 .sliding = 3,
                                 .sinks = 2,
                                 .ring = ring,
                                 .dtype = GetParam()});
    c.q = at::zeros_like(c.q);
    c.view.v.zero_();
    for (int64_t p = 0; p < 9; ++p) c.view.v[0][0][p][p].fill_(1);
    const Tensor together = masked(c);
    for (int64_t t = 0; t < 9; ++t) {
      AttentionCase one = c;
      one.q = c.q.narrow(2, t, 1);
      one.view.limits = c.view.limits.narrow(1, t, 1);
      for (const Tensor& out : {together[0][0][t], masked(one)[0][0][0]}) {
        const std::vector<int64_t> seen = positions_seen(c.view, t + 1);
        for (int64_t p = 0; p < 9; ++p) {
          EXPECT_EQ(out[p].item<float>() > 0,
                    std::find(seen.begin(), seen.end(), p) != seen.end());
        }
      }
    }
  }
}

TEST_P(MaskedAttention, ScaleOfChoiceAndLargeScores) {
  AttentionCase c = make_case({.prefix = 40, .dtype = GetParam()});
  for (const double scale : {0.0, 0.5, -0.25}) {
    expect_kernels(c, {.scale = scale});
  }
  c.q = c.q.mul(1000);
  expect_kernels(c);
}

TEST_P(MaskedAttention, NothingToDoAndInferenceMode) {
  AttentionCase c = make_case({.heads = 2, .tokens = 3, .dtype = GetParam()});
  const Tensor plain = masked(c);
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(plain, masked(c)));
  }
  c.q.requires_grad_();
  EXPECT_FALSE(masked(c).requires_grad());
  c.q = c.q.narrow(2, 0, 0);
  c.view.limits = c.view.limits.narrow(1, 0, 0);
  EXPECT_EQ(masked(c).sizes(), c.q.sizes());
}

TEST(AttentionOps, Float16) {
  const AttentionCase c = make_case({.rows = 2,
                                     .heads = 2,
                                     .group = 3,
                                     .prefix = 50,
                                     .tokens = 7,
                                     .sliding = 20,
                                     .sinks = 3,
                                     .dtype = at::kHalf});
  EXPECT_LE(distance(masked(c), reference_attend(c.q, c.view, 0.125)),
            kHalfTolerance);
}

// Meta tensors have no values: whoever reads one throws. So attend() waits for
// no device, and its shapes follow from shapes.
TEST(AttentionOps, OtherDevicesAreReadByShapeOnly) {
  for (const int64_t ring : {0, 40}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      AttentionCase c = make_case({.rows = 2,
                                   .heads = 2,
                                   .group = 3,
                                   .prefix = 30,
                                   .tokens = 7,
                                   .sliding = 9,
                                   .sinks = 3,
                                   .ring = ring,
                                   .dtype = dtype});
      for (Tensor* x : {&c.q, &c.view.k, &c.view.v, &c.view.limits}) {
        *x = x->to(at::kMeta);
      }
      const Tensor out = attend(c.q, c.view);
      EXPECT_EQ(out.sizes(), c.q.sizes());
      EXPECT_EQ(out.scalar_type(), dtype);
      EXPECT_TRUE(out.is_meta());
    }
  }
}

// --- varlen ----------------------------------------------------------------

// One query a row, as window and slot caches store it: position by position,
// with a spare cell behind each row that the view leaves out.
AttentionCase decode_case(int64_t sliding = 0) {
  AttentionCase c = make_case({.rows = 3,
                               .heads = 2,
                               .group = 3,
                               .prefix = 40,
                               .capacity = 49,
                               .sliding = sliding,
                               .position_major = true,
                               .dtype = at::kBFloat16});
  c.view.k = c.view.k.narrow(2, 0, 48);
  c.view.v = c.view.v.narrow(2, 0, 48);
  c.view.window = 48;
  c.view.limits[1][0].fill_(0);
  c.view.limits[2][0].fill_(17);
  return c;
}

TEST(AttentionOps, VarlenSaysWhyItDoesNotServe) {
  const auto reason = [](const AttentionCase& c) {
    EXPECT_FALSE(varlen_serves(c.q, c.view));
    return varlen_refusal(c.q, c.view);
  };
  AttentionCase c = decode_case();
  EXPECT_EQ(reason(c), "it needs a CUDA device");
  c.q = at::zeros({3, 6, 2, 64}, c.q.options());
  EXPECT_EQ(reason(c), "it takes one query a row");
  c = decode_case();
  c.view.ring = 8;
  EXPECT_EQ(reason(c), "it reads no ring");
  c = decode_case(5);
  EXPECT_EQ(reason(c), "it needs a CUDA device");
  c.view.sinks = 2;
  EXPECT_EQ(reason(c), "it knows no sinks");
  c = decode_case();
  c.view.window = 0;
  EXPECT_EQ(reason(c), "it needs a CUDA device");
  c.view.window = 47;
  EXPECT_EQ(reason(c), "the window is smaller than the cells");
  EXPECT_EQ(reason(make_case({.prefix = 4})), "it takes bfloat16 and float16");
  for (const int64_t D : {20, 264}) {
    EXPECT_EQ(reason(make_case({.head_dim = D, .dtype = at::kHalf})),
              "the head size must be a multiple of 8 and at most 256");
  }
  c = decode_case();
  c.view.v = c.view.v.contiguous().narrow(2, 0, 48);  // [B, H, S, D]
  EXPECT_EQ(reason(c),
            "rows of K and V must be the same whole number of cells apart");
  c = decode_case();
  c.view.k =
      c.view.k.expand({3, 2, 48, 64}).narrow(0, 0, 1).expand_as(c.view.v);
  EXPECT_EQ(reason(c),
            "rows of K and V must be the same whole number of cells apart");
  c = decode_case();
  const Tensor wide = at::zeros({3, 48, 2, 68}, c.q.options());
  c.view.k = c.view.v = wide.narrow(3, 0, 64).transpose(1, 2);
  EXPECT_EQ(reason(c), "K and V must be aligned to 16 bytes");
  c.view.k = c.view.v = at::empty({3, 2, 0, 64}, c.q.options());
  c.view.window = 0;
  EXPECT_FALSE(varlen_serves(c.q, c.view));
}

TEST(AttentionOps, PackedCellsAreTheSameMemory) {
  const AttentionCase c = decode_case();
  EXPECT_EQ(cells_between_rows(c.view.k), 49);
  const Tensor packed = packed_cells(c.view.k);
  EXPECT_EQ(packed.sizes(), (std::vector<int64_t>{2 * 49 + 48, 2, 64}));
  EXPECT_EQ(packed.data_ptr(), c.view.k.data_ptr());
  for (int64_t b = 0; b < 3; ++b) {
    EXPECT_TRUE(at::equal(packed.narrow(0, b * 49, 48).nan_to_num(),
                          c.view.k[b].transpose(0, 1).nan_to_num()));
  }
  // One row may lie anyhow, head by head as well.
  const Tensor row = make_case({.heads = 2, .prefix = 9}).view.k;
  EXPECT_TRUE(at::equal(packed_cells(row), row[0].transpose(0, 1)));
}

// What the op does on CUDA, for this file on the CPU, by its own words: of the
// packed keys, those of row b start at cum_seq_k[b] and seqused_k[b] are live.
// A row without keys is NaN here: nothing is promised of it.
void stand_in(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const std::vector<c10::IValue> a(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  const Tensor q = a[0].toTensor(), k = a[1].toTensor(), v = a[2].toTensor();
  const Tensor rows = a[3].toTensor(), first = a[4].toTensor();
  const Tensor live = a[13].toTensor();
  const int64_t B = q.size(0), group = q.size(1) / k.size(1);
  EXPECT_EQ(rows.scalar_type(), at::kInt);
  EXPECT_EQ(first.scalar_type(), at::kInt);
  EXPECT_EQ(live.scalar_type(), at::kInt);
  EXPECT_TRUE(live.is_contiguous() && q.is_contiguous());
  EXPECT_EQ(rows.numel(), B + 1);
  EXPECT_EQ(first.numel(), B + 1);
  EXPECT_EQ(rows[B].item<int>(), B);
  EXPECT_EQ(a[5].toInt(), 1);
  EXPECT_EQ(a[7].toDouble(), 0);
  EXPECT_FALSE(a[8].toBool());
  Tensor out = at::full_like(q, kNaN);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t end = live[b].item<int>();
    EXPECT_LE(end, a[6].toInt());
    int64_t begin = 0;
    EXPECT_EQ(a[12].toInt(), a[11].toInt() < 0 ? -1 : 0);
    if (a[11].toInt() >= 0) {  // keys left of the query, which is the last one
      begin = std::max<int64_t>(0, end - 1 - a[11].toInt());
    }
    const int64_t at = first[b].item<int>() + begin;
    for (int64_t h = 0; h < q.size(1) && end > 0; ++h) {
      const Tensor keys = k.narrow(0, at, end - begin).select(1, h / group);
      const Tensor values = v.narrow(0, at, end - begin).select(1, h / group);
      const Tensor scores =
          at::matmul(keys.to(at::kFloat), q[b][h].to(at::kFloat))
              .mul(a[10].toDouble());
      out[b][h].copy_(
          at::matmul(at::softmax(scores, 0), values.to(at::kFloat)));
    }
  }
  torch::jit::push(*stack, out);
  for (int i = 0; i < 4; ++i) torch::jit::push(*stack, at::zeros({1}));
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_flash_attention_forward",
               torch::CppFunction::makeFromBoxedFunction<&stand_in>());
}

TEST(AttentionOps, VarlenCallsTheOpWithLiveLengths) {
  for (const int64_t sliding : {0, 1, 5, 48, 100}) {
    SCOPED_TRACE(sliding);
    const AttentionCase c = decode_case(sliding);
    for (const auto& scale : {std::optional<double>(), {0.5}}) {
      const AttendOptions options = {.scale = scale};
      const Tensor out =
          attend_by_ops(c.q, c.view, options, AttentionOps::kVarlen);
      EXPECT_EQ(out.sizes(), c.q.sizes());
      EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
      EXPECT_EQ(out[1].abs().max().item<float>(), 0);
      EXPECT_LE(distance(out, attend(c.q, c.view, options)),
                kBFloat16Tolerance);
    }
  }
}

}  // namespace
}  // namespace kvcache::testing
