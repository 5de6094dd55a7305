// checkpoint_file.h: what is saved comes back bit for bit, and nothing else is
// taken for it.
#include "kvcache/model/checkpoint_file.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <tuple>

#include "kvcache/model/safetensors.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;
using kvcache::testing::error_text;
using kvcache::testing::TempFolder;
using ::testing::HasSubstr;
using toy::Ids;
using toy::Variant;

const CheckpointIdentity kIdentity = {{"model", "toy"}, {"weights", "1"}};

using FileCase = std::tuple<Variant, KvFormat>;

class CheckpointFileTest : public ::testing::TestWithParam<FileCase> {
 protected:
  CheckpointFileTest() : model(toy::make_model(std::get<0>(GetParam()))) {}

  std::unique_ptr<Cache> make() const {
    CacheSpec spec = toy::spec_of(model, 1, 24);
    spec.kv_format = std::get<1>(GetParam());
    return toy::make_preallocated(std::move(spec), {});
  }
  // A text of 11 tokens with a mark at 4, in blocks of 4.
  SavedText text() const {
    const std::unique_ptr<Cache> cache = make();
    toy::feed_row(*cache, model, 0, {ids.begin(), ids.begin() + 4});
    cache->mark();
    toy::feed_row(*cache, model, 0, {ids.begin() + 4, ids.end()});
    SavedText saved{.tokens = {ids.begin(), ids.end()},
                    .parts = {cache->checkpoint(0, {.block = 4})},
                    .logits = {{11, at::randn({5})}},
                    .decoded = {{9, 11}}};
    return saved;
  }
  bool hybrid() const { return toy::has_states(model.layers); }

  toy::Model model;
  Ids ids = toy::some_ids(11);
  TempFolder folder;
  fs::path path = folder.path() / "text.safetensors";
};

std::vector<char> contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// The saved text, and any beginning of it, continues as if it had never left.
TEST_P(CheckpointFileTest, EveryBeginningContinuesBitForBit) {
  save_checkpoint(path, text(), kIdentity);
  const CheckpointFile file(path);
  EXPECT_EQ(std::vector<int64_t>(file.tokens().begin(), file.tokens().end()),
            std::vector<int64_t>(ids.begin(), ids.end()));
  EXPECT_EQ(file.restore_points(),
            hybrid() ? std::vector<int64_t>({4, 11}) : std::vector<int64_t>());
  EXPECT_EQ(file.bytes(), fs::file_size(path));
  for (int64_t length = 0; length <= 11; ++length) {
    const SavedText read = file.read(length);
    const auto kept = static_cast<int64_t>(read.tokens.size());
    EXPECT_EQ(kept, !hybrid() || length == 11 ? length : length < 4 ? 0 : 4);
    EXPECT_EQ(read.logits.size(), length == 11 ? 1U : 0U);
    const std::unique_ptr<Cache> cache = make();
    cache->restore(read.parts[0], 0);
    ASSERT_EQ(cache->lengths()[0], kept);
    const auto got = toy::feed(*cache, model, {Ids{3, 1}});
    EXPECT_EQ(
        got[0],
        toy::last_of(*cache, model,
                     toy::joined({ids.begin(), ids.begin() + kept}, {3, 1}), 2))
        << length;
  }
}

TEST_P(CheckpointFileTest, TheFormatComesBack) {
  save_checkpoint(path, text(), kIdentity);
  const SavedText read = CheckpointFile(path).read();
  EXPECT_EQ(read.parts[0].format, std::get<1>(GetParam()));
  CacheSpec spec = toy::spec_of(model, 1, 24);
  spec.kv_format = std::get<1>(GetParam()) == KvFormat::kPlain
                       ? KvFormat::kInt8
                       : KvFormat::kPlain;
  const auto other = toy::make_preallocated(std::move(spec), {});
  EXPECT_THAT(error_text([&] { other->restore(read.parts[0], 0); }),
              HasSubstr("make the cache with that CacheSpec::kv_format"));
}

TEST_P(CheckpointFileTest, LogitsAndDecodedRangesComeBack) {
  const SavedText saved = text();
  save_checkpoint(path, saved, kIdentity);
  const SavedText read = CheckpointFile(path).read();
  ASSERT_EQ(read.logits.size(), 1U);
  EXPECT_EQ(read.logits[0].first, 11);
  EXPECT_TRUE(at::equal(read.logits[0].second, saved.logits[0].second));
  EXPECT_EQ(read.decoded, saved.decoded);
}

// Any byte that is not what was written is noticed before it is used, wherever
// it is; a file cut anywhere too.
TEST_P(CheckpointFileTest, NoFlippedByteAndNoCutIsTaken) {
  save_checkpoint(path, text(), kIdentity);
  const std::vector<char> sound = contents(path);
  const fs::path damaged = folder.path() / "damaged.safetensors";
  const auto taken = [&] {
    try {
      const CheckpointFile file(damaged);
      file.check_identity(kIdentity);
      file.read();
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  };
  for (size_t i = 0; i<sound.size(); i += sound.size()> 4000 ? 7 : 1) {
    std::vector<char> bytes = sound;
    bytes[i] ^= 0x10;
    write(damaged, bytes);
    // What pads the header to its alignment means nothing.
    if (taken()) {
      EXPECT_EQ(sound[i], ' ') << i;
    }
  }
  for (size_t size = 0; size < sound.size(); size += 301) {
    write(damaged, {sound.begin(), sound.begin() + static_cast<long>(size)});
    EXPECT_FALSE(taken()) << size;
  }
}

TEST_P(CheckpointFileTest, RefusalsNameTheSectionOrTheField) {
  save_checkpoint(path, text(), kIdentity);
  EXPECT_THAT(error_text([&] {
                CheckpointFile(path).check_identity(
                    {{"model", "toy"}, {"weights", "2"}});
              }),
              HasSubstr("weights must be \"2\" but is \"1\""));
  EXPECT_THAT(error_text([&] {
                CheckpointFile(path).check_identity({{"route", "0"}});
              }),
              HasSubstr("route must be \"0\" but is missing"));
  std::vector<char> bytes = contents(path);
  bytes.back() ^= 1;  // the sections end with one of the narrowest type
  write(path, bytes);
  EXPECT_THAT(error_text([&] { CheckpointFile(path).read(); }),
              HasSubstr("is not what was written"));
  write_safetensors(path, {{"a", at::randn({2})}});
  EXPECT_THAT(error_text([&] { CheckpointFile{path}; }),
              HasSubstr("must be a saved text but has no kvcache.layout"));
}

// A text without tokens, or with a part of another length, is not written; what
// was there stays.
TEST_P(CheckpointFileTest, BadTextsAreNotWritten) {
  save_checkpoint(path, text(), kIdentity);
  const std::vector<char> sound = contents(path);
  SavedText bad = text();
  bad.tokens.pop_back();
  EXPECT_THAT(error_text([&] { save_checkpoint(path, bad, kIdentity); }),
              HasSubstr("each part must hold the 10 tokens"));
  EXPECT_THAT(error_text([&] { save_checkpoint(path, {}, kIdentity); }),
              HasSubstr("a text and its parts must be given"));
  EXPECT_EQ(contents(path), sound);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Variants, CheckpointFileTest,
    ::testing::Combine(::testing::Values(Variant::kAttention, Variant::kMixed),
                       ::testing::Values(KvFormat::kPlain, KvFormat::kInt8)),
    [](const auto& info) {
      const bool int8 = std::get<1>(info.param) == KvFormat::kInt8;
      return toy::name_of(std::get<0>(info.param)) + (int8 ? "Int8" : "");
    });

}  // namespace
}  // namespace kvcache::model
