// prefix_cache.h: texts that outlive the process, in a folder of files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>

#include "kvcache/model/safetensors.h"
#include "tests/model/generate/prefix_fixture.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;
using kvcache::testing::TempFolder;

using PrefixFolderTest = PrefixCacheTest;

// What was saved is there in the next process, with nothing to compute again.
TEST_P(PrefixFolderTest, AFolderOutlivesTheProcess) {
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder = {.path = folder.path() / "kept",
                    .identity = {{"model", "toy"}}};
  const Tokens prompt = some(12, 5);
  GenerateResult first;
  {
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    first = answer(*model, prompt, greedy(prefix));
    EXPECT_EQ(prefix->save(), 1);
    EXPECT_EQ(prefix->save(), 0);
  }
  {  // the same prompt: its logits were saved too
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    const GenerateResult again = answer(*model, prompt, greedy(prefix));
    expect_same(again, first);
    EXPECT_TRUE(again.reuse->whole_prompt);
  }
  Tokens longer = prompt;
  longer.insert(longer.end(), first.tokens.begin(), first.tokens.end());
  longer.push_back(1);
  {
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    const GenerateResult got = answer(*model, longer, greedy(prefix));
    expect_same(got, answer(*model, longer, greedy()));
    EXPECT_TRUE(got.reuse->from_folder);
    EXPECT_EQ(got.timings.prefill_tokens, GetParam().exact ? 2 : 6);
    EXPECT_EQ(prefix->save(), 1);
    // The text that went on stands for its beginning.
    EXPECT_EQ(std::distance(fs::directory_iterator(options.folder.path), {}),
              1);
  }
  options.folder.identity["model"] = "another";
  std::string said;
  options.folder.log = [&](LogLevel, std::string_view line) { said += line; };
  const auto prefix = std::make_shared<PrefixCache>(model, store_of(), options);
  EXPECT_EQ(answer(*model, longer, greedy(prefix)).reused, 0);
  EXPECT_THAT(said, ::testing::HasSubstr("model must be \"another\""));
}

// A file that was damaged on disk is named, and costs the time alone.
TEST_P(PrefixFolderTest, ADamagedFileIsPassedOver) {
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder.path = folder.path();
  const Tokens prompt = some(12, 5);
  {
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    answer(*model, prompt, greedy(prefix));
    prefix->save();
  }
  const fs::path file = fs::directory_iterator(folder.path())->path();
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    for (auto at = fs::file_size(file) / 2; at < fs::file_size(file);
         at += 64) {
      bytes.seekp(static_cast<std::streamoff>(at));
      bytes.put('\x55');
    }
  }
  std::string said;
  options.folder.log = [&](LogLevel, std::string_view line) { said += line; };
  const auto prefix = std::make_shared<PrefixCache>(model, store_of(), options);
  const GenerateResult got = answer(*model, prompt, greedy(prefix));
  expect_same(got, answer(*model, prompt, greedy()));
  EXPECT_EQ(got.reused, 0);
  EXPECT_THAT(said, ::testing::HasSubstr("is not what was written"));
}

// The folder stays below its bound; the least recently used go first.
TEST(PrefixFolders, AreBounded) {
  const auto model = model_of({});
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder = {.path = folder.path(), .max_bytes = 20000};
  const auto prefix = std::make_shared<PrefixCache>(model, store_of(), options);
  for (int i = 0; i < 8; ++i) {
    Tokens prompt = some(12, 0);
    prompt[1] = i % (toy::kVocabulary - 1);  // texts of their own
    prompt[2] = i / (toy::kVocabulary - 1);
    answer(*model, prompt, greedy(prefix));
    EXPECT_EQ(prefix->save(), 1);
    size_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      bytes += entry.file_size();
    }
    EXPECT_LE(bytes, 20000U);
    EXPECT_GT(bytes, 0U);
  }
}

size_t bytes_in(const fs::path& folder) {
  size_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    bytes += entry.file_size();
  }
  return bytes;
}

// Logits and the header of a file count: whatever the bound, it holds.
TEST(PrefixFolders, AreBoundedByTheBytesOfFiles) {
  const auto model = model_of({toy::Variant::kAttention});
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder.path = folder.path() / "all";
  const Tokens prompt = some(12, 1);
  const auto keep = [&] {
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    answer(*model, prompt, greedy(prefix));
    return prefix->save();
  };
  EXPECT_EQ(keep(), 1);
  const size_t whole = bytes_in(options.folder.path);
  bool kept = false;
  for (size_t bound = whole / 8; bound <= 8 * whole; bound += whole / 8) {
    options.folder.path = folder.path() / std::to_string(bound);
    options.folder.max_bytes = bound;
    const int64_t files = keep();
    EXPECT_LE(bytes_in(options.folder.path), bound);
    EXPECT_EQ(files,
              std::distance(fs::directory_iterator(options.folder.path), {}));
    kept = kept || files == 1;
  }
  EXPECT_TRUE(kept);
}

// A folder that is removed comes back; what a killed process left goes.
TEST(PrefixFolders, AreMadeAgainAndSwept) {
  const auto model = model_of({});
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder.path = folder.path() / "kept";
  const auto prefix = std::make_shared<PrefixCache>(model, store_of(), options);
  fs::remove_all(options.folder.path);
  answer(*model, some(12, 1), greedy(prefix));
  EXPECT_EQ(prefix->save(), 1);
  const fs::path old = options.folder.path / "a.kvtext.safetensors.tmp-1-0";
  const fs::path young = options.folder.path / "a.kvtext.safetensors.tmp-1-1";
  std::ofstream(old) << "half";
  std::ofstream(young) << "half";
  fs::last_write_time(old,
                      fs::file_time_type::clock::now() - std::chrono::hours(2));
  Tokens other = some(12, 1);
  other[0] = (other[0] + 1) % (toy::kVocabulary - 1);
  answer(*model, other, greedy(prefix));
  EXPECT_EQ(prefix->save(), 1);
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(young));
}

// A damaged file does not hide the next best.
TEST(PrefixFolders, TheNextBestIsTaken) {
  const auto model = model_of({toy::Variant::kAttention});
  const TempFolder folder;
  PrefixOptions options = small_chunks();
  options.folder.path = folder.path();
  const Tokens prompt = some(12, 1);
  Tokens part(prompt.begin(), prompt.begin() + 8);
  part.push_back(prompt[8] == 1 ? 2 : 1);
  fs::path deepest;
  {
    const auto prefix =
        std::make_shared<PrefixCache>(model, store_of(), options);
    answer(*model, prompt, greedy(prefix));
    prefix->save();
    deepest = fs::directory_iterator(folder.path())->path();
    answer(*model, part, greedy(prefix));
    EXPECT_EQ(prefix->save(), 1);
  }
  size_t damaged = fs::file_size(deepest);  // a byte of the first K and V
  {
    const SafetensorsFile file(deepest);
    damaged -= file.entries().back().end - file.find("part0.block0")->begin;
  }
  std::fstream(deepest, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(damaged) + 2)
      .put('\x55');
  const auto prefix = std::make_shared<PrefixCache>(model, store_of(), options);
  const GenerateResult got = answer(*model, prompt, greedy(prefix));
  expect_same(got, answer(*model, prompt, greedy()));
  EXPECT_EQ(got.reused, 8);
}

TEST(PrefixFolders, AreNamedWhereTheyCannotBe) {
  const TempFolder folder;
  folder.write("file", "x");
  PrefixOptions options;
  for (const char* name : {"file", "file/below"}) {
    options.folder.path = folder.path() / name;
    EXPECT_THAT(
        kvcache::testing::error_text(
            [&] { PrefixCache(model_of({}), store_of(), options); }),
        ::testing::HasSubstr("must be a folder to keep texts in but got: "));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PrefixFolderTest, all_cases(), name_of_case);

}  // namespace
}  // namespace kvcache::model
