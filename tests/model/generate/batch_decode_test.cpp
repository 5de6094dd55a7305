// batch_decode_test.cpp - the shared step: any rows, the same logits.

#include "src/model/generate/batch_decode.h"

#include "tests/model/generate/batch_fixture.h"

namespace kvcache::model {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;

class BatchDecodeTest : public testing::TestWithParam<CacheKind> {};

INSTANTIATE_TEST_SUITE_P(Kinds, BatchDecodeTest, testing::ValuesIn(kBatchKinds),
                         name_of_kind);

// K32: every set of rows, the first and the last among them.
TEST_P(BatchDecodeTest, StepsAnyRowsAndLeavesTheOthers) {
  constexpr int64_t kVocabulary = 16;
  const auto model = FakeModel::hashed(kVocabulary, 400);
  const auto cache = make_cache(GetParam(), *model, {.rows = 4});
  const auto decode = make_plain_decode(*model, *cache);
  std::vector<std::vector<int64_t>> history(4);
  for (int64_t set = 1; set < 16; ++set) {
    std::vector<int64_t> ids(4, -7), active(4);  // an idle id is not read
    for (size_t row = 0; row < 4; ++row) {
      active[row] = (set >> row) & 1;
      if (active[row] == 0) continue;
      ids[row] = (set + 3 * static_cast<int64_t>(row)) % kVocabulary;
      history[row].push_back(ids[row]);
    }
    decode->step(ids, active);
    for (size_t row = 0; row < 4; ++row) {
      EXPECT_EQ(cache->lengths()[row],
                static_cast<int64_t>(history[row].size()));
      if (active[row] == 0) continue;
      EXPECT_THAT(decode->logits(static_cast<int64_t>(row)),
                  ElementsAreArray(FakeModel::mixed(kVocabulary, history[row])))
          << set << " row " << row;
    }
  }
}

TEST_P(BatchDecodeTest, AStepThatThrowsChangesNoRow) {
  const auto model = FakeModel::hashed(16, 100);
  const auto cache = make_cache(GetParam(), *model, {.rows = 2});
  const auto decode = make_plain_decode(*model, *cache);
  const std::vector<int64_t> ids = {1, 2}, both = {1, 1}, last = {0, 1};
  decode->step(ids, both);
  model->fail_after = model->steps.load();
  EXPECT_EQ(error_of([&] { decode->step(ids, both); }), "[FakeModel] told to.");
  EXPECT_THAT(cache->lengths(), ElementsAre(1, 1));
  model->fail_after = -1;
  decode->step(ids, last);
  EXPECT_THAT(cache->lengths(), ElementsAre(1, 2));
  const std::vector<int64_t> twice = {2, 2};
  EXPECT_THAT(decode->logits(1), ElementsAreArray(FakeModel::mixed(16, twice)));
}

}  // namespace
}  // namespace kvcache::model
