// dense_tiles_test.cpp - products with dense tiles: every instruction set of
// this machine against plain sums, rows of any number with the bits of one.
#include "src/model/packed/dense_tiles.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "src/kernels/cpu_level.h"

namespace kvcache::testing {
namespace {

using kernels::CpuLevel;
using model::DenseTiles;

// Of the sum of magnitudes: float32 sums of up to 1,000 products.
constexpr double kRelative = 1e-5;

using Shape = std::pair<int64_t, int64_t>;  // outputs, inputs

class DenseTilesTest : public ::testing::TestWithParam<
                           std::tuple<CpuLevel, at::ScalarType, Shape>> {
 protected:
  void SetUp() override {
    const CpuLevel level = std::get<0>(GetParam());
    if (!kernels::cpu_supports(level)) {
      GTEST_SKIP() << "this CPU has no " << kernels::name(level);
    }
    const Shape& shape = std::get<2>(GetParam());
    forced.emplace(level);
    const auto numbers = [&](at::IntArrayRef sizes, uint64_t seed) {
      return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed),
                       at::TensorOptions(at::kFloat))
          .to(std::get<1>(GetParam()));
    };
    weight = numbers({shape.first, shape.second}, 1);
    x = numbers({61, shape.second}, 2);
    tiles.emplace(weight);
  }
  std::optional<kernels::ForcedCpuLevel> forced;
  Tensor weight, x;
  std::optional<DenseTiles> tiles;
};

TEST_P(DenseTilesTest, IsTheProduct) {
  const Tensor w = weight.to(at::kDouble).t(), rows = x.to(at::kDouble);
  const Tensor found = (*tiles)(x);
  EXPECT_EQ(found.scalar_type(), at::kFloat);
  const Tensor error = (found.to(at::kDouble) - rows.matmul(w)).abs() /
                       rows.abs().matmul(w.abs());
  EXPECT_LT(error.max().item<double>(), kRelative);
}

TEST_P(DenseTilesTest, RoundsOnceBehindTheBias) {
  const Tensor bias = at::linspace(-1, 1, weight.size(0));
  for (const Tensor& added : {Tensor(), bias}) {
    Tensor wanted = (*tiles)(x);
    if (added.defined()) wanted = wanted + added;
    EXPECT_TRUE(at::equal(tiles->rounded(x, added), wanted.to(x.dtype())));
  }
}

// More rows than any kernel takes at a time, whole parts of them and ends.
TEST_P(DenseTilesTest, ManyRowsHaveTheBitsOfFew) {
  const Tensor rows = x.repeat({10, 1});
  const Tensor all = (*tiles)(rows);
  for (const int64_t count : {1, 15, 16, 17, 31, 32, 33, 256, 500}) {
    EXPECT_TRUE(at::equal((*tiles)(rows.narrow(0, 610 - count, count)),
                          all.narrow(0, 610 - count, count)))
        << count << " rows";
  }
}

// Whatever runs along, on any number of threads, on any level. (Weights in
// pairs have a kernel of their own, which stays theirs.)
TEST_P(DenseTilesTest, ARowHasOneSetOfBits) {
  const Tensor all = (*tiles)(x);
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 48, 49, 61}) {
      const int64_t first = 61 - rows;
      EXPECT_TRUE(at::equal((*tiles)(x.narrow(0, first, rows)),
                            all.narrow(0, first, rows)))
          << rows << " rows on " << threads;
    }
  }
  at::set_num_threads(before);
  const kernels::ForcedCpuLevel portable(CpuLevel::kPortable);
  EXPECT_TRUE(at::equal((*tiles)(x), all));
}

TEST_P(DenseTilesTest, WhatIsNoNumberStaysInItsRow) {
  const Tensor all = (*tiles)(x);
  Tensor spoilt = x.clone();
  spoilt[3][1] = std::numeric_limits<float>::quiet_NaN();
  const Tensor found = (*tiles)(spoilt);
  EXPECT_TRUE(found[3].isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(found.narrow(0, 4, 57), all.narrow(0, 4, 57)));
  EXPECT_TRUE(at::equal(found.narrow(0, 0, 3), all.narrow(0, 0, 3)));
}

INSTANTIATE_TEST_SUITE_P(
    Levels, DenseTilesTest,
    ::testing::Combine(::testing::ValuesIn(kernels::kCpuLevels),
                       ::testing::Values(at::kFloat, at::kBFloat16),
                       ::testing::Values(Shape{16, 32}, Shape{48, 576},
                                         Shape{33, 96}, Shape{7, 19},
                                         Shape{40, 5000})),
    [](const auto& info) {
      const Shape& shape = std::get<2>(info.param);
      return std::string(kernels::name(std::get<0>(info.param))) +
             (std::get<1>(info.param) == at::kFloat ? "_float32_"
                                                    : "_bfloat16_") +
             std::to_string(shape.first) + "x" + std::to_string(shape.second);
    });

}  // namespace
}  // namespace kvcache::testing
