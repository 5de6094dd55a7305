// The life of a step: begin, the numbers it gives, commit, abandon, move.
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/full.h>

#include "tests/support/toy_contract.h"

namespace kvcache::toy {
namespace {

class StepLifeTest : public ContractTest {};
KVCACHE_CONTRACT(StepLifeTest);

std::vector<int64_t> numbers(const Tensor& t) {
  const auto* data = t.const_data_ptr<int64_t>();
  return {data, data + t.numel()};
}

// K65, K67: positions and limits per row, whatever stands beside it.
TEST_P(StepLifeTest, NumbersCountLiveTokensOfEachRow) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<Ids> first(rows, Ids{1, 2});
  first[0] = {1, 2, 3, 4, 5};
  feed(*cache, model, first);
  std::vector<int64_t> skip(rows, 1), count(rows, 2);
  skip[0] = 0;
  count[0] = 3;
  Step step = cache->begin_step({.tokens = 4, .skip = skip, .count = count});
  EXPECT_EQ(step.rows(), rows);
  EXPECT_EQ(step.tokens(), 4);
  std::vector<int64_t> positions{5, 6, 7, 0}, limits{6, 7, 8, 0};
  for (int64_t row = 1; row < rows; ++row) {
    for (const int64_t n : {0, 2, 3, 0}) {
      positions.push_back(n);
      limits.push_back(n == 0 ? 0 : n + 1);
    }
  }
  EXPECT_EQ(numbers(step.positions()), positions);
  EXPECT_EQ(numbers(step.limits()), limits);
  EXPECT_TRUE(step.live(0, 2));
  EXPECT_FALSE(step.live(0, 3));
  EXPECT_FALSE(step.live(rows, 0));
  EXPECT_FALSE(step.live(-1, 0));
  EXPECT_FALSE(step.live(0, -1));
  EXPECT_FALSE(step.live(0, 4));
  if (rows > 1) {
    EXPECT_FALSE(step.live(1, 0));
    EXPECT_TRUE(step.live(1, 1));
  }
}

// A view says where the new tokens go, what is seen, and that no cell it shows
// is outside of its own keys.
TEST_P(StepLifeTest, ViewsDescribeTheStorage) {
  const std::unique_ptr<Cache> cache = make();
  feed_all(*cache, model, some_ids(3));
  Step step = cache->begin_step({.tokens = 2});
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const auto* a = std::get_if<AttentionLayer>(&model.layers[i]);
    if (a == nullptr) {
      continue;
    }
    const KvView& view = step.reserve(static_cast<int64_t>(i));
    EXPECT_EQ(view.k.size(0), rows);
    EXPECT_EQ(view.k.size(1), a->heads);
    EXPECT_GE(view.k.size(2), 5);
    EXPECT_EQ(view.k.size(3), a->head_dim);
    EXPECT_EQ(view.k.stride(3), 1);
    const bool int8 = kind.format == KvFormat::kInt8;
    EXPECT_EQ(view.k.scalar_type(), int8 ? at::kChar : dtype);
    EXPECT_EQ(view.v.sizes(), view.k.sizes());
    EXPECT_EQ(view.sliding, a->sliding);
    EXPECT_EQ(view.ring, 0);
    EXPECT_EQ(view.window, kind.window(5, cache->capacity()));
    EXPECT_TRUE(view.uniform);
    EXPECT_EQ(view.format, kind.format);
    EXPECT_EQ(numbers(view.limits), numbers(step.limits()));
    EXPECT_EQ(numbers(view.cells), numbers(step.positions()));
    EXPECT_FALSE(view.blocks.defined());
    ASSERT_EQ(view.k_scale.defined(), int8);
    if (int8) {
      EXPECT_EQ(view.k_scale.sizes(),
                at::IntArrayRef({rows, a->heads, view.k.size(2), int64_t{1}}));
      EXPECT_EQ(view.v_scale.sizes(), view.k_scale.sizes());
    }
  }
}

// The other order errors are in errors_test; here what goes on after them.
TEST_P(StepLifeTest, AFailedCommitCanBeCompletedOrDropped) {
  for (const bool complete : {false, true}) {
    const std::unique_ptr<Cache> cache = make();
    feed_checked(*cache, {}, some_ids(3));
    const std::string held = picture(*cache);
    {
      Step step = cache->begin_step({.tokens = 2});
      EXPECT_NE(error_of([&] { step.commit(); }), "");
      if (complete) {
        const Padded ids(std::vector<Ids>(rows, Ids{6, 7}));
        forward(model, step, ids.ids, options_for(*cache));
        step.commit();
      }
    }
    if (complete) {
      feed_checked(*cache, joined(some_ids(3), {6, 7}), {1});
    } else {
      EXPECT_EQ(picture(*cache), held);
      feed_checked(*cache, some_ids(3), {1});
    }
  }
}

TEST_P(StepLifeTest, MovesAndAssignments) {
  const std::unique_ptr<Cache> cache = make(), other = make();
  const Padded ids(std::vector<Ids>(rows, Ids{6, 7}));
  Step step = cache->begin_step({.tokens = 2});
  Step second = std::move(step);
  forward(model, second, ids.ids, options_for(*cache));
  second = other->begin_step({.tokens = 2});  // abandons the first
  EXPECT_EQ(lengths(*cache), all(0));
  feed_checked(*cache, {}, {1});
  Step& same = second;
  second = std::move(same);
  forward(model, second, ids.ids, options_for(*cache));
  second.commit();
  EXPECT_EQ(lengths(*other), all(2));
  feed_checked(*other, {6, 7}, {1});
  // `step = begin` over an open step of the same cache is a second step.
  Step open = cache->begin_step();
  EXPECT_NE(error_of([&] { open = cache->begin_step(); }), "");
  EXPECT_EQ(open.tokens(), 1);
}

// Steps over a row range leave the other rows alone, states included.
// A lazily negated tensor shows -x over memory that holds x.
TEST_P(StepLifeTest, StoresWhatANegatedTensorShows) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<int64_t> layers;
  for (size_t i = 0; i < cache->spec().layers.size(); ++i) {
    if (std::holds_alternative<AttentionLayer>(cache->spec().layers[i])) {
      layers.push_back(static_cast<int64_t>(i));
    }
  }
  const auto& layer = std::get<AttentionLayer>(cache->spec().layers[layers[0]]);
  Step step = cache->begin_step();
  const Tensor ones = at::full({rows, layer.heads, 1, layer.head_dim}, 1,
                               at::TensorOptions().dtype(cache->spec().dtype));
  const KvView& seen = step.update(cache->spec().first_layer + layers[0],
                                   at::_neg_view(ones), at::_neg_view(ones));
  const float stored = kind.format == KvFormat::kInt8 ? -127 : -1;
  EXPECT_EQ(seen.k.narrow(2, 0, 1).min().item<float>(), stored);
  EXPECT_EQ(seen.v.narrow(2, 0, 1).max().item<float>(), stored);
}

TEST_P(StepLifeTest, RowRangesLeaveOtherRowsAlone) {
  const std::unique_ptr<Cache> cache = make();
  std::vector<Ids> held(rows);
  for (int round = 0; round < 4; ++round) {
    for (int64_t row = 0; row < rows; ++row) {
      const Ids next = some_ids(static_cast<size_t>(1 + (row + round) % 3),
                                static_cast<int>(row + 3 * round));
      Step step =
          cache->begin_step({.tokens = static_cast<int64_t>(next.size()),
                             .first_row = row,
                             .rows = 1});
      EXPECT_EQ(step.rows(), 1);
      const Floats got = forward(model, step, next,
                                 options_for(*cache, (row + round) % 2 == 1));
      step.commit();
      held[row] = joined(held[row], next);
      ASSERT_EQ(got, last_of(*cache, model, held[row], next.size()));
    }
  }
  const std::vector<Floats> got =
      feed(*cache, model, std::vector<Ids>(rows, Ids{2}));
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(got[row], last_of(*cache, model, joined(held[row], {2}), 1));
  }
}

// K04: the cache that is given is the one that is used.
TEST_P(StepLifeTest, K04TheGivenCacheIsUsed) {
  const std::unique_ptr<Cache> cache = make();
  Ids ids;
  for (int64_t n = 1; n <= 5; ++n) {
    feed_checked(*cache, ids, {static_cast<int>(n)});
    ids.push_back(static_cast<int>(n));
    EXPECT_EQ(lengths(*cache), all(n));
  }
}

// K66: nothing live in a row, or in any: all stays finite and nothing moves.
TEST_P(StepLifeTest, K66RowsOfPaddingOnly) {
  const std::unique_ptr<Cache> cache = make();
  feed_checked(*cache, {}, some_ids(2));
  const std::string held = picture(*cache);
  const std::vector<int64_t> none(rows, 0), skip(rows, 3);
  for (const bool left : {false, true}) {
    Step step =
        cache->begin_step({.tokens = 3,
                           .skip = left ? skip : std::vector<int64_t>(rows, 0),
                           .count = none});
    forward(model, step, Ids(static_cast<size_t>(3 * rows), kDead),
            options_for(*cache));
    step.commit();
    EXPECT_EQ(picture(*cache), held);
  }
  feed_checked(*cache, some_ids(2), {1, 2});
}

}  // namespace
}  // namespace kvcache::toy
