// prefix_cache.h: an answer with what earlier requests left is the answer
// without, for every kind, model and trace; and it is said what was reused.
#include "kvcache/model/prefix_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <random>

#include "kvcache/model/batcher.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/safetensors.h"
#include "tests/model/generate/toy_language_model.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;
using kvcache::testing::TempFolder;
using Tokens = std::vector<int64_t>;

struct Case {
  toy::Variant variant = toy::Variant::kHybrid;
  bool exact = true;
};

std::shared_ptr<ToyLanguageModel> model_of(const Case& of) {
  return std::make_shared<ToyLanguageModel>(of.variant, 96, of.exact);
}

std::shared_ptr<CheckpointStore> store_of(size_t bytes = 1 << 24) {
  return std::make_shared<CheckpointStore>(
      StoreOptions{.max_bytes = bytes, .min_prefix = 2});
}

PrefixOptions small_chunks() {
  PrefixOptions options{.block = 4, .chunk = 4};
  options.placement.stride = 4;
  return options;
}

Tokens some(size_t count, int seed) {
  Tokens tokens;
  for (const int id : toy::some_ids(count, seed)) {
    tokens.push_back(id % (toy::kVocabulary - 1));
  }
  return tokens;
}

// The same, and no other number shares its first token.
Tokens text_of(int64_t number, size_t count) {
  Tokens tokens = some(count, 3);
  tokens[0] = number;
  return tokens;
}

GenerateOptions greedy(std::shared_ptr<PrefixCache> prefix = {},
                       int64_t count = 5) {
  GenerateOptions options{.max_new_tokens = count, .chunk = 4, .log_probs = 2};
  options.prefix = std::move(prefix);
  return options;
}

GenerateResult answer(const LanguageModel& model, const Tokens& prompt,
                      const GenerateOptions& options,
                      CacheKind kind = CacheKind::kPreallocated) {
  const auto cache = make_cache(kind, model);
  return generate(model, cache.get(), prompt, options);
}

// Bit for bit.
void expect_same(const GenerateResult& got, const GenerateResult& cold) {
  EXPECT_EQ(got.tokens, cold.tokens);
  EXPECT_EQ(got.log_probs, cold.log_probs);
  EXPECT_EQ(got.cache_length, cold.cache_length);
}

// Prompts as requests come: beginnings that are shared, edits in the middle,
// tails that grow, repeats, short ones.
std::vector<Tokens> trace(unsigned seed, int count) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t most) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
  };
  std::vector<Tokens> prompts = {some(20, 1), some(9, 2)};
  while (static_cast<int>(prompts.size()) < count) {
    Tokens next = prompts[static_cast<size_t>(
        below(static_cast<int64_t>(prompts.size())))];
    switch (below(5)) {
      case 0:  // the same again
        break;
      case 1: {  // grows
        const Tokens tail = some(1 + below(8), static_cast<int>(below(9)));
        next.insert(next.end(), tail.begin(), tail.end());
        break;
      }
      case 2: {  // edited
        const auto at =
            static_cast<size_t>(below(static_cast<int64_t>(next.size())));
        next[at] = (next[at] + 1) % (toy::kVocabulary - 1);
        break;
      }
      case 3:  // cut
        next.resize(
            1 + static_cast<size_t>(below(static_cast<int64_t>(next.size()))));
        break;
      default:
        next = some(1 + below(30), static_cast<int>(below(20)));
    }
    if (next.size() > 40) next.resize(40);
    prompts.push_back(std::move(next));
  }
  return prompts;
}

class PrefixCacheTest : public ::testing::TestWithParam<Case> {
 protected:
  std::shared_ptr<ToyLanguageModel> model = model_of(GetParam());
};

// One after the other over every kind, with room for all and for little.
TEST_P(PrefixCacheTest, AWarmAnswerIsTheColdOne) {
  for (const size_t bytes : {size_t{1} << 24, size_t{9000}}) {
    const auto store = store_of(bytes);
    const auto prefix =
        std::make_shared<PrefixCache>(model, store, small_chunks());
    EXPECT_EQ(prefix->any_token(), GetParam().exact);
    const CacheKind kinds[] = {CacheKind::kPreallocated, CacheKind::kConcat,
                               CacheKind::kWindow, CacheKind::kState};
    int i = 0;
    for (const Tokens& prompt : trace(7, 60)) {
      const CacheKind kind = kinds[i++ % 4];
      const GenerateResult cold = answer(*model, prompt, greedy(), kind);
      const GenerateResult got = answer(*model, prompt, greedy(prefix), kind);
      expect_same(got, cold);
      ASSERT_NE(got.reuse, nullptr);
      const LookupReport& report = got.reuse->report;
      const auto size = static_cast<int64_t>(prompt.size());
      EXPECT_EQ(report.restored + report.computed, size);
      EXPECT_EQ(got.reused, report.restored);
      EXPECT_EQ(got.timings.prefill_tokens, size - report.restored);
      if (!GetParam().exact) {
        EXPECT_TRUE(report.restored % 4 == 0 || got.reuse->whole_prompt);
      }
      EXPECT_LE(store->stats().used_bytes, bytes);
      EXPECT_EQ(store->validate(), std::vector<std::string>{});
    }
    const StoreStats stats = store->stats();
    EXPECT_GT(stats.tokens_reused, bytes > 100000 ? 200 : 0);
    if (bytes < 100000) {
      EXPECT_GT(stats.evicted, 0);
    }
  }
}

// Many at the same time: whatever another row leaves meanwhile.
TEST_P(PrefixCacheTest, AWarmBatchIsTheColdOne) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(), small_chunks());
  Batcher batcher(model,
                  make_cache(CacheKind::kPreallocated, *model, {.rows = 3}));
  const std::vector<Tokens> prompts = trace(11, 50);
  for (const Tokens& prompt : prompts) {
    batcher.submit({.tokens = prompt, .options = greedy(prefix)});
  }
  batcher.run();
  int64_t reused = 0;
  for (const BatchResult& got : batcher.take_finished()) {
    ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
    expect_same(got.result, answer(*model, prompts[got.id - 1], greedy()));
    reused += got.result.reused;
  }
  EXPECT_GT(reused, 100);
}

// A request goes to the free row that holds most of its text, and on from it
// in place: two conversations whose turns come in turns, over a store with no
// room for either.
TEST_P(PrefixCacheTest, ARequestGoesOnInTheRowThatHoldsItsText) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(1000), small_chunks());
  Batcher batcher(model,
                  make_cache(CacheKind::kPreallocated, *model, {.rows = 3}));
  std::vector<Tokens> texts = {text_of(1, 12), text_of(2, 13)};
  for (int turn = 0; turn < 4; ++turn) {
    for (Tokens& text : texts) {
      batcher.submit({.tokens = text, .options = greedy(prefix)});
      batcher.run();
      const BatchResult got = batcher.take_finished().at(0);
      expect_same(got.result, answer(*model, text, greedy()));
      const Reuse& reuse = *got.result.reuse;
      EXPECT_EQ(reuse.in_row, turn > 0);
      EXPECT_EQ(got.result.reused, reuse.report.restored);
      if (turn > 0 && GetParam().exact) {
        EXPECT_EQ(got.result.timings.prefill_tokens, 3);  // 2 new, 1 not fed
        EXPECT_EQ(reuse.report.reason, ReuseReason::kTokensDiverge);
      }
      text.insert(text.end(), got.result.tokens.begin(),
                  got.result.tokens.end());
      const Tokens more = some(2, 30 + turn);
      text.insert(text.end(), more.begin(), more.end());
    }
  }
}

// What a row held is dropped for a request of another name, and for one that
// keeps nothing; the row that was kept first goes first.
TEST_P(PrefixCacheTest, RowsAreKeptForTheirOwnNameAndTheOldestGoesFirst) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(1000), small_chunks());
  Batcher batcher(model,
                  make_cache(CacheKind::kPreallocated, *model, {.rows = 2}));
  const auto run = [&](const Tokens& prompt, const GenerateOptions& options) {
    batcher.submit({.tokens = prompt, .options = options});
    batcher.run();
    const BatchResult got = batcher.take_finished().at(0);
    expect_same(got.result, answer(*model, prompt, greedy()));
    return got.result.reused;
  };
  const auto named = [&](const char* name) {
    GenerateOptions options = greedy(prefix);
    options.space = {.tenant = name};
    return options;
  };
  constexpr int64_t kKept = 9;  // the last restore point before the end
  const Tokens first = text_of(1, 13), second = text_of(2, 13),
               third = text_of(3, 13);
  EXPECT_EQ(run(first, named("a")), 0);
  EXPECT_EQ(run(first, named("b")), 0);  // the other row
  EXPECT_GE(run(first, named("a")), kKept);
  EXPECT_EQ(run(second, named("a")), 0);  // in b's row, which is older now
  EXPECT_EQ(run(first, named("b")), 0);   // in the row of a's first
  EXPECT_GE(run(second, named("a")), kKept);
  EXPECT_EQ(run(third, greedy()), 0);  // of b's: keeps nothing
  EXPECT_GE(run(second, named("a")), kKept);
  EXPECT_EQ(run(first, named("b")), 0);
}

// What lies in a row and in the store is kept once.
TEST_P(PrefixCacheTest, ATextThatStayedInItsRowSharesTheStoresBlocks) {
  if (!GetParam().exact) return;
  const auto bytes = [&](int64_t rows) {
    const auto store = store_of();
    const auto prefix =
        std::make_shared<PrefixCache>(model, store, small_chunks());
    Batcher batcher(
        model, make_cache(CacheKind::kPreallocated, *model, {.rows = rows}));
    Tokens text = text_of(1, 20);
    for (int turn = 0; turn < 4; ++turn) {
      batcher.submit({.tokens = text, .options = greedy(prefix)});
      batcher.run();
      const BatchResult got = batcher.take_finished().at(0);
      text.insert(text.end(), got.result.tokens.begin(),
                  got.result.tokens.end());
      // In between another text: with one row nothing stays in place.
      batcher.submit({.tokens = text_of(2, 9), .options = greedy(prefix)});
      batcher.run();
      batcher.take_finished();
    }
    EXPECT_EQ(store->validate(), std::vector<std::string>{});
    return store->stats().used_bytes;
  };
  EXPECT_EQ(bytes(2), bytes(1));
}

// K40: a prompt that comes again computes nothing, and its text goes on as the
// first time; three times alike.
TEST_P(PrefixCacheTest, K40TheSamePromptAgainNeedsNoForward) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(), small_chunks());
  const Tokens prompt = some(GetParam().exact ? 11 : 12, 3);
  const GenerateResult first = answer(*model, prompt, greedy(prefix));
  EXPECT_EQ(first.reuse->report.restored, 0);
  for (int i = 0; i < 2; ++i) {
    const GenerateResult again = answer(*model, prompt, greedy(prefix));
    expect_same(again, first);
    EXPECT_TRUE(again.reuse->whole_prompt);
    EXPECT_EQ(again.timings.prefill_tokens, 0);
  }
}

// K50: a conversation computes what is new and no more, where the model is
// row-exact: its answers are in the store as they were decoded.
TEST_P(PrefixCacheTest, K50AConversationNeverComputesItsPast) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(), small_chunks());
  Tokens text = some(9, 4);
  for (int turn = 0; turn < 5; ++turn) {
    const GenerateResult got = answer(*model, text, greedy(prefix));
    expect_same(got, answer(*model, text, greedy()));
    if (turn > 0 && GetParam().exact) {
      EXPECT_EQ(got.timings.prefill_tokens, 4);  // 3 new, 1 not yet fed
      EXPECT_EQ(got.reuse->report.decoded, 4 * turn);
    }
    text.insert(text.end(), got.tokens.begin(), got.tokens.end());
    const Tokens more = some(3, 30 + turn);
    text.insert(text.end(), more.begin(), more.end());
  }
}

// Nothing of one name is seen under another.
TEST_P(PrefixCacheTest, NamesShareNothing) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(), small_chunks());
  GenerateOptions options = greedy(prefix);
  options.space = {.tenant = "a"};
  answer(*model, some(12, 1), options);
  EXPECT_GT(answer(*model, some(12, 1), options).reused, 0);
  options.space = {.tenant = "b"};
  const GenerateResult other = answer(*model, some(12, 1), options);
  EXPECT_EQ(other.reused, 0);
  EXPECT_EQ(other.reuse->report.matched, 0);
}

// What was saved is there in the next process, with nothing to compute again.
TEST_P(PrefixCacheTest, AFolderOutlivesTheProcess) {
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
TEST_P(PrefixCacheTest, ADamagedFileIsPassedOver) {
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

INSTANTIATE_TEST_SUITE_P(Models, PrefixCacheTest,
                         ::testing::Values(Case{toy::Variant::kHybrid, true},
                                           Case{toy::Variant::kHybrid, false},
                                           Case{toy::Variant::kAttention, true},
                                           Case{toy::Variant::kAttention,
                                                false},
                                           Case{toy::Variant::kMixed, true}),
                         [](const auto& info) {
                           return toy::name_of(info.param.variant) +
                                  (info.param.exact ? "Exact" : "InChunks");
                         });

}  // namespace
}  // namespace kvcache::model
