// gguf_test.cpp - metadata by type, rows of every tensor type.

#include "kvcache/model/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace testing;  // NOLINT: the types of the GGUF writer

class Gguf : public ::testing::Test {
 protected:
  const GgufFile& open(const GgufWriter& writer) {
    file_.emplace(folder_.write("f.gguf", writer.bytes()));
    return *file_;
  }
  TempFolder folder_;
  std::optional<GgufFile> file_;
};

TEST_F(Gguf, ReadsEachTypeOfMetadata) {
  GgufWriter writer;
  writer.value<uint8_t>("u8", kU8, 255).value<int8_t>("i8", kI8, -1);
  writer.value<uint16_t>("u16", kU16, 65535).value<int16_t>("i16", kI16, -2);
  writer.u32("u32", 4294967295U).value<int32_t>("i32", kI32, -3);
  writer.value<uint64_t>("u64", kU64, INT64_MAX);
  writer.value<int64_t>("i64", kI64, INT64_MIN);
  writer.f32("f32", 0.5F).value<double>("f64", kF64, 1e300);
  writer.value<uint8_t>("yes", kBool, 1).value<uint8_t>("no", kBool, 0);
  writer.text("text", "caf\xc3\xa9");
  writer.array<uint16_t>("u16s", kU16, {1, 2, 65535});
  writer.array<float>("f32s", kF32, {0.25F, -1.0F});
  writer.array<double>("f64s", kF64, {0.25});
  writer.array<uint8_t>("flags", kBool, {1, 0, 1});
  writer.texts("texts", {"", "a", "bc"}).texts("none", {});
  const GgufFile& file = open(writer);

  EXPECT_EQ(file.integer("u8"), 255);
  EXPECT_EQ(file.integer("i8"), -1);
  EXPECT_EQ(file.integer("u16"), 65535);
  EXPECT_EQ(file.integer("i16"), -2);
  EXPECT_EQ(file.integer("u32"), 4294967295);
  EXPECT_EQ(file.integer("i32"), -3);
  EXPECT_EQ(file.integer("u64"), INT64_MAX);
  EXPECT_EQ(file.integer("i64"), INT64_MIN);
  EXPECT_EQ(file.number("f32"), 0.5);
  EXPECT_EQ(file.number("f64"), 1e300);
  EXPECT_TRUE(file.boolean("yes"));
  EXPECT_FALSE(file.boolean("no"));
  EXPECT_EQ(file.string("text"), "caf\xc3\xa9");
  EXPECT_THAT(file.integers("u16s"), ElementsAre(1, 2, 65535));
  EXPECT_THAT(file.numbers("f32s"), ElementsAre(0.25F, -1.0F));
  EXPECT_THAT(file.numbers("f64s"), ElementsAre(0.25F));
  EXPECT_THAT(*file.find_bools("flags"), ElementsAre(true, false, true));
  EXPECT_FALSE(file.find_bools("absent").has_value());
  EXPECT_THAT(file.strings("texts"), ElementsAre("", "a", "bc"));
  EXPECT_TRUE(file.strings("none").empty());
  EXPECT_TRUE(file.is_array("texts"));
  EXPECT_FALSE(file.is_array("text"));
  EXPECT_FALSE(file.is_array("absent"));
  EXPECT_EQ(file.keys().size(), 19U);
  EXPECT_EQ(file.keys().front(), "u8");
  EXPECT_EQ(file.describe("texts"), "3 x str");
  EXPECT_EQ(file.describe("i8"), "-1");
  EXPECT_EQ(file.describe("yes"), "true");
  EXPECT_EQ(file.describe("f32"), "0.5");
}

TEST_F(Gguf, AMissingKeyIsEmptyOrAnErrorWithItsName) {
  const GgufFile& file = open(GgufWriter().u32("a", 1));
  EXPECT_FALSE(file.has("b"));
  EXPECT_FALSE(file.find_integer("b").has_value());
  EXPECT_FALSE(file.find_strings("b").has_value());
  EXPECT_EQ(error_text([&] { file.string("b"); }),
            "[GgufFile] " + file.path().string() +
                ": key \"b\" is missing; convert the model again with a "
                "current tool.");
}

TEST_F(Gguf, AValueOfAnotherTypeIsAnErrorWithTheKeysName) {  // K84
  // ggml-org/llama.cpp#26690: elements read with the type that was expected.
  GgufWriter writer;
  writer.array<uint8_t>("tokenizer.ggml.scores", kU8, {1, 2});
  writer.array<float>("tokenizer.ggml.token_type", kF32, {1.0F});
  writer.array<int32_t>("tokenizer.ggml.merges", kI32, {1});
  writer.texts("tokenizer.chat_template", {"a"});
  writer.text("tokenizer.ggml.eos_token_id", "2");
  writer.u32("tokenizer.ggml.add_bos_token", 1);
  writer.f32("count", 1.0F).u32("eps", 1);
  writer.value<uint64_t>("large", kU64, UINT64_MAX);
  const GgufFile& file = open(writer);
  const auto text = [&](const char* key, const char* rest) {
    return "[GgufFile] " + file.path().string() + ": key \"" + key + "\" " +
           rest + "; the file is damaged or was made by a faulty converter.";
  };
  EXPECT_EQ(error_text([&] { file.numbers("tokenizer.ggml.scores"); }),
            text("tokenizer.ggml.scores",
                 "must be an array of floating-point numbers but is an array "
                 "of u8"));
  EXPECT_EQ(error_text([&] { file.integers("tokenizer.ggml.token_type"); }),
            text("tokenizer.ggml.token_type",
                 "must be an array of whole numbers but is an array of f32"));
  EXPECT_EQ(error_text([&] { file.strings("tokenizer.ggml.merges"); }),
            text("tokenizer.ggml.merges",
                 "must be an array of texts but is an array of i32"));
  EXPECT_EQ(error_text([&] { file.find_string("tokenizer.chat_template"); }),
            text("tokenizer.chat_template", "must be a text but is arr"));
  EXPECT_EQ(
      error_text([&] { file.find_integer("tokenizer.ggml.eos_token_id"); }),
      text("tokenizer.ggml.eos_token_id", "must be a whole number but is str"));
  EXPECT_EQ(error_text([&] { file.find_bool("tokenizer.ggml.add_bos_token"); }),
            text("tokenizer.ggml.add_bos_token", "must be a bool but is u32"));
  EXPECT_THAT(error_text([&] { file.integer("count"); }),
              HasSubstr("must be a whole number but is f32"));
  EXPECT_THAT(error_text([&] { file.number("eps"); }),
              HasSubstr("must be a floating-point number but is u32"));
  EXPECT_THAT(error_text([&] { file.find_bools("tokenizer.ggml.merges"); }),
              HasSubstr("must be an array of bools but is an array of i32"));
  EXPECT_THAT(error_text([&] { file.strings("count"); }),
              HasSubstr("must be an array of texts but is f32"));
  EXPECT_THAT(error_text([&] { file.integer("large"); }),
              HasSubstr("must not exceed 9223372036854775807 but is "
                        "18446744073709551615"));
}

TEST_F(Gguf, ListsTensorsInTorchOrder) {
  GgufWriter writer;
  writer.floats("m", {3, 2}, {0, 1, 2, 3, 4, 5}).floats("v", {2}, {6, 7});
  const GgufFile& file = open(writer);
  ASSERT_EQ(file.tensors().size(), 2U);
  const GgufTensor& matrix = *file.find("m");
  EXPECT_THAT(matrix.shape, ElementsAre(2, 3));
  EXPECT_EQ(matrix.type_name, "f32");
  EXPECT_FALSE(matrix.quantised);
  EXPECT_EQ(file.find("x"), nullptr);
  std::vector<float> row(3);
  file.read_rows(matrix, 1, 1, row.data());
  EXPECT_THAT(row, ElementsAre(3, 4, 5));
  file.release_pages();
  file.read_rows(matrix, 0, 1, row.data());
  EXPECT_THAT(row, ElementsAre(0, 1, 2));
  EXPECT_EQ(error_text([&] { file.read_rows(matrix, 1, 2, row.data()); }),
            "[GgufFile::read_rows] rows 1 to 3 of \"m\" must lie in 0 to 2.");
  EXPECT_THAT(error_text([&] { file.read_rows(matrix, -1, 1, row.data()); }),
              HasSubstr("rows -1 to 0"));
}

TEST_F(Gguf, UsesTheAlignmentThatTheFileSays) {
  GgufWriter writer;
  writer.u32("general.alignment", 256).alignment = 256;
  writer.floats("a", {1}, {1}).floats("b", {1}, {2});
  const GgufFile& file = open(writer);
  float value = 0;
  file.read_rows(*file.find("b"), 0, 1, &value);
  EXPECT_EQ(value, 2.0F);
}

TEST_F(Gguf, ReadsTheOlderVersionTwo) {
  GgufWriter writer;
  writer.version = 2;
  EXPECT_EQ(open(writer.u32("a", 7)).integer("a"), 7);
}

// Two blocks of each type whose byte i is (37 i + 11) mod 64, and the sums of
// their values as the Python package gguf 0.19.0 computes them.
struct BlockType {
  uint32_t type;
  const char* name;
  int64_t values;  // of a block
  size_t bytes;    // of a block
  double sum;
  double magnitude;  // sum of absolute values
};

void PrintTo(const BlockType& type, std::ostream* out) { *out << type.name; }

constexpr BlockType kBlockTypes[] = {
    {2, "q4_0", 32, 18, -14.2975477, 21.3832439},
    {3, "q4_1", 32, 20, 42.4850149, 42.4850149},
    {6, "q5_0", 32, 22, -21.5990868, 36.3571587},
    {7, "q5_1", 32, 24, 83.5185242, 83.5185242},
    {8, "q8_0", 32, 34, 126.462555, 126.462555},
    {10, "q2_K", 256, 84, -2.32977498, 41.3478062},
    {11, "q3_K", 256, 110, 1285.01369, 2393.41106},
    {12, "q4_K", 256, 144, -1637.26125, 2837.44483},
    {13, "q5_K", 256, 176, 2205.8255, 5075.13329},
    {14, "q6_K", 256, 210, -197.540291, 485.51531},
    {16, "iq2_xxs", 256, 66, 670.687317, 1905.42288},
    {17, "iq2_xs", 256, 74, 154.038393, 784.272623},
    {18, "iq3_xxs", 256, 98, 88.7738676, 562.236594},
    {19, "iq1_s", 256, 50, 4.57501221, 107.412239},
    {20, "iq4_nl", 32, 18, -206.362652, 307.839944},
    {21, "iq3_s", 256, 110, 95.4496288, 1777.08046},
    {22, "iq2_s", 256, 82, 164.167294, 688.586579},
    {23, "iq4_xs", 256, 136, 11063.0748, 41599.154},
    {29, "iq1_m", 256, 56, -1.6048665, 227.089629},
    {30, "bf16", 1, 2, 0.000568390398, 0.000568390398},
    {34, "tq1_0", 256, 54, -22.0711187, 46.9335525},
    {35, "tq2_0", 256, 66, 28.3710938, 226.96875},
    {39, "mxfp4", 32, 17, 1.56549399e-34, 5.90095225e-34},
    {40, "nvfp4", 64, 36, 49.9580078, 102.834961}};

class GgufBlocks : public ::testing::TestWithParam<BlockType> {};

// float32 products in another order than numpy's.
constexpr double kRelative = 1e-6;

TEST_P(GgufBlocks, AreTheNumbersOfTheReference) {
  const BlockType& type = GetParam();
  std::string data;
  for (size_t i = 0; i < 2 * type.bytes; ++i)
    data += static_cast<char>((i * 37 + 11) & 0x3f);
  const TempFolder folder;
  GgufWriter writer;
  writer.tensor("t", {type.values, 2}, data, type.type);
  const GgufFile file(folder.write("f.gguf", writer.bytes()));
  const GgufTensor& tensor = *file.find("t");
  EXPECT_EQ(tensor.type_name, type.name);
  EXPECT_EQ(tensor.row_bytes, type.bytes);
  EXPECT_EQ(tensor.quantised, type.values > 1);
  std::vector<float> values(static_cast<size_t>(2 * type.values));
  file.read_rows(tensor, 0, 2, values.data());
  double sum = 0;
  double magnitude = 0;
  for (const float value : values) {
    sum += value;
    magnitude += std::fabs(value);
  }
  EXPECT_NEAR(sum, type.sum, kRelative * type.magnitude);
  EXPECT_NEAR(magnitude, type.magnitude, kRelative * type.magnitude);
}

INSTANTIATE_TEST_SUITE_P(Types, GgufBlocks, ::testing::ValuesIn(kBlockTypes),
                         [](const auto& info) {
                           return std::string(info.param.name);
                         });

TEST_F(Gguf, ReadsPlainNumbers) {
  GgufWriter writer;
  writer.tensor("f16", {2}, std::string("\x00\x3c\x00\xc0", 4), 1);
  writer.tensor("i8", {2}, "\x01\xff", 24);
  writer.tensor("i16", {1}, std::string("\xfe\xff", 2), 25);
  writer.tensor("i32", {1}, Bytes().add<int32_t>(-70000).str(), 26);
  writer.tensor("i64", {1}, Bytes().add<int64_t>(1 << 20).str(), 27);
  writer.tensor("f64", {1}, Bytes().add<double>(0.5).str(), 28);
  const GgufFile& file = open(writer);
  const auto first = [&](const char* name) {
    const GgufTensor& tensor = *file.find(name);
    std::vector<float> values(static_cast<size_t>(tensor.row_values));
    file.read_rows(tensor, 0, 1, values.data());
    return values.back();
  };
  EXPECT_EQ(first("f16"), -2.0F);
  EXPECT_EQ(first("i8"), -1.0F);
  EXPECT_EQ(first("i16"), -2.0F);
  EXPECT_EQ(first("i32"), -70000.0F);
  EXPECT_EQ(first("i64"), 1048576.0F);
  EXPECT_EQ(first("f64"), 0.5F);
}

TEST_F(Gguf, ATypeWithoutADequantiserIsAnErrorWithItsName) {
  GgufWriter writer;
  writer.tensor("t", {32}, std::string(36, '\1'), 9);
  const GgufFile& file = open(writer);
  std::vector<float> out(32);
  EXPECT_THAT(
      error_text([&] { file.read_rows(*file.find("t"), 0, 1, out.data()); }),
      HasSubstr("tensor \"t\" is q8_1, which ggml cannot turn into numbers"));
}

}  // namespace
}  // namespace kvcache::model
