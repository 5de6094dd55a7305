// What a step sends to its device: lengths and live ranges, if they are others
// there (promise 10: nothing in steady decode).
#include "src/step_numbers.h"

#include <gtest/gtest.h>

namespace kvcache {
namespace {

class StepNumbersTest : public testing::TestWithParam<bool> {
 protected:
  StepNumbersTest() {
    std::optional<ForcedOps> ops;
    if (GetParam()) {
      ops.emplace();
    }
    numbers.emplace(3, at::kCPU, std::vector<CellLayout>{{}});
    step.tokens = 1;
    step.rows = 3;
    step.skip = {0, 0, 0};
    step.count = {1, 1, 1};
    numbers->shape(step);
  }
  // One step of all rows; what it sent.
  int64_t sent_by_step() {
    const int64_t before = numbers->uploads();
    numbers->upload(lengths, step);
    numbers->fill(step);
    numbers->advance(step);
    numbers->note_advance(step, 1);
    for (size_t row = 0; row < lengths.size(); ++row) {
      lengths[row] += step.count[row];
    }
    return numbers->uploads() - before;
  }

  std::optional<StepNumbers> numbers;
  StepData step;
  std::vector<int64_t> lengths = {0, 0, 0};
};
INSTANTIATE_TEST_SUITE_P(ByLoopAndByOps, StepNumbersTest, testing::Bool());

TEST_P(StepNumbersTest, SteadyDecodeSendsNothing) {
  EXPECT_EQ(sent_by_step(), 2);  // skip and count, for the first time
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(sent_by_step(), 0);
  }
  EXPECT_EQ(numbers->read_lengths(), lengths);
}

TEST_P(StepNumbersTest, WhatAVerbChangedIsSentOnce) {
  sent_by_step();
  lengths = {1, 0, 1};  // as truncate() does
  EXPECT_EQ(sent_by_step(), 1);
  EXPECT_EQ(sent_by_step(), 0);
  step.count = {1, 0, 1};
  EXPECT_EQ(sent_by_step(), 1);
  EXPECT_EQ(sent_by_step(), 0);
  EXPECT_EQ(numbers->read_lengths(), lengths);
  numbers->forget();  // a step failed on the device
  EXPECT_EQ(sent_by_step(), 1);
  EXPECT_EQ(numbers->read_lengths(), lengths);
}

}  // namespace
}  // namespace kvcache
