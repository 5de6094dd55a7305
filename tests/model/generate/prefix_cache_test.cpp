// prefix_cache.h: an answer with what earlier requests left is the answer
// without, for every kind, model and trace; and it is said what was reused.
#include "kvcache/model/prefix_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "kvcache/model/batcher.h"
#include "tests/model/generate/prefix_fixture.h"

namespace kvcache::model {
namespace {

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

// Its first token comes from logits that were kept, before anything is copied;
// where that token fails, the row is what it was.
TEST_P(PrefixCacheTest, AKnownPromptGivesItsFirstTokenBeforeItIsRestored) {
  const auto prefix =
      std::make_shared<PrefixCache>(model, store_of(), small_chunks());
  const Tokens prompt = some(12, 3);
  const GenerateResult first = answer(*model, prompt, greedy(prefix));
  const auto cache = make_cache(CacheKind::kState, *model, {.capacity = 64});
  std::vector<int64_t> lengths;
  GenerateHooks hooks;
  hooks.on_token = [&](const GeneratedToken&) {
    lengths.push_back(cache->lengths()[0]);
  };
  const GenerateResult again =
      generate(*model, cache.get(), prompt, greedy(prefix), hooks);
  expect_same(again, first);
  ASSERT_GE(lengths.size(), 2U);
  EXPECT_EQ(lengths[0], 0);
  EXPECT_EQ(lengths[1], 13);
  EXPECT_EQ(again.reused, 12);
  GenerateOptions one = greedy(prefix);
  one.max_new_tokens = 1;
  cache->reset();
  EXPECT_EQ(generate(*model, cache.get(), prompt, one).cache_length, 12);
  cache->reset();
  hooks.on_token = [](const GeneratedToken&) {
    throw std::runtime_error("full");
  };
  EXPECT_THROW(generate(*model, cache.get(), prompt, one, hooks),
               std::runtime_error);
  EXPECT_EQ(cache->lengths()[0], 0);
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

INSTANTIATE_TEST_SUITE_P(Models, PrefixCacheTest, all_cases(), name_of_case);

}  // namespace
}  // namespace kvcache::model
