// Sliding layers, stored in full and read by range: the reported faults of area
// G, with one-hot values so that an output shows which keys were read.
#include <ATen/ops/zeros.h>

#include "tests/support/toy_contract.h"
#include "tests/support/toy_views.h"

namespace kvcache::toy {
namespace {

class SlidingTest : public testing::TestWithParam<size_t> {
 protected:
  static constexpr int64_t kSpace = 24;  // positions that a value can show

  std::unique_ptr<Cache> make(int64_t sliding) const {
    return kinds()[GetParam()].make(
        {.capacity = kSpace,
         .dtype = at::kFloat,
         .layers = {AttentionLayer{
             .heads = 1, .head_dim = kSpace, .sliding = sliding}}});
  }

  // Appends tokens whose V is one-hot at their place in `names` and whose K is
  // 0; what each query read, as the list of names with equal weight.
  std::vector<std::vector<int>> append(Cache& cache,
                                       const std::vector<int>& names) const {
    const auto tokens = static_cast<int64_t>(names.size());
    const Tensor k = at::zeros({1, 1, tokens, kSpace});
    const Tensor v = at::zeros({1, 1, tokens, kSpace});
    for (int64_t t = 0; t < tokens; ++t) {
      Elements(v).set({0, 0, t, names[t]}, 1);
    }
    Step step = cache.begin_step({.tokens = tokens});
    const KvView& view = step.update(0, k, v);
    std::vector<std::vector<int>> read;
    const Floats query(kSpace, 0.F);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t end = view.limits.const_data_ptr<int64_t>()[t];
      const int64_t first =
          view.sliding > 0 ? std::max<int64_t>(0, end - view.sliding) : 0;
      Floats out(kSpace);
      read_view(view, 0, t, query.data(), 1, kSpace, out);
      std::vector<int> seen;
      for (int64_t d = 0; d < kSpace; ++d) {
        if (out[d] != 0) {
          seen.push_back(static_cast<int>(d));
          EXPECT_FLOAT_EQ(out[d], 1.F / static_cast<float>(end - first));
        }
      }
      read.push_back(seen);
    }
    step.commit();
    return read;
  }
};

INSTANTIATE_TEST_SUITE_P(EveryKind, SlidingTest,
                         testing::Range(size_t{0}, kinds().size()),
                         [](const auto& info) {
                           return kinds()[info.param].name;
                         });

using Names = std::vector<int>;

// K58: all 8 are seen at length 8; at 9 the oldest is gone.
TEST_P(SlidingTest, K58TheWindowRollsWhenItIsExceeded) {
  const std::unique_ptr<Cache> cache = make(8);
  EXPECT_EQ(append(*cache, {0, 1, 2, 3, 4, 5}).back(),
            (Names{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(append(*cache, {6})[0], (Names{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(append(*cache, {7})[0], (Names{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(append(*cache, {8})[0], (Names{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(append(*cache, {9})[0], (Names{2, 3, 4, 5, 6, 7, 8, 9}));
}

// K59: exactly {self, self - 1, self - 2}, in one go, in chunks and singly.
TEST_P(SlidingTest, K59AWindowOfThreeIsThreeKeys) {
  for (const int chunk : {1, 2, 3, 4, 5, 9}) {
    const std::unique_ptr<Cache> cache = make(3);
    for (int start = 0; start < 9; start += chunk) {
      Names names;
      for (int n = start; n < std::min(start + chunk, 9); ++n) {
        names.push_back(n);
      }
      const auto read = append(*cache, names);
      for (size_t t = 0; t < names.size(); ++t) {
        Names want;
        for (int n = std::max(0, names[t] - 2); n <= names[t]; ++n) {
          want.push_back(n);
        }
        EXPECT_EQ(read[t], want) << "chunk " << chunk;
      }
    }
  }
}

// A window of one key sees itself only.
TEST_P(SlidingTest, AWindowOfOne) {
  const std::unique_ptr<Cache> cache = make(1);
  EXPECT_EQ(append(*cache, {3, 4}), (std::vector<Names>{{3}, {4}}));
  EXPECT_EQ(append(*cache, {5})[0], (Names{5}));
}

// K61: append 9, trim 2, append 3, trim 1, append 4, against a plain list.
TEST_P(SlidingTest, K61TrimsAfterTheWindowHasPassed) {
  const std::unique_ptr<Cache> cache = make(6);
  Names list;
  int next = 0;
  const auto grow = [&](int count) {
    Names names;
    for (int i = 0; i < count; ++i) {
      names.push_back(next++);
    }
    list.insert(list.end(), names.begin(), names.end());
    const Names want(list.end() - std::min<size_t>(6, list.size()), list.end());
    EXPECT_EQ(append(*cache, names).back(), want);
  };
  const auto trim = [&](int64_t count) {
    EXPECT_EQ(cache->drop_last(count).reason, TruncationReason::kExact);
    list.resize(list.size() - static_cast<size_t>(count));
  };
  grow(9);
  trim(2);
  grow(3);
  trim(1);
  grow(4);
  EXPECT_EQ(cache->lengths()[0], static_cast<int64_t>(list.size()));
}

// K62: a prefill longer than the window: no query sees a later key.
TEST_P(SlidingTest, K62APrefillLongerThanTheWindow) {
  const std::unique_ptr<Cache> cache = make(4);
  Names names;
  for (int n = 0; n < 11; ++n) {
    names.push_back(n);
  }
  const auto read = append(*cache, names);
  for (int n = 0; n < 11; ++n) {
    EXPECT_EQ(read[n].back(), n);
    EXPECT_EQ(read[n].size(), std::min<size_t>(n + 1, 4));
  }
  names[10] = 20;  // another last token
  const std::unique_ptr<Cache> other = make(4);
  const auto again = append(*other, names);
  for (int n = 0; n < 10; ++n) {
    EXPECT_EQ(again[n], read[n]);
  }
}

// K64: after a prefix of 7, a block of 3 reads what 3 singles read.
TEST_P(SlidingTest, K64ABlockReadsWhatSinglesRead) {
  const std::unique_ptr<Cache> cache = make(4);
  append(*cache, {0, 1, 2, 3, 4, 5, 6});
  const std::unique_ptr<Cache> singles = cache->fork();
  const auto block = append(*cache, {7, 8, 9});
  for (int n = 7; n < 10; ++n) {
    EXPECT_EQ(append(*singles, {n})[0], block[n - 7]);
  }
}

}  // namespace
}  // namespace kvcache::toy
