// safetensors_test.cpp - reading what was written, on the mapping or copied.

#include "kvcache/model/safetensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>

#include "tests/support/error_text.h"
#include "tests/support/gguf_writer.h"  // Bytes
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using testing::error_text;
using ::testing::HasSubstr;
using testing::TempFolder;

// A file from its JSON header and its data.
std::string file_bytes(const std::string& header, const std::string& data) {
  return testing::Bytes().text(header).raw(data).str();
}

TEST(Safetensors, ReturnsWhatWasWritten) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
        at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(c10::toString(type),
                         at::arange(6, at::kFloat).view({2, 3}).to(type));
  }
  tensors.emplace_back(
      "f8_e4m3", at::arange(5, at::kFloat).to(c10::ScalarType::Float8_e4m3fn));
  tensors.emplace_back(
      "f8_e5m2", at::arange(5, at::kFloat).to(c10::ScalarType::Float8_e5m2));
  tensors.emplace_back("scalar", at::tensor(3.5F).squeeze());
  tensors.emplace_back("none", at::zeros({0, 4}, at::kFloat));
  write_safetensors(path, tensors, {{"format", "pt"}});

  const SafetensorsFile file(path);
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = file.view(name);
    ASSERT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    ASSERT_EQ(read.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(read.to(at::kDouble).equal(tensor.to(at::kDouble))) << name;
  }
}

TEST(Safetensors, WritesStridedTensorsDense) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  const at::Tensor tensor = at::arange(12, at::kFloat).view({3, 4});
  write_safetensors(path, {{"t", tensor.t()}});
  EXPECT_TRUE(SafetensorsFile(path).view("t").equal(tensor.t()));
}

TEST(Safetensors, ViewLivesLongerThanItsFile) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  write_safetensors(path, {{"t", at::arange(4096, at::kFloat)}});
  std::optional<SafetensorsFile> file(path);
  const at::Tensor view = file->view("t");
  EXPECT_EQ(view.data_ptr(), file->view("t").data_ptr()) << "no copy is made";
  file.reset();
  std::filesystem::remove(path);
  EXPECT_EQ(view[4095].item<float>(), 4095.0F);
}

TEST(Safetensors, CopiesWhatIsNotAlignedToItsType) {
  const TempFolder folder;
  const float value = 1.5F;
  std::string data(1, '\x7');
  data.append(reinterpret_cast<const char*>(&value), sizeof value);
  const auto path = folder.write(
      "a", file_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                      R"("b":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})",
                      data));
  EXPECT_EQ(SafetensorsFile(path).view("b").item<float>(), 1.5F);
}

TEST(Safetensors, TakesAnyByteButZeroAsTrue) {
  const TempFolder folder;
  const auto path = folder.write(
      "a",
      file_bytes(R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})",
                 std::string("\x00\x01\x77", 3)));
  EXPECT_TRUE(SafetensorsFile(path).view("b").equal(
      at::tensor({0, 1, 1}).to(at::kBool)));
}

TEST(Safetensors, NamesAnUnknownTensor) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  write_safetensors(path, {});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.find("x"), nullptr);
  EXPECT_EQ(error_text([&] { file.view("x"); }),
            "[SafetensorsFile::view] " + path.string() +
                " has no tensor \"x\"; see entries().");
}

TEST(WriteSafetensors, ReplacesAFileWholeOrLeavesItAlone) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  write_safetensors(path, {{"t", at::zeros({2}, at::kFloat)}});
  write_safetensors(path, {{"t", at::zeros({3}, at::kFloat)}});
  EXPECT_EQ(SafetensorsFile(path).find("t")->shape[0], 3);
  EXPECT_THAT(error_text([&] {
                write_safetensors(path, {{"t", at::zeros({1}, at::kFloat)},
                                         {"t", at::zeros({1}, at::kFloat)}});
              }),
              HasSubstr("the name \"t\" stands twice or is reserved"));
  EXPECT_EQ(SafetensorsFile(path).find("t")->shape[0], 3);
  size_t files = 0;
  for (const auto& item : std::filesystem::directory_iterator(folder.path()))
    files += item.is_regular_file() ? 1 : 0;
  EXPECT_EQ(files, 1) << "no temporary file is left";
}

// In a container each process has the number of the one that was killed.
TEST(WriteSafetensors, PassesWhatAKilledProcessLeft) {
  const TempFolder folder;
  for (int i = 0; i < 200; ++i) {
    folder.write("a.safetensors.tmp-" + std::to_string(::getpid()) + "-" +
                     std::to_string(i),
                 "half");
  }
  const auto path = folder.path() / "a.safetensors";
  write_safetensors(path, {{"x", at::zeros({2}, at::kFloat)}});
  EXPECT_EQ(SafetensorsFile(path).find("x")->shape[0], 2);
}

TEST(WriteSafetensors, RefusesWhatTheFormatCannotHold) {
  const TempFolder folder;
  const auto path = folder.path() / "a.safetensors";
  EXPECT_THAT(
      error_text([&] {
        write_safetensors(path, {{"c", at::zeros({1}, at::kComplexFloat)}});
      }),
      HasSubstr("tensor \"c\" is ComplexFloat"));
  EXPECT_THAT(error_text([&] {
                write_safetensors(path, {{"u", {}}});
              }),
              HasSubstr("tensor \"u\" is undefined"));
  EXPECT_THAT(error_text([&] {
                write_safetensors(path, {{"\xff", at::zeros({1}, at::kFloat)}});
              }),
              HasSubstr("must be UTF-8"));
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THAT(
      error_text([&] { write_safetensors(folder.path() / "no" / "a", {}); }),
      HasSubstr("could not be created: No such file or directory"));
}

}  // namespace
}  // namespace kvcache::model
