// mapped_file_test.cpp - mapping files, and refusing what is no file.

#include "kvcache/model/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>

#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

using testing::error_text;
using ::testing::HasSubstr;
using testing::TempFolder;

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()),
          file.bytes().size()};
}

TEST(MappedFile, ShowsTheBytesAlsoAfterItsPagesWereReleased) {
  const TempFolder folder;
  const MappedFile file(folder.write("a", "some bytes"));
  EXPECT_EQ(text_of(file), "some bytes");
  file.advise(MappedFile::Access::kRandom);
  file.release_pages();
  EXPECT_EQ(text_of(file), "some bytes");
  EXPECT_EQ(file.path(), folder.path() / "a");
}

TEST(MappedFile, OutlivesTheNameOfItsFile) {
  const TempFolder folder;
  const MappedFile file(folder.write("a", "some bytes"));
  std::filesystem::remove(file.path());
  EXPECT_EQ(text_of(file), "some bytes");
}

TEST(MappedFile, RefusesWhatIsNoFileWithContent) {
  const TempFolder folder;
  const std::string at = folder.path().string();
  EXPECT_EQ(error_text([&] { MappedFile file(at + "/no"); }),
            "[MappedFile] " + at +
                "/no must be readable but got: No such file or directory; "
                "check the path.");
  EXPECT_EQ(error_text([&] { MappedFile file(folder.path()); }),
            "[MappedFile] " + at +
                " must be a file but is a folder; name the file in it.");
  folder.write("empty", "");
  EXPECT_EQ(error_text([&] { MappedFile file(at + "/empty"); }),
            "[MappedFile] " + at +
                "/empty is empty (0 bytes); fetch the file again.");
  ASSERT_EQ(::mkfifo((at + "/pipe").c_str(), S_IRUSR | S_IWUSR), 0);
  EXPECT_THAT(error_text([&] { MappedFile file(at + "/pipe"); }),
              HasSubstr("/pipe must be a regular file but is a pipe"));
}

}  // namespace
}  // namespace kvcache::model
