// attention_test.cpp - attend() against the definition in float64.

#include "kvcache/attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sub.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

// float32: sums of a few hundred terms of size 1. bfloat16: the result is
// rounded to 8 bits once and the weights may be too, so two units of 2^-8 of
// values up to about 4.
constexpr double kFloatTolerance = 2e-6;
constexpr double kBFloat16Tolerance = 2.0 / 256 * 4;

double tolerance(at::ScalarType dtype) {
  return dtype == at::kFloat ? kFloatTolerance : kBFloat16Tolerance;
}

void expect_reference(const AttentionCase& c, const AttendOptions& options = {},
                      const std::string& what = "") {
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(c.q.size(3))));
  const Tensor out = attend(c.q, c.view, options);
  ASSERT_EQ(out.sizes(), c.q.sizes());
  ASSERT_TRUE(out.transpose(1, 2).is_contiguous());
  const Tensor expected = reference_attend(c.q, c.view, scale);
  const Tensor error = at::sub(out.to(at::kDouble), expected).abs();
  ASSERT_TRUE(at::isfinite(out).all().item<bool>()) << what;
  EXPECT_LE(error.max().item<double>(), tolerance(c.q.scalar_type())) << what;
}

TEST(Attend, MatchesTheDefinition) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t group : {1, 3}) {
      expect_reference(make_case({.rows = 2,
                                  .heads = 2,
                                  .group = group,
                                  .prefix = 150,
                                  .tokens = 5,
                                  .capacity = 200,
                                  .dtype = dtype}));
    }
  }
}

}  // namespace
}  // namespace kvcache::testing
