// tiles_test.cpp - weights of files as tiles: blocks keep their values, all
// else is rounded finely.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "src/model/packed/tile_writer.h"
#include "src/model/packed/tiles.h"
#include "src/model/weights/weight_files.h"

namespace kvcache::testing {
namespace {

using model::BlockType;
using model::RowPiece;
using model::TiledLinear;
using model::TileFormat;
using model::WeightPacking;

// Matrices in the types of GGUF files, quantised and read by ggml.
class Blocks final : public model::WeightSource {
 public:
  void put(const std::string& name, ggml_type type, const Tensor& values) {
    const int64_t rows = values.size(0), width = values.size(1);
    Stored stored{type, width, ggml_row_size(type, width), {}};
    stored.bytes.resize(stored.row_bytes * static_cast<size_t>(rows));
    ggml_quantize_chunk(type, values.const_data_ptr<float>(),
                        stored.bytes.data(), 0, rows, width, nullptr);
    model::WeightInfo info;
    info.name = info.name_in_file = name;
    info.shape = {rows, width};
    info.type_name = ggml_type_name(type);
    info.quantised = true;
    add(std::move(info));
    stored_.emplace(name, std::move(stored));
  }
  Tensor values(const std::string& name) const {
    return read(name, at::kFloat);
  }
  void release_pages() const noexcept override {}

 private:
  struct Stored {
    ggml_type type;
    int64_t width;
    size_t row_bytes;
    std::vector<std::byte> bytes;
  };
  at::Tensor do_read(const model::WeightInfo& info,
                     c10::ScalarType dtype) const override {
    Tensor out = at::empty(info.shape, at::kFloat);
    do_read_rows(info, 0, info.shape[0], out.mutable_data_ptr<float>());
    return out.to(dtype);
  }
  void do_read_rows(const model::WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    const Stored& from = stored_.at(info.name);
    ggml_get_type_traits(from.type)->to_float(
        from.bytes.data() + static_cast<size_t>(first) * from.row_bytes, out,
        count * from.width);
  }
  BlockType do_block_type(const model::WeightInfo& info) const override {
    return model::block_type_of(stored_.at(info.name).type);
  }
  void do_read_blocks(const model::WeightInfo& info, int64_t first,
                      int64_t count, std::byte* out) const override {
    const Stored& from = stored_.at(info.name);
    std::copy_n(from.bytes.data() + static_cast<size_t>(first) * from.row_bytes,
                static_cast<size_t>(count) * from.row_bytes, out);
  }
  std::map<std::string, Stored> stored_;
};

Tensor random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::TensorOptions(at::kFloat));
}

// Of the largest of 32 weights: half a step of 8 bits, and float16 scales.
constexpr double kEightBits = 0.5 / 127 + 0x1p-11;

double worst_of_groups(const Tensor& found, const Tensor& wanted) {
  const Tensor most =
      wanted.view({wanted.size(0), -1, 32}).abs().amax(2, true) + 1e-30;
  return ((found - wanted).view({wanted.size(0), -1, 32}).abs() / most)
      .max()
      .item<double>();
}

TEST(Tiles, BlocksKeepTheirValues) {
  for (const ggml_type type :
       {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0}) {
    SCOPED_TRACE(ggml_type_name(type));
    Blocks source;
    source.put("w", type, random({37, 96}, 1));
    model::TileArena arena;
    const RowPiece all[] = {{"w", 0, 37}};
    const TiledLinear linear(source, all, {}, WeightPacking::kAuto, arena);
    EXPECT_EQ(linear.format() == TileFormat::kQ4,
              type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1);
    const Tensor wanted = source.values("w");
    if (type == GGML_TYPE_Q4_0) {  // 8 d is exact, d q - 8 d rounds once
      EXPECT_LT(worst_of_groups(linear.dequantised(), wanted), 1e-6);
    } else {
      EXPECT_TRUE(at::equal(linear.dequantised(), wanted));
    }
  }
}

TEST(Tiles, KQuantsAreRoundedToMoreBitsThanTheyHave) {
  for (const ggml_type type :
       {GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
        GGML_TYPE_Q6_K, GGML_TYPE_Q5_1}) {
    SCOPED_TRACE(ggml_type_name(type));
    Blocks source;
    source.put("w", type, random({5, 512}, 2));
    model::TileArena arena;
    const RowPiece all[] = {{"w", 0, 5}};
    const TiledLinear linear(source, all, {}, WeightPacking::kAuto, arena);
    EXPECT_EQ(linear.format(), TileFormat::kQ8);
    EXPECT_LT(worst_of_groups(linear.dequantised(), source.values("w")),
              kEightBits);
  }
}

TEST(Tiles, PiecesFollowEachOther) {
  Blocks source;
  source.put("q", GGML_TYPE_Q4_1, random({20, 64}, 3));
  source.put("k", GGML_TYPE_Q4_0, random({9, 64}, 4));
  source.put("v", GGML_TYPE_Q6_K, random({9, 256}, 5));
  model::TileArena arena;
  const RowPiece pieces[] = {{"q", 5, 3}, {"k", 0, 9}, {"q", 0, 5}};
  const TiledLinear linear(source, pieces, {}, WeightPacking::kAuto, arena);
  const Tensor q = source.values("q"), k = source.values("k");
  const Tensor wanted = at::cat({q.narrow(0, 5, 3), k, q.narrow(0, 0, 5)});
  EXPECT_LT(worst_of_groups(linear.dequantised(), wanted), 1e-6);
}

TEST(Tiles, MixedTypesAreRoundedToEightBits) {
  Blocks source;
  source.put("q", GGML_TYPE_Q4_1, random({16, 256}, 3));
  source.put("v", GGML_TYPE_Q6_K, random({9, 256}, 5));
  model::TileArena arena;
  const RowPiece pieces[] = {{"q", 0, 16}, {"v", 0, 9}};
  const TiledLinear linear(source, pieces, {}, WeightPacking::kAuto, arena);
  EXPECT_EQ(linear.format(), TileFormat::kQ8);
  const Tensor wanted = at::cat({source.values("q"), source.values("v")});
  EXPECT_LT(worst_of_groups(linear.dequantised(), wanted), kEightBits);
}

TEST(Tiles, PlainWeightsAreRoundedAsAsked) {
  const Tensor weight = random({24, 64}, 6);
  const TiledLinear eight(weight, {}, WeightPacking::kQ8);
  EXPECT_LT(worst_of_groups(eight.dequantised(), weight), kEightBits);
  const TiledLinear four(weight, {}, WeightPacking::kQ4);
  // Half of a 15th of what lies between the least and the most.
  EXPECT_LT(worst_of_groups(four.dequantised(), weight), 1.0 / 15 + 0x1p-10);
  EXPECT_LT(four.matrix().groups * model::tile_bytes(four.format()),
            eight.matrix().groups * model::tile_bytes(eight.format()));
}

// Constant, zero, and groups too large or too small for a float16 scale.
TEST(Tiles, OddGroupsRoundToSomethingSane) {
  Tensor weight = at::zeros({4, 32}, at::TensorOptions(at::kFloat));
  weight[1].fill_(-3.25);
  weight[2].fill_(1e-12);
  weight[3][7] = std::numeric_limits<float>::quiet_NaN();
  for (const auto packing : {WeightPacking::kQ4, WeightPacking::kQ8}) {
    const Tensor found = TiledLinear(weight, {}, packing).dequantised();
    EXPECT_TRUE(found[0].eq(0).all().item<bool>());
    EXPECT_LT((found[1] - weight[1]).abs().max().item<double>(), 0.01);
    EXPECT_LT(found[2].abs().max().item<double>(), 1e-6);
    EXPECT_TRUE(found[3].isnan().any().item<bool>());
  }
}

TEST(Tiles, RefusesActivationsThatDoNotFit) {
  const TiledLinear linear(random({16, 64}, 7), {}, WeightPacking::kQ8);
  EXPECT_THROW(linear(random({2, 32}, 1)), c10::Error);
  EXPECT_THROW(linear(random({2, 64}, 1).to(at::kBFloat16)), c10::Error);
  EXPECT_THROW(linear(random({64, 2}, 1).t()), c10::Error);
}

}  // namespace
}  // namespace kvcache::testing
