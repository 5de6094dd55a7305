// row_exact_test.cpp - the bits of a row hang on nothing but its own inputs.
//
// float32, bfloat16 and packed weights: caches against the stateless forward,
// any chunking, a row alone against the same row among others, dead tokens,
// thread counts.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <tuple>

#include "tests/model/forward/reference_data.h"

namespace kvcache::testing {
namespace {

class RowExactTest
    : public ::testing::TestWithParam<std::tuple<std::string, Running>> {
 protected:
  void SetUp() override {
    const Running& running = std::get<1>(GetParam());
    model = load_tiny(std::get<0>(GetParam()), running.dtype, running.packing);
    const nlohmann::json numbers =
        read_json(std::get<0>(GetParam()) + "/expected.json");
    const auto& prompts = numbers["prompts"];
    longest = prompts[prompts.size() - 1]["tokens"].get<Ids>();
    alone = all_logits(*model, longest, Kind::kNone, 0);
  }
  Ids first(int64_t count) const {
    return {longest.begin(), longest.begin() + count};
  }
  std::shared_ptr<const Transformer> model;
  Ids longest;
  Tensor alone;  // [T, V], of `longest`
};

TEST_P(RowExactTest, IsReported) {
  EXPECT_TRUE(model->row_exact(Role::kPrefill));
  EXPECT_TRUE(model->row_exact(Role::kDecode));
  EXPECT_TRUE(model->roles_agree());
  EXPECT_EQ(model->dtype(), std::get<1>(GetParam()).dtype);
  EXPECT_EQ(model->packing(), std::get<1>(GetParam()).packing);
}

TEST_P(RowExactTest, CachesAndChunksGiveTheStatelessBits) {
  for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
    for (const int64_t chunk : {1, 2, 3, 7, 16, 256}) {
      EXPECT_TRUE(at::equal(all_logits(*model, longest, kind, chunk), alone))
          << "chunk " << chunk;
    }
  }
}

TEST_P(RowExactTest, AShorterPromptIsThePrefixOfALongerOne) {
  for (const int64_t count : {1, 2, 5, 17, 33}) {
    EXPECT_TRUE(at::equal(all_logits(*model, first(count), Kind::kNone, 0),
                          alone.narrow(0, 0, count)))
        << count;
  }
}

TEST_P(RowExactTest, TheLastLogitsAreTheLastOfAll) {
  const Tensor last = model->forward(as_row(longest), {});
  ASSERT_EQ(last.sizes(), at::IntArrayRef({1, 1, alone.size(1)}));
  EXPECT_TRUE(at::equal(last[0][0], alone[alone.size(0) - 1]));
}

TEST_P(RowExactTest, NeighboursAndPaddingChangeNothing) {
  // Row 1 is ours, behind 5 dead tokens whose ids are no tokens.
  const int64_t tokens = static_cast<int64_t>(longest.size()) + 5;
  for (const int64_t rows : {2, 3, 4}) {
    Tensor ids = at::randint(0, model->vocab_size(), {rows, tokens}, at::kLong);
    ids[1].narrow(0, 0, 5).fill_(int64_t{1} << 40);
    ids[1].narrow(0, 5, tokens - 5).copy_(as_row(longest)[0]);
    Ids skip(static_cast<size_t>(rows), 0);
    skip[1] = 5;
    const auto cache = make_cache(Kind::kPreallocated, *model, rows, tokens);
    const Tensor logits = step(*model, *cache, ids, true, skip);
    EXPECT_TRUE(at::equal(logits[1].narrow(0, 5, tokens - 5), alone)) << rows;
    EXPECT_TRUE(logits[1].narrow(0, 0, 5).eq(0).all().item<bool>());
  }
}

// A row that sits out some steps, and one that decodes beside a prefill.
TEST_P(RowExactTest, IdleRowsAndUnequalStepsChangeNothing) {
  const auto cache = make_cache(Kind::kPreallocated, *model, 2, 64);
  const auto total = static_cast<int64_t>(longest.size());
  std::vector<Tensor> found;
  int64_t done = 0, round = 0;
  while (done < total) {
    const int64_t tokens = round % 3 == 0 ? 1 : 4;
    const int64_t mine = round % 4 == 2 ? 0 : std::min(total - done, tokens);
    Tensor ids = at::full({2, tokens}, -1, at::kLong);
    ids[1].narrow(0, 0, mine).copy_(as_row(longest)[0].narrow(0, done, mine));
    const int64_t theirs = round % 2;
    ids[0].narrow(0, 0, theirs).fill_(3);
    const Tensor logits =
        step(*model, *cache, ids, true, {}, Ids{theirs, mine});
    found.push_back(logits[1].narrow(0, 0, mine));
    EXPECT_TRUE(
        logits[0].narrow(0, theirs, tokens - theirs).eq(0).all().item<bool>());
    done += mine;
    ++round;
  }
  EXPECT_TRUE(at::equal(at::cat(found), alone));
}

TEST_P(RowExactTest, AnIdleRowGivesZeroLogits) {
  const auto cache = make_cache(Kind::kConcat, *model, 2, 64);
  const Tensor ids = at::cat({as_row(longest), as_row(longest)});
  const auto total = static_cast<int64_t>(longest.size());
  const Tensor logits = step(*model, *cache, ids, false, {}, Ids{0, total});
  EXPECT_TRUE(logits[0].eq(0).all().item<bool>());
  EXPECT_TRUE(at::equal(logits[1][0], alone[total - 1]));
}

TEST_P(RowExactTest, ThreadsAndModesChangeNothing) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(
        at::equal(all_logits(*model, longest, Kind::kPreallocated, 7), alone))
        << threads;
  }
  at::set_num_threads(before);
  const auto cache = make_cache(Kind::kPreallocated, *model, 1, 64);
  Tensor logits;
  {
    const c10::InferenceMode inference;
    logits = step(*model, *cache, as_row(longest));
  }
  EXPECT_TRUE(at::equal(logits[0], alone));
  Tensor outside = model->forward(as_row(longest), {});
  outside.mul_(2.0);  // a result that a caller may change
  EXPECT_FALSE(outside.is_inference());
}

INSTANTIATE_TEST_SUITE_P(
    Families, RowExactTest,
    ::testing::Combine(::testing::Values("gpt2", "llama", "llama_rope3",
                                         "llama_bias", "mistral", "qwen2",
                                         "qwen3", "qwen3_5", "qwen3_5_three"),
                       ::testing::ValuesIn(kRunnings)),
    [](const auto& info) {
      return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
    });

}  // namespace
}  // namespace kvcache::testing
