// tile_kernels_test.cpp - products with tiles: every instruction set of this
// machine against plain sums, rows of any number with the bits of one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "src/kernels/cpu_level.h"
#include "src/model/packed/tile_kernels.h"
#include "src/model/packed/tiles.h"

namespace kvcache::testing {
namespace {

using kernels::CpuLevel;
using model::TiledLinear;
using model::TileFormat;
using model::WeightPacking;

Tensor random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::TensorOptions(at::kFloat));
}

// Activations are rounded to 2^-15 of the largest of 32, sums to 2^-24.
constexpr double kRelative = 1e-4;

struct Shape {
  WeightPacking packing;
  int64_t outputs, inputs;
};

class TileKernelsTest
    : public ::testing::TestWithParam<std::tuple<CpuLevel, Shape>> {
 protected:
  void SetUp() override {
    const auto& [level, shape] = GetParam();
    if (!kernels::cpu_supports(level)) {
      GTEST_SKIP() << "this CPU has no " << kernels::name(level);
    }
    forced.emplace(level);
    weight = random({shape.outputs, shape.inputs}, 1);
    bias = random({shape.outputs}, 2);
    x = random({61, shape.inputs}, 3);
  }
  std::optional<kernels::ForcedCpuLevel> forced;
  Tensor weight, bias, x;
};

TEST_P(TileKernelsTest, IsTheProductOfTheKeptWeights) {
  const TiledLinear linear(weight, bias, std::get<1>(GetParam()).packing);
  const Tensor kept = linear.dequantised().to(at::kDouble);
  const Tensor wanted = x.to(at::kDouble).matmul(kept.t()) + bias;
  const Tensor scale =
      x.to(at::kDouble).abs().matmul(kept.abs().t()) + bias.abs();
  const Tensor error = (linear(x).to(at::kDouble) - wanted).abs() / scale;
  EXPECT_LT(error.max().item<double>(), kRelative);
}

// Whatever runs along, on any number of threads.
TEST_P(TileKernelsTest, ARowHasOneSetOfBits) {
  const TiledLinear linear(weight, {}, std::get<1>(GetParam()).packing);
  const Tensor all = linear(x);
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 48, 49, 61}) {
      const int64_t first = 61 - rows;
      EXPECT_TRUE(at::equal(linear(x.narrow(0, first, rows)),
                            all.narrow(0, first, rows)))
          << rows << " rows on " << threads;
    }
  }
  at::set_num_threads(before);
}

// More rows than any kernel takes at a time, whole parts of them and ends.
TEST_P(TileKernelsTest, ManyRowsHaveTheBitsOfFew) {
  const TiledLinear linear(weight, {}, std::get<1>(GetParam()).packing);
  const Tensor rows = random({600, linear.inputs()}, 4);
  const Tensor all = linear(rows);
  for (const int64_t count : {1, 8, 15, 16, 31, 256, 257, 272, 535}) {
    EXPECT_TRUE(at::equal(linear(rows.narrow(0, 600 - count, count)),
                          all.narrow(0, 600 - count, count)))
        << count << " rows";
  }
}

TEST_P(TileKernelsTest, WhatIsNoNumberStaysInItsRow) {
  const TiledLinear linear(weight, {}, std::get<1>(GetParam()).packing);
  const Tensor all = linear(x);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::infinity()}) {
    Tensor spoilt = x.clone();
    spoilt[3][1] = bad;
    const Tensor found = linear(spoilt);
    EXPECT_TRUE(found[3].isnan().all().item<bool>());
    EXPECT_TRUE(at::equal(found.narrow(0, 4, 57), all.narrow(0, 4, 57)));
    EXPECT_TRUE(at::equal(found.narrow(0, 0, 3), all.narrow(0, 0, 3)));
  }
}

TEST_P(TileKernelsTest, TinyAndHugeActivationsAreNoSpecialCase) {
  const TiledLinear linear(weight, {}, std::get<1>(GetParam()).packing);
  EXPECT_TRUE(
      at::equal(linear(at::zeros_like(x)), at::zeros({61, linear.outputs()})));
  EXPECT_TRUE(at::equal(linear(x * 1e-40), at::zeros({61, linear.outputs()})));
  const Tensor plain = linear(x);
  for (const double factor : {0x1p-60, 0x1p60}) {
    // Powers of two change no rounding.
    EXPECT_TRUE(at::equal(linear(x * factor) / factor, plain)) << factor;
  }
}

// The other levels fuse the same additions: the bits of the portable one.
TEST_P(TileKernelsTest, LevelsAgree) {
  const TiledLinear linear(weight, bias, std::get<1>(GetParam()).packing);
  const Tensor found = linear(x);
  const kernels::ForcedCpuLevel portable(CpuLevel::kPortable);
  EXPECT_TRUE(at::equal(found, linear(x)));
}

// 16 outputs and 32 inputs a tile: whole ones, and ends of every kind.
constexpr Shape kShapes[] = {
    {WeightPacking::kQ4, 16, 32},   {WeightPacking::kQ4, 48, 576},
    {WeightPacking::kQ4, 33, 96},   {WeightPacking::kQ4, 7, 20},
    {WeightPacking::kQ8, 16, 32},   {WeightPacking::kQ8, 48, 576},
    {WeightPacking::kQ8, 100, 64},  {WeightPacking::kQ8, 1, 33},
    {WeightPacking::kQ4, 20, 1100}, {WeightPacking::kQ8, 20, 2080}};

INSTANTIATE_TEST_SUITE_P(
    Levels, TileKernelsTest,
    ::testing::Combine(::testing::ValuesIn(kernels::kCpuLevels),
                       ::testing::ValuesIn(kShapes)),
    [](const auto& info) {
      const Shape& shape = std::get<1>(info.param);
      return std::string(kernels::name(std::get<0>(info.param))) +
             (shape.packing == WeightPacking::kQ4 ? "_q4_" : "_q8_") +
             std::to_string(shape.outputs) + "x" + std::to_string(shape.inputs);
    });

}  // namespace
}  // namespace kvcache::testing
