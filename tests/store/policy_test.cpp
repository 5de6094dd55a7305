// checkpoint_policy.h and reuse_simulator.h: where checkpoints are placed, and
// what that is worth.
#include "kvcache/checkpoint_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "kvcache/reuse_simulator.h"
#include "tests/support/error_text.h"

namespace kvcache {
namespace {

using ::testing::ElementsAre;
using testing::error_text;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// --- behaviour D2

PlacementPolicy chunk_ends(int64_t stride, int64_t tail, int64_t align) {
  return PlacementPolicy({.stride = stride, .tail = tail, .align = align});
}

// Multiples of stride, the end less tail, the end; each aligned down.
TEST(ChunkEnds, StrideTailAndEnd) {
  const PlacementPolicy policy = chunk_ends(512, 16, 64);
  EXPECT_THAT(policy.positions(0, 1300),
              ElementsAre(512, 1024, 1280));  // 1284 is 1280 aligned
  EXPECT_THAT(policy.positions(0, 1290), ElementsAre(512, 1024, 1216, 1280));
  EXPECT_THAT(policy.positions(512, 1300), ElementsAre(1024, 1280));
  EXPECT_THAT(policy.positions(1280, 1300), IsEmpty());
  EXPECT_THAT(policy.positions(1024, 1024), IsEmpty());
}

// The tail counts from the end as it is, not as it is aligned.
TEST(ChunkEnds, TailCountsFromTheUnalignedEnd) {
  // 650 - 16 = 634 and 680 - 16 = 664, though both ends are at 640.
  EXPECT_THAT(chunk_ends(0, 16, 64).positions(0, 650), ElementsAre(576, 640));
  EXPECT_THAT(chunk_ends(0, 16, 64).positions(0, 680), ElementsAre(640));
}

// Each rule is off at 0, alignment too.
TEST(ChunkEnds, ZeroSwitchesOff) {
  EXPECT_THAT(chunk_ends(0, 0, 0).positions(0, 1301), ElementsAre(1301));
  EXPECT_THAT(chunk_ends(0, 16, 0).positions(0, 1301), ElementsAre(1285, 1301));
  EXPECT_THAT(chunk_ends(500, 0, 0).positions(0, 1301),
              ElementsAre(500, 1000, 1301));
}

// Gaps over the longest chunk are cut from where they begin, and the cuts are
// checkpoints too.
TEST(ChunkEnds, LongGapsAreCutFromTheirStart) {
  EXPECT_THAT(chunk_ends(0, 0, 64).positions(0, 5000),
              ElementsAre(2048, 4096, 4992));
  EXPECT_THAT(chunk_ends(0, 0, 64).positions(100, 5000),
              ElementsAre(2148, 4196, 4992));
  EXPECT_THAT(chunk_ends(4096, 0, 64).positions(0, 6400),
              ElementsAre(2048, 4096, 6144, 6400));
}

// Shorter than min_prefix once aligned: nothing.
TEST(ChunkEnds, ShortTextsGetNone) {
  EXPECT_THAT(chunk_ends(0, 0, 64).positions(0, 255), IsEmpty());
  EXPECT_THAT(chunk_ends(0, 0, 64).positions(0, 256), ElementsAre(256));
  EXPECT_THAT(PlacementPolicy({.tail = 100, .align = 0, .min_prefix = 10})
                  .positions(0, 50),
              ElementsAre(50));
}

// The rule once more as the document writes it, on random numbers.
TEST(ChunkEnds, AgreeWithThePlainRule) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t align = below(3) * 8;
    const int64_t stride = below(4) * (align == 0 ? 13 : 3 * align);
    const int64_t tail = below(3) * 11;
    const int64_t length = below(400);
    const int64_t from = below(length + 1);
    const PlacementPolicy policy({.stride = stride,
                                  .tail = tail,
                                  .align = align,
                                  .max_chunk = 50,
                                  .min_prefix = 0});
    const auto down = [&](int64_t x) { return align ? x - x % align : x; };
    std::set<int64_t> ends;
    const int64_t end = down(length);
    for (int64_t k = stride; stride > 0 && k < end; k += stride) {
      if (k > from) ends.insert(k);
    }
    if (tail > 0 && length >= tail && down(length - tail) > from) {
      ends.insert(down(length - tail));
    }
    if (end > from) ends.insert(end);
    std::vector<int64_t> expected;
    int64_t start = from;
    for (const int64_t x : ends) {
      while (x - start > 50) expected.push_back(start += 50);
      expected.push_back(start = x);
    }
    ASSERT_EQ(policy.positions(from, length), expected)
        << stride << ' ' << tail << ' ' << align << ' ' << from << ' '
        << length;
  }
}

// Options that contradict themselves are refused at construction.
TEST(Placement, RefusesContradictions) {
  EXPECT_EQ(error_text([] { chunk_ends(100, 0, 64); }),
            "[PlacementPolicy::PlacementPolicy] stride must be a multiple of "
            "align, 64, but got 100; chunks could not start there.");
  EXPECT_EQ(error_text([] { PlacementPolicy({.tail = -1}); }),
            "[PlacementPolicy::PlacementPolicy] counts must be >= 0 but got "
            "stride 2048, tail -1, align 64, max_chunk 2048, min_prefix 256.");
  EXPECT_EQ(error_text([] { PlacementPolicy({.ladder = 0.5}); }),
            "[PlacementPolicy::PlacementPolicy] ladder must be 0 or >= 1 but "
            "got 0.5.");
  EXPECT_EQ(error_text([] { PlacementPolicy({.budget = 100}); }),
            "[PlacementPolicy::PlacementPolicy] a budget of 100 bytes needs "
            "point_bytes, the bytes of one checkpoint.");
  EXPECT_EQ(error_text([] { chunk_ends(0, 0, 64).positions(9, 8); }),
            "[PlacementPolicy::positions] from must be in [0, 8] but got 9.");
}

// --- the rule for generation

PlacementOptions generation() {
  return {.rule = PlacementRule::kGeneration, .stride = 256, .align = 256};
}

// Rungs double their distance to the end, so that whatever comes back, at most
// about as much is computed again as differs.
TEST(GenerationPlacement, LadderMarksAndDivergence) {
  const PlacementPolicy policy(generation());
  EXPECT_THAT(policy.positions(0, 4096),
              ElementsAre(2048, 3072, 3584, 3840, 4096));
  EXPECT_THAT(policy.positions(3000, 4096),
              ElementsAre(3072, 3584, 3840, 4096));
  const std::vector<int64_t> marks = {700, 1500};
  EXPECT_THAT(policy.positions(0, 2050, marks, 1030),
              ElementsAre(512, 1024, 1280, 1536, 1792, 2048));
  PlacementOptions exact = generation();
  exact.align = 1;
  exact.ladder = 0;
  EXPECT_THAT(PlacementPolicy(exact).positions(0, 2050, marks, 1030),
              ElementsAre(700, 1030, 1500, 2050));
  exact.marks = false;
  exact.divergence = false;
  EXPECT_THAT(PlacementPolicy(exact).positions(0, 2050, marks, 1030),
              ElementsAre(2050));
  exact.ladder = 1;
  EXPECT_THAT(PlacementPolicy(exact).positions(0, 1000),
              ElementsAre(232, 488, 744, 1000));
}

// Over budget: the end, then the divergence, the marks, the rungs.
TEST(GenerationPlacement, KeepsWhatMattersWithinItsBudget) {
  PlacementOptions options = generation();
  options.align = 1;
  options.point_bytes = 100;
  const std::vector<int64_t> marks = {500, 900};
  const auto with = [&](size_t budget) {
    options.budget = budget;
    return PlacementPolicy(options).positions(0, 1000, marks, 300);
  };
  EXPECT_THAT(with(50), ElementsAre(1000));  // one always
  EXPECT_THAT(with(200), ElementsAre(300, 1000));
  EXPECT_THAT(with(399), ElementsAre(300, 900, 1000));
  EXPECT_THAT(with(400), ElementsAre(300, 500, 900, 1000));
  EXPECT_THAT(with(500), ElementsAre(300, 500, 744, 900, 1000));
  options.rule = PlacementRule::kChunkEnds;
  EXPECT_THAT(with(200), ElementsAre(984, 1000));
}

// --- simulated traces

std::vector<int64_t> tokens(int64_t n, int64_t seed) {
  std::vector<int64_t> made(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) made[i] = 100000 * seed + i;
  return made;
}

std::vector<int64_t> joined(std::vector<int64_t> a,
                            const std::vector<int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr SimulatedModel kHybrid = {.point_bytes = 1 << 20,
                                    .token_bytes = 1024};

PlacementOptions plain_end() {
  PlacementOptions options = generation();
  options.align = 1;
  options.ladder = 0;
  options.divergence = false;
  options.marks = false;
  return options;
}

// A system prompt of unknown length with questions of their own: with the end
// alone it is never found; with the divergence point from the third on.
TEST(Simulator, DivergenceFindsASharedPrompt) {
  std::vector<TraceRequest> trace;
  for (int64_t i = 1; i <= 10; ++i) {
    trace.push_back({.tokens = joined(tokens(1000, 0), tokens(300, i))});
  }
  PlacementOptions options = plain_end();
  const auto reused = [&] {
    return simulate(PlacementPolicy(options), trace, size_t{1} << 30U, kHybrid)
        .stats.tokens_reused;
  };
  EXPECT_EQ(reused(), 0);
  options.divergence = true;
  EXPECT_EQ(reused(), 8 * 1000);  // the second sighting makes it
  options.divergence = false;
  options.ladder = 2;
  EXPECT_EQ(reused(),
            9 * 787);  // 512 before the end of 1299, from the second on
  options.marks = true;
  for (TraceRequest& request : trace) request.marks = {1000};
  EXPECT_EQ(reused(), 9 * 1000);  // known from the start
}

// A conversation: each turn continues the last one's end.
TEST(Simulator, AConversationNeverRecomputesItsPast) {
  std::vector<TraceRequest> trace;
  std::vector<int64_t> text;
  for (int64_t turn = 1; turn <= 10; ++turn) {
    text = joined(text, tokens(300, turn));
    trace.push_back({.tokens = text});
  }
  const SimulationResult result =
      simulate(PlacementPolicy(plain_end()), trace, size_t{1} << 30U, kHybrid);
  EXPECT_EQ(result.stats.tokens_computed, 300 + 9 * 301);
  EXPECT_GT(result.reused(), 0.8);
  EXPECT_EQ(result.stats.ckpts_made, 10);
}

// An attention-only model needs no placement.
TEST(Simulator, AttentionAloneReusesEverythingShared) {
  std::vector<TraceRequest> trace;
  for (int64_t i = 1; i <= 5; ++i) {
    trace.push_back({.tokens = joined(tokens(1000, 0), tokens(300, i))});
  }
  const SimulationResult result =
      simulate(PlacementPolicy(plain_end()), trace, size_t{1} << 30U,
               {.point_bytes = 0, .token_bytes = 1024});
  EXPECT_EQ(result.stats.tokens_reused, 4 * 1000);
}

// Long prompts that come back now and then among many short ones that never do:
// at equal bytes the cost-aware policy reuses more than the least recently
// used.
TEST(Simulator, CostAwareKeepsWhatPaysAtEqualBytes) {
  std::vector<TraceRequest> trace;
  int64_t fresh = 100;
  for (int round = 0; round < 12; ++round) {
    for (int64_t seed = 1; seed <= 4; ++seed) {
      trace.push_back(
          {.tokens = joined(tokens(3000, seed), tokens(10, fresh++))});
    }
    for (int i = 0; i < 12; ++i) {
      trace.push_back({.tokens = tokens(300, fresh++)});
    }
  }
  PlacementOptions options = plain_end();
  options.divergence = true;
  constexpr size_t kBudget = size_t{24} << 20U;
  const auto with = [&](EvictionPolicy policy) {
    return simulate(PlacementPolicy(options), trace, kBudget, kHybrid, policy)
        .reused();
  };
  const double lru = with(EvictionPolicy::kLru);
  const double cost_aware = with(EvictionPolicy::kCostAware);
  EXPECT_GT(cost_aware, lru + 0.2) << "lru " << lru << ", cost " << cost_aware;
}

}  // namespace
}  // namespace kvcache
