// attention_test.cpp - attend() against the definition in float64.

#include "kvcache/attention.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sub.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/kernels/cpu_level.h"
#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

using ::testing::HasSubstr;

// float32: sums of a few hundred terms of size 1. bfloat16: the result is
// rounded to 8 bits and the weights may be too: of values up to about 4, two
// units of 2^-8.
constexpr double kFloatTolerance = 2e-6;
constexpr double kBFloat16Tolerance = 2.0 / 256 * 4;

// Both roles, at every level that this machine runs.
void expect_reference(const AttentionCase& c, AttendOptions options = {}) {
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(c.q.size(3))));
  const Tensor expected = reference_attend(c.q, c.view, scale);
  // The rounding of a score grows with its size.
  const double size =
      std::abs(scale) * std::sqrt(static_cast<double>(c.q.size(3)));
  const double tolerance =
      std::max(1.0, size) *
      (c.q.scalar_type() == at::kFloat ? kFloatTolerance : kBFloat16Tolerance);
  for (const kernels::CpuLevel level : kernels::kCpuLevels) {
    if (!kernels::cpu_supports(level)) continue;
    const kernels::ForcedCpuLevel forced(level);
    for (const Role role : {Role::kPrefill, Role::kDecode}) {
      options.role = role;
      const Tensor out = attend(c.q, c.view, options);
      ASSERT_EQ(out.sizes(), c.q.sizes());
      ASSERT_EQ(out.scalar_type(), c.q.scalar_type());
      ASSERT_TRUE(out.transpose(1, 2).is_contiguous());
      ASSERT_TRUE(at::isfinite(out).all().item<bool>()) << name(level);
      const Tensor error = at::sub(out.to(at::kDouble), expected).abs();
      EXPECT_LE(error.max().item<double>(), tolerance)
          << name(level) << " " << c10::toString(c.q.scalar_type());
    }
  }
}

class Attend : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Attend,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param));
                         });

TEST_P(Attend, HeadsAndHeadSizes) {
  for (const int64_t D : {8, 16, 20, 64, 80, 128}) {
    for (const auto& [heads, group] :
         {std::pair<int64_t, int64_t>{3, 1}, {3, 3}, {2, 4}, {1, 7}, {1, 8}}) {
      SCOPED_TRACE(c10::str("D ", D, ", ", heads, " heads, group ", group));
      expect_reference(make_case({.rows = 2,
                                  .heads = heads,
                                  .group = group,
                                  .head_dim = D,
                                  .prefix = 127,
                                  .tokens = 3,
                                  .capacity = 140,
                                  .dtype = GetParam()}));
    }
  }
}

TEST_P(Attend, TokensOverPrefixes) {
  for (const int64_t prefix : {0, 1, 15, 16, 63, 127, 128, 129, 255, 600}) {
    for (const int64_t tokens : {1, 2, 5, 33, 70}) {
      SCOPED_TRACE(c10::str(tokens, " tokens after ", prefix));
      expect_reference(make_case({.heads = 1,
                                  .group = 3,
                                  .head_dim = 32,
                                  .prefix = prefix,
                                  .tokens = tokens,
                                  .dtype = GetParam()}));
    }
  }
}

TEST_P(Attend, SlidingWindowInFullAndRingStorage) {
  for (const int64_t sliding : {1, 5, 128, 130}) {
    for (const int64_t ring : {0, 150, 200}) {
      for (const bool position_major : {false, true}) {
        SCOPED_TRACE(c10::str("sliding ", sliding, ", ring ", ring));
        expect_reference(make_case({.rows = 2,
                                    .heads = 2,
                                    .group = 2,
                                    .head_dim = 16,
                                    .prefix = 300,
                                    .tokens = 12,
                                    .sliding = sliding,
                                    .ring = ring,
                                    .position_major = position_major,
                                    .dtype = GetParam()}));
      }
    }
  }
}

// Limits below, at and beyond the sinks; windows that do and do not touch them.
TEST_P(Attend, SinksInFullAndRingStorage) {
  for (const int64_t sinks : {1, 4, 127, 128}) {
    for (const int64_t sliding : {1, 5, 130}) {
      for (const int64_t ring : {0, 145, 200}) {
        for (const int64_t prefix : {0, 1, 126, 300}) {
          SCOPED_TRACE(c10::str(sinks, " sinks, sliding ", sliding, ", ring ",
                                ring, ", prefix ", prefix));
          expect_reference(make_case({.rows = 2,
                                      .heads = 2,
                                      .group = 2,
                                      .head_dim = 16,
                                      .prefix = prefix,
                                      .tokens = 12,
                                      .sliding = sliding,
                                      .sinks = sinks,
                                      .ring = ring,
                                      .position_major = ring == 200,
                                      .dtype = GetParam()}));
        }
      }
    }
  }
}

// A ring that has not wrapped, and one that all keys of a row just fill.
TEST_P(Attend, RingWithoutWindow) {
  expect_reference(make_case({.heads = 2,
                              .prefix = 60,
                              .tokens = 4,
                              .ring = 64,
                              .dtype = GetParam()}));
}

TEST_P(Attend, ScaleOfChoice) {
  const AttentionCase c = make_case({.prefix = 40, .dtype = GetParam()});
  for (const double scale : {0.0, 0.5, -0.25}) {
    expect_reference(c, {.scale = scale});
  }
}

TEST_P(Attend, LargeScoresDoNotOverflow) {
  AttentionCase c = make_case({.prefix = 200, .dtype = GetParam()});
  c.q = c.q.mul(1000);
  expect_reference(c);
}

TEST_P(Attend, OneVisibleKeyGivesItsValue) {
  const AttentionCase c =
      make_case({.heads = 2, .group = 3, .dtype = GetParam()});
  const Tensor expected = reference_attend(c.q, c.view, 0.125);
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const Tensor out = attend(c.q, c.view, {.role = role});
    EXPECT_LE(at::sub(out.to(at::kDouble), expected).abs().max().item<double>(),
              1e-6);
  }
}

// Which keys a query read, by values that are one-hot in the position and
// queries that like all keys equally.
std::vector<int64_t> keys_read(const Tensor& weights) {
  std::vector<int64_t> keys;
  for (int64_t p = 0; p < weights.numel(); ++p) {
    if (weights[p].item<float>() > 0) keys.push_back(p);
  }
  return keys;
}

AttentionCase one_hot(AttentionShape s) {
  s.head_dim = s.prefix + s.tokens;
  AttentionCase c = make_case(s);
  c.q = at::zeros_like(c.q);
  c.view.k.zero_();
  c.view.v.zero_();
  for (int64_t p = 0; p < s.head_dim; ++p) {
    const int64_t cell = cell_of(p, s.sinks, s.ring);
    c.view.v[0][0][cell].zero_();  // a ring keeps the newest
    c.view.v[0][0][cell][p].fill_(1);
  }
  return c;
}

// K59: a window of w sees w keys, itself among them, in every role.
// huggingface/transformers#39408
TEST_P(Attend, WindowOfThreeSeesThreeKeys) {
  const AttentionCase c =
      one_hot({.tokens = 9, .sliding = 3, .dtype = GetParam()});
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const Tensor out = attend(c.q, c.view, {.role = role});
    EXPECT_EQ(keys_read(out[0][0][0]), (std::vector<int64_t>{0}));
    EXPECT_EQ(keys_read(out[0][0][1]), (std::vector<int64_t>{0, 1}));
    for (int64_t t = 2; t < 9; ++t) {
      EXPECT_EQ(keys_read(out[0][0][t]),
                (std::vector<int64_t>{t - 2, t - 1, t}));
    }
  }
}

// K59 with sinks, in a prefill and one by one; the window grows out of them. In
// a ring of its size only the newest query sees all of its window.
TEST_P(Attend, WindowOfThreeSeesThreeKeysAndTwoSinks) {
  const std::vector<std::vector<int64_t>> expected = {{0},
                                                      {0, 1},
                                                      {0, 1, 2},
                                                      {0, 1, 2, 3},
                                                      {0, 1, 2, 3, 4},
                                                      {0, 1, 3, 4, 5},
                                                      {0, 1, 4, 5, 6},
                                                      {0, 1, 5, 6, 7}};
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const AttentionCase all =
        one_hot({.tokens = 8, .sliding = 3, .sinks = 2, .dtype = GetParam()});
    const Tensor out = attend(all.q, all.view, {.role = role});
    for (int64_t t = 0; t < 8; ++t) {
      EXPECT_EQ(keys_read(out[0][0][t]), expected[t]);
      for (const int64_t ring : {0, 3, 5}) {
        const AttentionCase one = one_hot({.prefix = t,
                                           .sliding = 3,
                                           .sinks = 2,
                                           .ring = ring,
                                           .dtype = GetParam()});
        const Tensor single = attend(one.q, one.view, {.role = role});
        EXPECT_EQ(keys_read(single[0][0][0]), expected[t]) << ring;
      }
    }
  }
}

// pytorch/pytorch#108108: with more keys than queries, query i of a block sees
// keys 0..prefix + i.
TEST_P(Attend, CausalIsAlignedToTheEnd) {
  for (const int64_t tokens : {1, 3}) {
    const AttentionCase c =
        one_hot({.prefix = 5, .tokens = tokens, .dtype = GetParam()});
    for (const Role role : {Role::kPrefill, Role::kDecode}) {
      const Tensor out = attend(c.q, c.view, {.role = role});
      for (int64_t t = 0; t < tokens; ++t) {
        EXPECT_EQ(keys_read(out[0][0][t]).size(), static_cast<size_t>(6 + t));
        EXPECT_EQ(keys_read(out[0][0][t]).back(), 5 + t);
      }
    }
  }
}

// K62, Lightning-AI/litgpt#2215: 11 tokens through a window of 4 in one call;
// the last one changes nothing before it.
TEST_P(Attend, PrefillLongerThanTheWindowIsCausal) {
  for (const int64_t sinks : {0, 2}) {
    AttentionCase c = make_case({.heads = 2,
                                 .group = 2,
                                 .tokens = 11,
                                 .sliding = 4,
                                 .sinks = sinks,
                                 .dtype = GetParam()});
    expect_reference(c);
    const Tensor before = attend(c.q, c.view).narrow(2, 0, 10).clone();
    c.view.k.narrow(2, 10, 1).fill_(3);
    c.view.v.narrow(2, 10, 1).fill_(-2);
    EXPECT_TRUE(at::equal(before, attend(c.q, c.view).narrow(2, 0, 10)));
  }
}

// K64, trymirai/lalamo#200: a block of 3 after 7 keys, in a window of 4, equals
// three singles; a ring needs two cells more, for what its first query sees.
TEST_P(Attend, BlockInWindowEqualsSingles) {
  for (const auto& [sinks, ring] :
       {std::pair<int64_t, int64_t>{0, 0}, {0, 6}, {2, 0}, {2, 6}}) {
    const AttentionCase c = make_case({.heads = 2,
                                       .group = 2,
                                       .prefix = 7,
                                       .tokens = 3,
                                       .sliding = 4,
                                       .sinks = sinks,
                                       .ring = ring,
                                       .dtype = GetParam()});
    expect_reference(c);
    const Tensor block = attend(c.q, c.view);
    for (int64_t t = 0; t < 3; ++t) {
      AttentionCase one = c;
      one.q = c.q.narrow(2, t, 1);
      one.view.limits = c.view.limits.narrow(1, t, 1);
      EXPECT_TRUE(at::equal(block.narrow(2, t, 1),
                            attend(one.q, one.view, {.role = Role::kDecode})));
    }
  }
}

// pytorch/pytorch#103749: a query that sees nothing gives 0, not NaN; so does
// a row that is all padding, whatever its cells hold.
TEST_P(Attend, DeadQueriesGiveZero) {
  AttentionCase c = make_case(
      {.rows = 3, .heads = 2, .group = 3, .tokens = 4, .dtype = GetParam()});
  int64_t* limits = c.view.limits.mutable_data_ptr<int64_t>();
  std::fill(limits, limits + 3, 0);  // pad pad pad x
  limits[3] = 1;
  std::fill(limits + 8, limits + 12, 0);  // all padding
  const double nan = std::numeric_limits<double>::quiet_NaN();
  c.view.k[2].fill_(nan);
  c.view.v[2].fill_(nan);
  c.q[2].fill_(nan);
  for (const Role role : {Role::kPrefill, Role::kDecode}) {
    const Tensor out = attend(c.q, c.view, {.role = role});
    EXPECT_TRUE(at::isfinite(out).all().item<bool>());
    EXPECT_EQ(out[2].abs().max().item<float>(), 0);
    EXPECT_EQ(out[0].narrow(1, 0, 3).abs().max().item<float>(), 0);
    EXPECT_GT(out[0].narrow(1, 3, 1).abs().max().item<float>(), 0);
  }
}

TEST_P(Attend, NothingToDo) {
  AttentionCase c = make_case({.heads = 2, .tokens = 3, .dtype = GetParam()});
  c.q = c.q.narrow(2, 0, 0);
  c.view.limits = c.view.limits.narrow(1, 0, 0);
  EXPECT_EQ(attend(c.q, c.view).sizes(), c.q.sizes());
}

TEST_P(Attend, InferenceModeAndNot) {
  const AttentionCase c = make_case({.prefix = 20, .dtype = GetParam()});
  const Tensor plain = attend(c.q, c.view);
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::equal(plain, attend(c.q, c.view)));
}

}  // namespace
}  // namespace kvcache::testing
