// batcher_rows_test.cpp - rows of unequal lengths, recurrent states, real
// forwards: whoever comes along, a row is as if alone.

#include <ATen/Parallel.h>

#include "kvcache/model/transformer.h"
#include "tests/model/generate/batch_fixture.h"
#include "tests/model/generate/toy_language_model.h"

namespace kvcache::model {
namespace {

using testing::Each;
using testing::IsEmpty;
using toy::Variant;

constexpr int64_t kPoison = ToyLanguageModel::kPoison;

std::vector<int64_t> toy_prompt(int64_t count, int64_t seed) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back((seed + i * i + 3 * i) % kPoison);
  }
  return ids;
}

using Param = std::tuple<Variant, CacheKind>;

class BatcherRowsTest : public testing::TestWithParam<Param> {
 protected:
  std::shared_ptr<ToyLanguageModel> model =
      std::make_shared<ToyLanguageModel>(std::get<0>(GetParam()));
  CacheKind kind = std::get<1>(GetParam());

  std::unique_ptr<Cache> slots(int64_t rows) const {
    return make_cache(kind, *model, {.rows = rows, .slots = true});
  }
  static BatchRequest request(int64_t prompt, int64_t seed, int64_t count,
                              int64_t chunk = 4) {
    return {.tokens = toy_prompt(prompt, seed),
            .options = {.max_new_tokens = count,
                        .sampling = {.temperature = 1,
                                     .seed = static_cast<uint64_t>(seed)},
                        .chunk = chunk,
                        .log_probs = 0}};
  }
  void expect_as_if_alone(const std::vector<BatchRequest>& requests,
                          Batcher& batcher) const {
    for (const BatchRequest& request : requests) batcher.submit(request);
    batcher.run();
    const auto results = batcher.take_finished();
    ASSERT_EQ(results.size(), requests.size());
    const uint64_t first = std::min_element(results.begin(), results.end(),
                                            [](const auto& a, const auto& b) {
                                              return a.id < b.id;
                                            })
                               ->id;
    for (const BatchResult& got : results) {
      SCOPED_TRACE(got.id);
      ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
      expect_same(got.result, alone(*model, kind, requests[got.id - first]));
    }
    EXPECT_THAT(batcher.cache().validate(), IsEmpty());
  }
};

INSTANTIATE_TEST_SUITE_P(Toys, BatcherRowsTest,
                         testing::Combine(testing::ValuesIn(toy::kVariants),
                                          testing::ValuesIn(kBatchKinds)),
                         [](const auto& info) {
                           return toy::name_of(std::get<0>(info.param)) +
                                  std::string(
                                      to_string(std::get<1>(info.param)));
                         });

// K28, K67: prompts of 3, 9 and 10 tokens in chunks of 4.
TEST_P(BatcherRowsTest, UnequalPromptsKeepTheirPositionsAndStates) {
  Batcher batcher(model, slots(3), batching(kind));
  expect_as_if_alone({request(3, 1, 12), request(9, 2, 12), request(10, 3, 12)},
                     batcher);
  // All rows are gone; one more comes.
  expect_as_if_alone({request(5, 4, 12)}, batcher);
}

// K31, K15: one short prompt beside neighbours of any length.
TEST_P(BatcherRowsTest, ANeighboursLengthChangesNothing) {
  for (const int64_t neighbour : {1, 4, 8, 16, 40}) {
    Batcher batcher(model, slots(2), batching(kind));
    expect_as_if_alone({request(4, 1, 12), request(neighbour, 2, 12)}, batcher);
    Batcher swapped(model, slots(2));
    expect_as_if_alone({request(neighbour, 2, 12), request(4, 1, 12)}, swapped);
  }
}

// K26: a freed row's state is the next one's start in no path, chunked or token
// by token, and whatever was left there, NaN included.
TEST_P(BatcherRowsTest, AFreedRowLeavesNoStateBehind) {
  Batcher batcher(model, slots(1), batching(kind));
  expect_as_if_alone({request(9, 1, 8), request(9, 2, 8, 1)}, batcher);
  BatchRequest poisoned = request(6, 3, 8);
  poisoned.tokens.back() = kPoison;
  batcher.submit(poisoned);
  batcher.run();
  const auto failed = batcher.take_finished();
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].status, BatchStatus::kFailed);
  EXPECT_THAT(failed[0].error, testing::HasSubstr("non-finite logits"));
  expect_as_if_alone({request(9, 1, 8), request(1, 5, 8), request(9, 2, 8, 1)},
                     batcher);
}

// One that becomes NaN among three that do not; its row is used again.
TEST_P(BatcherRowsTest, APoisonedNeighbourChangesNothing) {
  for (uint64_t odd = 0; odd < 4; ++odd) {
    Batcher batcher(model, slots(4), batching(kind));
    std::vector<BatchRequest> requests;
    for (int64_t i = 0; i < 8; ++i) {
      requests.push_back(request(3 + 2 * i, i, 10));
    }
    requests[odd].tokens.back() = kPoison;
    for (const BatchRequest& request : requests) batcher.submit(request);
    batcher.run();
    for (const auto& [id, got] : by_id(batcher.take_finished())) {
      SCOPED_TRACE(id);
      if (id == odd + 1) {
        EXPECT_EQ(got.status, BatchStatus::kFailed);
        continue;
      }
      ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
      expect_same(got.result, alone(*model, kind, requests[id - 1]));
    }
    EXPECT_THAT(batcher.cache().lengths(), Each(0));
  }
}

// K32: with a recurrent state, each slot alone for twenty steps.
TEST_P(BatcherRowsTest, EverySlotCanBeTheOnlyOne) {
  for (uint64_t only = 1; only <= 4; ++only) {
    Batcher batcher(model, slots(4), batching(kind));
    for (int i = 0; i < 4; ++i) batcher.submit(request(5, 9, 22));
    while (batcher.stats().decode_steps < 2) batcher.step();
    for (uint64_t id = 1; id <= 4; ++id) {
      if (id != only) batcher.cancel(id);
    }
    batcher.run();
    expect_same(by_id(batcher.take_finished()).at(only).result,
                alone(*model, kind, request(5, 9, 22)));
  }
}

// Forwards that compute on the rows they are given, in both dtypes.
class BatcherModelsTest
    : public testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {};

INSTANTIATE_TEST_SUITE_P(
    Models, BatcherModelsTest,
    testing::Combine(testing::Values("gpt2", "llama", "llama_rope3", "mistral",
                                     "qwen3", "qwen3_5"),
                     testing::Values(at::kFloat, at::kBFloat16)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param)) + "_" +
             c10::toString(std::get<1>(info.param));
    });

TEST_P(BatcherModelsTest, RowsAreAsIfAlone) {
  at::set_num_threads(1);  // so small that threads only wait for each other
  const auto& [name, dtype] = GetParam();
  const auto model =
      load_model(std::string("tests/reference/data/") + name, {.dtype = dtype});
  if (!model->row_exact(Role::kDecode)) GTEST_SKIP() << "not row-exact here";
  for (const CacheKind kind : kBatchKinds) {
    Batcher batcher(model,
                    make_cache(kind, *model, {.rows = 4, .capacity = 64}));
    std::vector<BatchRequest> requests;
    for (int64_t i = 0; i < 12; ++i) {
      BatchRequest request{
          .tokens = {},
          .options = {.max_new_tokens = 4 + i % 5 * 3,
                      .sampling = {.temperature = i % 3 == 0 ? 0.0 : 1.0,
                                   .seed = static_cast<uint64_t>(i)},
                      .ignore_eos = true,
                      .chunk = 16,
                      .log_probs = 1}};
      for (int64_t t = 0; t < 1 + i * 11 % 37; ++t) {
        request.tokens.push_back((i * 17 + t * 7) % model->vocab_size());
      }
      requests.push_back(request);
      batcher.submit(request);
    }
    batcher.run();
    for (const auto& [id, got] : by_id(batcher.take_finished())) {
      SCOPED_TRACE(id);
      ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
      expect_same(got.result, alone(*model, kind, requests[id - 1], 64));
    }
  }
}

}  // namespace
}  // namespace kvcache::model
