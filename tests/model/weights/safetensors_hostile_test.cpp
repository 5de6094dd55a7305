// safetensors_hostile_test.cpp - damaged and hostile safetensors files.
//
// Bug reports: K79 ztxz16/fastllm#713, K80 ollama/ollama#17148, K92
// sgl-project/sglang#32279, K112 huggingface/transformers#46913.

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "kvcache/model/safetensors.h"
#include "tests/support/error_text.h"
#include "tests/support/gguf_writer.h"  // Bytes
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using ::testing::AllOf;
using testing::Bytes;
using testing::error_text;
using ::testing::HasSubstr;
using testing::TempFolder;

std::string error_of_bytes(const std::string& bytes) {
  return error_text([&] {
    parse_safetensors_header(
        {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, "f");
  });
}

std::string error_of(const std::string& header, size_t data_bytes) {
  return error_of_bytes(
      Bytes().text(header).raw(std::string(data_bytes, '\0')).str());
}

std::string with_length(uint64_t length) {
  return Bytes().add(length).raw("{}      ").str();
}

// One float32 tensor [2] with these offsets.
std::string offsets(const std::string& value) {
  return R"({"t":{"dtype":"F32","shape":[2],"data_offsets":)" + value + "}}";
}

std::string entry(const std::string& name, int begin, int end) {
  return "\"" + name + R"(":{"dtype":"U8","shape":[)" +
         std::to_string(end - begin) + R"(],"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

TEST(HostileSafetensors, HeaderLengthThatDoesNotFit) {  // K79
  for (const uint64_t length :
       {UINT64_MAX, uint64_t{1} << 63, uint64_t{16}, uint64_t{17}}) {
    EXPECT_EQ(error_of_bytes(with_length(length)),
              "[safetensors] f: the header says " + std::to_string(length) +
                  " bytes but 8 follow; the file is truncated or no "
                  "safetensors file.");
  }
  EXPECT_THAT(error_of_bytes(with_length(0)),
              HasSubstr("the header of 0 bytes must be a JSON object"));
  EXPECT_THAT(error_of_bytes(""), HasSubstr("but has 0 bytes"));
  EXPECT_THAT(error_of_bytes("1234567"), HasSubstr("but has 7 bytes"));
}

TEST(HostileSafetensors, ShapeAndBytesDisagree) {  // K79
  EXPECT_EQ(
      error_of(R"({"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,1000]}})",
               1000),
      "[safetensors] f: tensor \"t\" Float [2, 2] needs 16 bytes but "
      "data_offsets give 1000; the file is damaged.");
  for (const char* shape : {"[4611686018427387904,4]", "[9223372036854775807]",
                            "[4294967296,4294967296]"}) {
    EXPECT_THAT(error_of(std::string(R"({"t":{"dtype":"F32","shape":)") +
                             shape + R"(,"data_offsets":[0,16]}})",
                         16),
                HasSubstr("whose size overflows"))
        << shape;
  }
  // A zero does not hide an overflow.
  EXPECT_THAT(error_of(R"({"t":{"dtype":"F32","shape":[0,9223372036854775807],)"
                       R"("data_offsets":[0,0]}})",
                       0),
              HasSubstr("whose size overflows"));
}

TEST(HostileSafetensors, OffsetsOfTheWrongForm) {  // K80
  EXPECT_THAT(error_of(offsets("[]"), 8),
              HasSubstr("data_offsets must be two numbers but has 0"));
  EXPECT_THAT(error_of(offsets("[0]"), 8),
              HasSubstr("data_offsets must be two numbers but has 1"));
  EXPECT_THAT(error_of(offsets("[0,8,8]"), 8),
              HasSubstr("must be two numbers but has more"));
  EXPECT_THAT(error_of(offsets("[-4,4]"), 8),
              HasSubstr("a negative number -4 stands where"));
  EXPECT_THAT(error_of(offsets(R"(["a","b"])"), 8),
              HasSubstr("text stands where"));
  EXPECT_THAT(error_of(offsets("[0.5,8]"), 8), HasSubstr("\"0.5\""));
  EXPECT_THAT(error_of(offsets("[0,8e0]"), 8), HasSubstr("\"8e0\""));
  EXPECT_THAT(error_of(offsets("8"), 8), HasSubstr("a number stands where"));
  EXPECT_THAT(error_of(offsets("[[0],8]"), 8),
              HasSubstr("an array stands where"));
  EXPECT_THAT(error_of(offsets("{}"), 8), HasSubstr("a value is an object"));
  EXPECT_THAT(error_of(offsets("null"), 8), HasSubstr("null stands where"));
  EXPECT_THAT(error_of(offsets("[0,18446744073709551615]"), 8),
              HasSubstr("has 18446744073709551615, more than"));
  EXPECT_THAT(error_of(offsets("[0,99999999999999999999999]"), 8),
              HasSubstr("the number \"99999999999999999999999\""));
}

TEST(HostileSafetensors, TextBehindAZeroByte) {
  EXPECT_EQ(error_of(offsets("[0,8]") + std::string("\0}", 2), 8),
            "[safetensors] f: the header is damaged: byte 54 is zero; fetch "
            "the file again.");
}

TEST(HostileSafetensors, OffsetsOutOfTheFile) {  // K80
  EXPECT_EQ(error_of(offsets("[8,4]"), 8),
            "[safetensors] f: tensor \"t\" must lie in bytes 0 to 8 but "
            "data_offsets are 8 to 4; the file is truncated or damaged, fetch "
            "it again.");
  EXPECT_THAT(
      error_of(offsets("[0,1000000000000]"), 8),
      HasSubstr("bytes 0 to 8 but data_offsets are 0 to 1000000000000"));
  EXPECT_THAT(error_of(offsets("[0,8]"), 4),
              HasSubstr("bytes 0 to 4 but data_offsets are 0 to 8"));
}

TEST(HostileSafetensors, HolesOverlapsAndBytesLeftOver) {  // K80
  EXPECT_EQ(error_of("{" + entry("a", 0, 4) + "," + entry("b", 6, 8) + "}", 8),
            "[safetensors] f: tensor \"b\" begins at byte 6 but the data "
            "before it ends at 4; tensors must leave no hole and not overlap.");
  EXPECT_THAT(
      error_of("{" + entry("a", 0, 4) + "," + entry("b", 3, 8) + "}", 8),
      HasSubstr("\"b\" begins at byte 3 but the data before it ends at 4"));
  EXPECT_THAT(
      error_of("{" + entry("a", 0, 4) + "," + entry("b", 0, 4) + "}", 4),
      HasSubstr("\"b\" begins at byte 0 but the data before it ends at 4"));
  EXPECT_THAT(error_of("{" + entry("a", 2, 4) + "}", 4),
              HasSubstr("\"a\" begins at byte 2"));
  EXPECT_THAT(error_of("{" + entry("a", 0, 4) + "}", 5),
              HasSubstr("tensors cover 4 bytes but the file has 5 of data"));
  EXPECT_EQ(error_of("{" + entry("b", 4, 8) + "," + entry("a", 0, 4) + "}", 8),
            "no error");
}

TEST(HostileSafetensors, HeaderThatIsNoFlatObject) {  // K80
  EXPECT_THAT(error_of("[1,2,3]", 0), HasSubstr("must be a JSON object"));
  EXPECT_THAT(error_of("   {}", 0), HasSubstr("must be a JSON object"));
  EXPECT_THAT(error_of(R"({"t":)" + std::string(10'000, '['), 0),
              HasSubstr("an array stands where"));
  EXPECT_THAT(error_of(R"({"t":)" + std::string(10'000, '{'), 0),
              HasSubstr("no valid JSON"));
  std::string nested;
  for (int i = 0; i < 10'000; ++i) nested += R"({"t":)";
  EXPECT_THAT(error_of(nested, 0), HasSubstr("\"t\" has the key \"t\""));
  EXPECT_THAT(error_of("{", 0), HasSubstr("no valid JSON at byte"));
  EXPECT_THAT(error_of("{}x", 0), HasSubstr("no valid JSON at byte"));
  EXPECT_THAT(error_of("{\"\xff\":1}", 0), HasSubstr("no valid JSON at byte"));
  EXPECT_THAT(error_of(R"({"t":5})", 0), HasSubstr("a number stands where"));
  EXPECT_THAT(error_of(R"({"t":true})", 0), HasSubstr("true or false"));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":1}})", 0),
              HasSubstr("text is expected for \"a\""));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":[]}})", 0),
              HasSubstr("an array stands where"));
}

TEST(HostileSafetensors, KeysTwiceMissingOrUnknown) {  // K80
  EXPECT_EQ(error_of("{" + entry("a", 0, 4) + "," + entry("a", 4, 8) + "}", 8),
            "[safetensors] f: the header is damaged: tensor \"a\" stands "
            "twice; fetch the file again.");
  EXPECT_THAT(error_of(R"({"__metadata__":{},"__metadata__":{}})", 0),
              HasSubstr("\"__metadata__\" stands twice"));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":"1","a":"2"}})", 0),
              HasSubstr("key \"a\" of \"__metadata__\" stands twice"));
  EXPECT_THAT(error_of(R"({"t":{"dtype":"U8","dtype":"F32","shape":[],)"
                       R"("data_offsets":[0,1]}})",
                       1),
              HasSubstr("key \"dtype\" of \"t\" stands twice"));
  EXPECT_THAT(error_of(R"({"t":{}})", 0), HasSubstr("\"t\" has no dtype"));
  EXPECT_THAT(error_of(R"({"t":{"dtype":"U8"}})", 0),
              HasSubstr("\"t\" has no shape"));
  EXPECT_THAT(error_of(R"({"t":{"dtype":"U8","shape":[1]}})", 1),
              HasSubstr("\"t\" has no data_offsets"));
  EXPECT_THAT(
      error_of(R"({"t":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}})", 1),
      HasSubstr("tensor \"t\" has the dtype \"Q4\", which is not supported"));
  EXPECT_THAT(error_of(R"({"t":{"order":"C"}})", 0),
              HasSubstr("\"t\" has the key \"order\" where dtype, shape"));
  EXPECT_THAT(error_of(R"({"t":{"order":[1]}})", 0),
              HasSubstr("\"t\" has the key \"order\" where dtype, shape"));
  EXPECT_THAT(error_of(R"({"t":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,)"
                       R"(1,1,1,1,1,1],"data_offsets":[0,1]}})",
                       1),
              HasSubstr("\"t\" has more than 16 dimensions"));
}

TEST(HostileSafetensors, MessagesStayOnOneLineOfReadableLength) {
  const std::string error =
      error_of(R"({"a\nb)" + std::string(100'000, 'x') + R"(":5})", 0);
  EXPECT_THAT(error, HasSubstr("\"a?bxxx"));
  EXPECT_EQ(error.find('\n'), std::string::npos);
  EXPECT_LT(error.size(), 400U);
}

// A model of three shards, with tensors a, b and c.
class Shards : public ::testing::Test {
 protected:
  Shards() {
    for (const char* name : {"a", "b", "c"})
      write_safetensors(shard(name), {{name, at::zeros({4}, at::kFloat)}});
    index(R"({"a":"a.safetensors","b":"b.safetensors","c":"c.safetensors"})");
  }
  std::filesystem::path shard(const std::string& name) const {
    return folder_.path() / (name + ".safetensors");
  }
  void index(const std::string& map) const {
    folder_.write("model.safetensors.index.json",
                  R"({"metadata":{"total_size":48},"weight_map":)" + map + "}");
  }
  std::string error() const {
    return error_text([&] { SafetensorsFolder{folder_.path()}; });
  }
  // The error of an index that says a is in `name` (JSON text).
  std::string error_of_name(const std::string& name) const {
    index(R"({"a":")" + name + R"("})");
    return error();
  }
  TempFolder folder_;
};

TEST_F(Shards, AreOneSetOfTensors) {
  const SafetensorsFolder files(folder_.path());
  EXPECT_THAT(files.names(), ::testing::ElementsAre("a", "b", "c"));
  EXPECT_EQ(files.view("b").numel(), 4);
  EXPECT_EQ(files.file_of("c"), std::filesystem::canonical(shard("c")));
  EXPECT_THAT(error_text([&] { files.view("d"); }),
              HasSubstr("no tensor \"d\" in 3 safetensors files"));
}

TEST_F(Shards, AMissingOneIsAnErrorWithItsName) {  // K92
  std::filesystem::remove(shard("b"));
  EXPECT_THAT(error(), AllOf(HasSubstr("the shard \"b.safetensors\""),
                             HasSubstr("No such file or directory")));
}

TEST_F(Shards, ATruncatedOneIsAnErrorWithItsName) {  // K92
  std::filesystem::resize_file(shard("b"),
                               std::filesystem::file_size(shard("b")) - 4);
  EXPECT_THAT(error(),
              AllOf(HasSubstr("b.safetensors: tensor \"b\""),
                    HasSubstr("0 to 12 but data_offsets are 0 to 16")));
}

TEST_F(Shards, ATensorThatItsShardLacksIsAnErrorWithItsName) {  // K92
  index(R"({"a":"a.safetensors","b":"a.safetensors"})");
  EXPECT_THAT(error(),
              HasSubstr("says that \"b\" is in a.safetensors but that file "
                        "lacks it"));
}

TEST_F(Shards, ATensorThatTheIndexDoesNotNameIsAnError) {
  write_safetensors(shard("a"), {{"a", at::zeros({4}, at::kFloat)},
                                 {"x", at::zeros({4}, at::kFloat)}});
  EXPECT_THAT(error(), HasSubstr("does not name \"x\""));
}

TEST_F(Shards, AStrayFileIsNotLookedAt) {  // K92
  write_safetensors(shard("stray"), {{"a", at::zeros({9}, at::kFloat)}});
  folder_.write("broken.safetensors", "garbage");
  EXPECT_EQ(SafetensorsFolder(folder_.path()).view("a").numel(), 4);
}

TEST_F(Shards, TheIndexDecidesBetweenTwoShardsWithOneTensor) {
  write_safetensors(shard("b"), {{"a", at::zeros({9}, at::kFloat)},
                                 {"b", at::zeros({4}, at::kFloat)}});
  const SafetensorsFolder files(folder_.path());
  EXPECT_EQ(files.view("a").numel(), 4);
  EXPECT_EQ(files.names().size(), 3U);
}

TEST_F(Shards, NamesThatLeaveTheFolderAreRefused) {  // K112
  // Something valid stands where each name leads: only the check refuses it.
  const TempFolder outside;
  write_safetensors(outside.path() / "x.safetensors",
                    {{"a", at::zeros({4}, at::kFloat)}});
  const std::string out = outside.path().string();
  const std::string up = "../" + outside.path().filename().string();
  std::filesystem::create_directory(folder_.path() / "sub");
  for (const std::string& name :
       {up + "/x.safetensors", out + "/x.safetensors",
        "sub/../" + up + "/x.safetensors", std::string(".."),
        std::string("sub/.."), std::string("C:/x.safetensors"),
        std::string("C:x.safetensors"), std::string("..\\\\x.safetensors"),
        std::string(), std::string("a.safetensors\\u0000.txt")}) {
    EXPECT_THAT(error_of_name(name),
                HasSubstr("weight_map must name files in its own folder"))
        << name;
  }
}

TEST_F(Shards, ALinkThatLeavesTheFolderIsRefused) {  // K112
  const TempFolder outside;
  const auto target = outside.path() / "x.safetensors";
  write_safetensors(target, {{"a", at::zeros({4}, at::kFloat)}});
  std::filesystem::create_symlink(target, shard("link"));
  EXPECT_THAT(error_of_name("link.safetensors"),
              HasSubstr("\"link.safetensors\", a link that leaves the folder"));
  std::filesystem::create_directory_symlink(outside.path(),
                                            folder_.path() / "dir");
  EXPECT_THAT(error_of_name("dir/x.safetensors"),
              HasSubstr("a link that leaves the folder"));
  // A sibling whose name merely begins like the folder's is outside too.
  const std::filesystem::path sibling = folder_.path().string() + "2";
  std::filesystem::create_directory(sibling);
  std::filesystem::copy_file(target, sibling / "x.safetensors");
  std::filesystem::create_symlink(sibling / "x.safetensors", shard("near"));
  EXPECT_THAT(error_of_name("near.safetensors"),
              HasSubstr("a link that leaves the folder"));
  std::filesystem::remove_all(sibling);
}

TEST_F(Shards, LinksThatStayInTheFolderAreFollowed) {
  std::filesystem::create_symlink("a.safetensors", shard("link"));
  EXPECT_EQ(error_of_name("link.safetensors"), "no error");
  std::filesystem::create_directory(folder_.path() / "sub");
  std::filesystem::rename(shard("a"), folder_.path() / "sub" / "a.safetensors");
  EXPECT_EQ(error_of_name("sub/a.safetensors"), "no error");
}

TEST(SafetensorsFolder, FollowsTheLinksOfTheHuggingFaceCache) {
  const TempFolder cache;
  const auto blobs = cache.path() / "blobs";
  const auto snapshot = cache.path() / "snapshots" / "main";
  std::filesystem::create_directory(blobs);
  std::filesystem::create_directories(snapshot);
  write_safetensors(blobs / "0123", {{"a", at::zeros({4}, at::kFloat)}});
  std::filesystem::create_symlink("../../blobs/0123",
                                  snapshot / "m-1.safetensors");
  std::ofstream(snapshot / "model.safetensors.index.json")
      << R"({"weight_map":{"a":"m-1.safetensors"}})";
  EXPECT_EQ(SafetensorsFolder(snapshot).view("a").numel(), 4);
}

TEST_F(Shards, ADamagedIndexIsAnError) {
  const auto error_of_text = [&](const std::string& text) {
    folder_.write("model.safetensors.index.json", text);
    return error();
  };
  EXPECT_THAT(error_of_text("{"), HasSubstr("must be JSON but got"));
  EXPECT_THAT(error_of_text("[]"), HasSubstr("must have an object weight_map"));
  EXPECT_THAT(error_of_text("{}"), HasSubstr("must have an object weight_map"));
  EXPECT_THAT(error_of_text(R"({"weight_map":{"a":5}})"),
              HasSubstr("weight_map \"a\" must be a file name"));
  EXPECT_THAT(error_of_text(R"({"weight_map":{"a":"x","a":"y"}})"),
              HasSubstr("key \"a\" stands twice in one object"));
  EXPECT_THAT(error_of_text(std::string(10'000, '[')),
              HasSubstr("nesting must not exceed 64 levels"));
}

TEST(SafetensorsFolder, SaysWhatAnEmptyFolderLacks) {
  const TempFolder folder;
  EXPECT_THAT(error_text([&] { SafetensorsFolder{folder.path()}; }),
              HasSubstr("must contain model.safetensors or "
                        "model.safetensors.index.json but has neither"));
}

}  // namespace
}  // namespace kvcache::model
