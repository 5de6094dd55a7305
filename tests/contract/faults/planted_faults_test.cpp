// The fuzz must see each fault planted in a copy of the cache's sources.
#include <gtest/gtest.h>

#include "tests/contract/faults/planted.h"
#include "tests/support/toy_allocator.h"
#include "tests/support/toy_fuzz.h"

namespace kvcache {

int planted_fault = 0;

namespace toy {
namespace {

struct Fault {
  int number;
  const char* what;
};

const Fault kFaults[] = {
    {1, "idle rows take their next state"},
    {2, "states are swapped although rows are idle or outside of the step"},
    {3, "the convolution's tail is cut at T"},
    {4, "restore points are not permuted"},
    {5, "truncate leaves the state"},
    {6, "restore leaves the state"},
    {7, "a checkpoint's state is the live one"},
    {8, "dead tokens are written"},
    {9, "a fork loses its restore points"},
    {10, "a truncation to the length reloads a restore point"},
    {11, "restore points outlive a truncation"},
    {12, "restore keeps the row's own points"},
    {13, "an abandoned step's states are taken"},
    {14, "saved convolution inputs stand before the padding"},
    {15, "growth loses values"},
    {16, "positions count padding"},
    {17, "reset leaves the state"},
    {18, "a step over a row range takes other rows' states"},
    {19, "a fork has no states"},
    {20, "states are not permuted"},
    {21, "a state window's tokens are counted from its padding"},
    {22, "a state window outlives the row's next step"},
    {23, "a state window outlives the step that overwrites it"},
};

constexpr unsigned kSeeds = 8;

// Runs that see the planted fault, of kinds x variants x seeds.
int runs_that_fail(int* runs) {
  int failed = 0;
  for (const Kind& kind : kinds()) {
    for (const Variant variant : {Variant::kHybrid, Variant::kMixed}) {
      for (unsigned seed = 0; seed < kSeeds; ++seed) {
        const FuzzSetup setup{
            .kind = &kind, .variant = variant, .rows = 3, .seed = seed};
        failed += run_fuzz(setup).empty() ? 0 : 1;
        ++*runs;
      }
    }
  }
  return failed;
}

TEST(PlantedFaults, EachHasItsPlaceInTheSources) {
  EXPECT_STREQ(KVCACHE_MISSING_FAULTS, "")
      << "the text to replace is gone: give plant() the new one";
}

TEST(PlantedFaults, TheCopiesAreSoundWithoutOne) {
  TestAllocator::install();
  int runs = 0;
  planted_fault = 0;
  EXPECT_EQ(runs_that_fail(&runs), 0);
}

class PlantedFaultTest : public testing::TestWithParam<Fault> {};

TEST_P(PlantedFaultTest, IsSeen) {
  TestAllocator::install();
  int runs = 0;
  planted_fault = GetParam().number;
  const int failed = runs_that_fail(&runs);
  planted_fault = 0;
  RecordProperty("failed", failed);
  EXPECT_GT(failed, 0) << "nobody saw that " << GetParam().what;
  std::cout << GetParam().what << ": " << failed << " of " << runs << '\n';
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedFaultTest, testing::ValuesIn(kFaults),
                         [](const auto& info) {
                           return "Fault" + std::to_string(info.param.number);
                         });

}  // namespace
}  // namespace toy
}  // namespace kvcache
