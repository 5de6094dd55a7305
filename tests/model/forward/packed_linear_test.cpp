// packed_linear_test.cpp - products of packed weights, and a row's bits.
#include "src/model/forward/packed_linear.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

namespace kvcache::model {
namespace {

class PackedLinearTest
    : public ::testing::TestWithParam<
          std::tuple<at::ScalarType, std::pair<int64_t, int64_t>>> {
 protected:
  void SetUp() override {
    dtype = std::get<0>(GetParam());
    std::tie(outputs, inputs) = std::get<1>(GetParam());
    at::manual_seed(1);
    weight = at::randn({outputs, inputs}).mul(0.05).to(dtype);
    bias = at::randn({outputs}).to(dtype);
    x = at::randn({300, inputs}).to(dtype);
  }
  at::ScalarType dtype = at::kFloat;
  int64_t outputs = 0, inputs = 0;
  Tensor weight, bias, x;
};

TEST_P(PackedLinearTest, IsTheProduct) {
  for (const bool with_bias : {false, true}) {
    const PackedLinear linear(weight, with_bias ? bias : Tensor());
    EXPECT_EQ(linear.has_bias(), with_bias);
    for (const int64_t rows : {1, 2, 5, 64}) {
      Tensor wanted = at::matmul(x.narrow(0, 0, rows).to(at::kDouble),
                                 weight.to(at::kDouble).t());
      if (with_bias) wanted = wanted.add(bias.to(at::kDouble));
      const Tensor found = linear(x.narrow(0, 0, rows));
      ASSERT_EQ(found.scalar_type(), dtype);
      ASSERT_EQ(found.sizes(), wanted.sizes());
      // Half a rounding of the result, and the float32 sums.
      const double relative = dtype == at::kFloat ? 1e-5 : 0x1p-8;
      EXPECT_TRUE(at::allclose(found.to(at::kDouble), wanted, relative, 1e-4));
    }
  }
}

TEST_P(PackedLinearTest, ARowHasTheSameBitsAmongAnyNeighbours) {
  const PackedLinear linear(weight, bias);
  const Tensor all = linear(x);
  for (const int threads : {1, 2, 4}) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 16, 17, 63, 64, 65, 256}) {
      EXPECT_TRUE(
          at::equal(linear(x.narrow(0, 0, rows)), all.narrow(0, 0, rows)))
          << rows << " rows, " << threads << " threads";
      EXPECT_TRUE(at::equal(linear(x.narrow(0, 300 - rows, rows)),
                            all.narrow(0, 300 - rows, rows)))
          << "the last " << rows << " rows, " << threads << " threads";
    }
    at::set_num_threads(before);
  }
  Tensor poisoned = at::full(
      {5, inputs}, std::numeric_limits<double>::quiet_NaN(), x.options());
  poisoned.narrow(0, 2, 1).copy_(x.narrow(0, 2, 1));
  EXPECT_TRUE(at::equal(linear(poisoned).narrow(0, 2, 1), all.narrow(0, 2, 1)));
}

TEST_P(PackedLinearTest, TheProbeAgrees) {
  const int threads = at::get_num_threads();
  EXPECT_TRUE(PackedLinear(weight, bias).probe_row_exact());
  EXPECT_TRUE(PackedLinear(weight, {}).probe_row_exact());
  EXPECT_EQ(at::get_num_threads(), threads);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PackedLinearTest,
    ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                       ::testing::Values(std::pair<int64_t, int64_t>{960, 576},
                                         std::pair<int64_t, int64_t>{576, 1536},
                                         std::pair<int64_t, int64_t>{64, 32},
                                         std::pair<int64_t, int64_t>{50, 33},
                                         std::pair<int64_t, int64_t>{7,
                                                                     4097})));

}  // namespace
}  // namespace kvcache::model
