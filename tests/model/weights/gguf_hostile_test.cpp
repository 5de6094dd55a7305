// gguf_hostile_test.cpp - damaged and hostile GGUF files.
//
// Bug reports: K82 ggml-org/llama.cpp#19003, K84 ggml-org/llama.cpp#26690, K85
// antirez/gguf-tools#27.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvcache/model/config.h"
#include "kvcache/model/gguf.h"
#include "tests/model/weights/tiny_llama.h"
#include "tests/support/error_text.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::HasSubstr;
using namespace testing;  // NOLINT: the types of the GGUF writer

std::string error_of(const std::string& bytes) {
  return error_text([&] {
    check_gguf({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
               "f");
  });
}

std::string error_of(const GgufWriter& writer) {
  return error_of(writer.bytes());
}

// A file with one metadata entry of these bytes behind its key.
std::string error_of_value(const Bytes& value) {
  GgufWriter writer;
  writer.keys.push_back(Bytes().text("k").raw(value.str()).str());
  return error_of(writer);
}

constexpr const char* kRest =
    "; the file is truncated, damaged or hostile, fetch it again.";

TEST(HostileGguf, NoGgufFileAtAll) {
  EXPECT_EQ(error_of(std::string("abc")),
            std::string("[check_gguf] f: the magic needs 4 bytes but 3 are "
                        "left") +
                kRest);
  EXPECT_EQ(error_of(std::string("PK\x03\x04...")),
            "[check_gguf] f must begin with GGUF but has \"PK??\"; this is no "
            "GGUF file.");
  GgufWriter writer;
  for (const uint32_t version : {0U, 1U, 4U, 0x03000000U}) {
    writer.version = version;
    EXPECT_THAT(error_of(writer),
                HasSubstr("the version must be 2 to 3 but is " +
                          std::to_string(version)));
  }
}

TEST(HostileGguf, TruncatedAtAnyByte) {
  const std::string whole = tiny_llama_gguf(tiny_llama_tensors()).bytes();
  ASSERT_EQ(error_of(whole), "no error");
  for (size_t size = 0; size < whole.size() - 128; size += size < 4096 ? 1 : 61)
    EXPECT_NE(error_of(whole.substr(0, size)), "no error") << size;
}

TEST(HostileGguf, TextLongerThanTheFile) {  // K82
  for (const uint64_t length :
       {uint64_t{1} << 60, uint64_t{1} << 31, UINT64_MAX, uint64_t{4}}) {
    EXPECT_EQ(
        error_of_value(Bytes().add<uint32_t>(kText).add(length).raw("abc")),
        "[check_gguf] f: key \"k\" has a text of " + std::to_string(length) +
            " bytes but 3 are left" + kRest);
  }
  GgufWriter writer;
  writer.keys.push_back(Bytes().add<uint64_t>(uint64_t{1} << 60).str());
  EXPECT_THAT(error_of(writer),
              HasSubstr("key 0 has a text of 1152921504606846976 bytes"));
}

TEST(HostileGguf, ArrayLongerThanTheFile) {  // K82
  const auto array = [](uint32_t type, uint64_t count) {
    return error_of_value(
        Bytes().add<uint32_t>(kArray).add(type).add(count).raw("12345678"));
  };
  EXPECT_THAT(array(kText, uint64_t{1} << 40),
              HasSubstr("key \"k\" has 1099511627776 texts but 8 bytes"));
  EXPECT_THAT(array(kU64, UINT64_MAX / 8 + 2),
              HasSubstr("has 2305843009213693953 elements of 8 bytes but 8"));
  EXPECT_THAT(array(kU8, 9), HasSubstr("has 9 elements of 1 bytes but 8"));
  EXPECT_EQ(array(kU8, 8), "no error");
  EXPECT_THAT(array(kArray, 1), HasSubstr("its elements are of type 9"));
  EXPECT_THAT(array(13, 1), HasSubstr("its elements are of type 13"));
  EXPECT_THAT(array(UINT32_MAX, 1), HasSubstr("are of type 4294967295"));
}

TEST(HostileGguf, CountsBeyondTheFile) {  // K82
  GgufWriter writer;
  for (const uint64_t count : {uint64_t{1} << 62, UINT64_MAX, uint64_t{4097}}) {
    writer.key_count = count;
    EXPECT_EQ(
        error_of(writer),
        "[check_gguf] f: the number of keys must not exceed 4096 but is " +
            std::to_string(count) + kRest);
  }
  writer.key_count = 3;
  EXPECT_THAT(error_of(writer), HasSubstr("key 0 needs 8 bytes but 0"));
  writer.key_count.reset();
  writer.tensor_count = uint64_t{1} << 62;
  EXPECT_THAT(error_of(writer),
              HasSubstr("the number of tensors must not exceed 16384"));
}

TEST(HostileGguf, KeysThatTheParserWouldTripOver) {
  EXPECT_THAT(error_of(GgufWriter().u32("", 1)),
              HasSubstr("key 0 has an empty name"));
  EXPECT_THAT(error_of(GgufWriter().u32("a", 1).u32("a", 2)),
              HasSubstr("key \"a\" stands twice"));
  EXPECT_THAT(error_of(GgufWriter().u32(std::string_view("a\0b", 3), 1)),
              HasSubstr("key 0 has a text with a zero byte"));
  EXPECT_THAT(error_of(GgufWriter().text("a", std::string_view("x\0", 2))),
              HasSubstr("key \"a\" has a text with a zero byte"));
  EXPECT_THAT(error_of_value(Bytes().add<uint32_t>(13).raw("....")),
              HasSubstr("key \"k\" must be of type 0 to 12 but is 13"));
  EXPECT_THAT(error_of_value(Bytes().add<uint32_t>(kU64).raw("1234567")),
              HasSubstr("key \"k\" needs 8 bytes but 7 are left"));
}

TEST(HostileGguf, Alignment) {  // K85
  const auto with = [](uint32_t alignment) {
    GgufWriter writer;
    writer.u32("general.alignment", alignment).floats("t", {1}, {1});
    return error_of(writer);
  };
  for (const uint32_t alignment : {0U, 1U, 3U, 4U, 48U, UINT32_MAX}) {
    EXPECT_EQ(with(alignment),
              "[check_gguf] f: key \"general.alignment\" must be a power of "
              "two from 8 but is " +
                  std::to_string(alignment) + kRest);
  }
  EXPECT_THAT(with(uint32_t{1} << 31),
              HasSubstr("the tensors need 4 bytes from byte 2147483648 on"));
  // Without the key the format's default of 32 counts.
  EXPECT_EQ(error_of(GgufWriter().floats("t", {1}, {1})), "no error");
  EXPECT_THAT(
      error_of(GgufWriter().value<int32_t>("general.alignment", kI32, 32)),
      HasSubstr("key \"general.alignment\" must be a u32 but is i32"));  // K84
}

TEST(HostileGguf, TensorsOfImpossibleShape) {
  const auto shaped = [](std::vector<int64_t> sizes, uint32_t type = 0) {
    return error_of(GgufWriter().tensor("t", std::move(sizes), "1234", type));
  };
  EXPECT_THAT(shaped({}), HasSubstr("must have 1 to 4 dimensions but has 0"));
  EXPECT_THAT(shaped({1, 1, 1, 1, 1}),
              HasSubstr("must have 1 to 4 dimensions but has 5"));
  EXPECT_THAT(shaped({1, 0}), HasSubstr("has the size 0 in dimension 1"));
  EXPECT_THAT(shaped({-1}), HasSubstr("has the size -1 in dimension 0"));
  EXPECT_THAT(shaped({int64_t{1} << 32, int64_t{1} << 32}),
              HasSubstr("\"t\" has more values than fit in 64 bits"));
  EXPECT_THAT(shaped({INT64_MAX}),
              HasSubstr("\"t\" has more bytes than fit in 64 bits"));
  EXPECT_THAT(shaped({int64_t{1} << 40}),
              HasSubstr("\"t\" needs 4398046511104 bytes from byte 0 of the"));
  EXPECT_THAT(shaped({31}, 2),
              HasSubstr("rows of 31 values, no multiple of the 32 of a block "
                        "of q4_0"));
  for (const uint32_t type : {4U, 31U, 43U, 1000U, UINT32_MAX}) {
    EXPECT_THAT(shaped({32}, type),
                HasSubstr("\"t\" has the type " + std::to_string(type) +
                          ", which is unknown"));
  }
}

TEST(HostileGguf, TensorsOutOfPlace) {
  GgufWriter writer;
  writer.floats("a", {8}, std::vector<float>(8)).floats("b", {1}, {1});
  ASSERT_EQ(error_of(writer), "no error");
  for (const uint64_t offset : {uint64_t{0}, uint64_t{4}, uint64_t{64},
                                UINT64_MAX, uint64_t{1} << 63}) {
    writer.tensors[1].offset = offset;
    EXPECT_EQ(error_of(writer),
              "[check_gguf] f: tensor \"b\" begins at byte " +
                  std::to_string(offset) +
                  " of the data but the tensors before it end at 32" + kRest);
  }
  writer.tensors[1].offset.reset();
  writer.tensors[1].name = "a";
  EXPECT_THAT(error_of(writer), HasSubstr("tensor \"a\" stands twice"));
  writer.tensors[1].name = std::string(64, 'x');
  EXPECT_THAT(error_of(writer),
              HasSubstr("must have a name of 1 to 63 bytes but has 64"));
  writer.tensors[1].name = "";
  EXPECT_THAT(error_of(writer), HasSubstr("1 to 63 bytes but has 0"));
}

TEST(HostileGguf, DataThatTheFileLacks) {
  GgufWriter writer;
  writer.floats("a", {8}, std::vector<float>(8));
  const std::string whole = writer.bytes();
  EXPECT_THAT(error_of(whole.substr(0, whole.size() - 1)),
              HasSubstr("the tensors need 32 bytes from byte"));
}

// Metadata of a model that contradicts itself.
class HostileModel : public ::testing::Test {
 protected:
  HostileModel() : writer_(tiny_llama_gguf(tiny_llama_tensors())) {}
  std::string error() {
    const auto path = folder_.write("f.gguf", writer_.bytes());
    return error_text([&] { config_from_gguf(GgufFile(path)); });
  }
  std::string error_with(const std::string& key, uint32_t value) {
    GgufWriter saved = writer_;
    writer_.without(key).u32(key, value);
    std::string text = error();
    writer_ = std::move(saved);
    return text;
  }
  TempFolder folder_;
  GgufWriter writer_;
};

TEST_F(HostileModel, SizesOfZeroOrTooMuch) {  // K85
  ASSERT_EQ(error(), "no error");
  for (const char* key :
       {"llama.attention.head_count", "llama.attention.head_count_kv",
        "llama.block_count", "llama.embedding_length", "llama.context_length",
        "llama.feed_forward_length", "llama.attention.key_length",
        "llama.rope.dimension_count"}) {
    EXPECT_NE(error_with(key, 0), "no error") << key;
    if (std::string_view(key) == "llama.context_length") continue;
    EXPECT_NE(error_with(key, UINT32_MAX), "no error") << key;
  }
  EXPECT_THAT(error_with("llama.attention.head_count", 0),
              HasSubstr("attention.head_count and attention.head_count_kv must "
                        "be above 0 but are 0 and 2"));
  EXPECT_THAT(error_with("llama.attention.head_count_kv", 3),
              HasSubstr("num_attention_heads 4 must be a multiple of "
                        "num_key_value_heads 3"));
  EXPECT_THAT(error_with("llama.rope.dimension_count", 7),
              HasSubstr("rotary_dim (rope.dimension_count) must be even and 2 "
                        "to head_dim 8 but is 7"));
  EXPECT_THAT(error_with("llama.vocab_size", 63),
              HasSubstr("vocab_size 63 must equal the 64 rows of "
                        "token_embd.weight"));
  EXPECT_THAT(error_with("llama.attention.value_length", 16),
              HasSubstr("value_length 16 must equal attention.key_length 8"));
}

TEST_F(HostileModel, EndTokens) {  // K84
  const char* key = "tokenizer.ggml.eos_token_id";
  EXPECT_THAT(error_with(key, 64),
              HasSubstr("key \"tokenizer.ggml.eos_token_id\" must be 0 to 63 "
                        "but is 64"));
  writer_.without(key).value<int32_t>(key, kI32, -1);
  EXPECT_THAT(error(), HasSubstr("must be 0 to 63 but is -1"));
  writer_.without(key).text(key, "5");
  EXPECT_THAT(error(),
              HasSubstr("key \"tokenizer.ggml.eos_token_id\" must be a whole "
                        "number but is str"));
}

TEST_F(HostileModel, WhatIsNotSupportedIsNamed) {
  EXPECT_THAT(error_with("llama.expert_count", 8),
              HasSubstr("key \"llama.expert_count\" with \"8\" is not "
                        "supported"));
  EXPECT_THAT(error_with("split.count", 2),
              HasSubstr("is one part of a split model"));
  GgufWriter saved = writer_;
  writer_.text("llama.rope.scaling.type", "yarn");
  EXPECT_THAT(error(), HasSubstr("key \"llama.rope.scaling.type\" with "
                                 "\"yarn\" is not supported"));
  writer_ = saved;
  writer_.without("general.architecture").text("general.architecture", "bert");
  EXPECT_THAT(error(), HasSubstr("general.architecture \"bert\" is not "
                                 "supported; supported are gpt2, llama"));
  writer_ = saved;
  writer_.without("llama.attention.head_count_kv")
      .array<int32_t>("llama.attention.head_count_kv", kI32, {2, 4});
  EXPECT_THAT(error(), HasSubstr("\"different values per layer\""));
  writer_ = saved;
  writer_.without("llama.attention.head_count_kv")
      .array<int32_t>("llama.attention.head_count_kv", kI32, {2, 2});
  EXPECT_EQ(error(), "no error");
}

TEST_F(HostileModel, MissingKeysAndTypesAreNamed) {
  GgufWriter saved = writer_;
  for (const char* key : {"general.architecture", "llama.attention.head_count",
                          "llama.block_count", "llama.embedding_length",
                          "llama.context_length", "llama.feed_forward_length",
                          "llama.attention.layer_norm_rms_epsilon"}) {
    writer_.without(key);
    EXPECT_THAT(error(),
                HasSubstr("key \"" + std::string(key) + "\" is missing"));
    writer_.text(key, "bert");
    EXPECT_NE(error(), "no error") << key;
    writer_ = saved;
  }
}

}  // namespace
}  // namespace kvcache::model
