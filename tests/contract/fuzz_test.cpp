// Random verbs on every kind against a stateless oracle, bit for bit.
//
// KVCACHE_FUZZ_SEEDS and KVCACHE_FUZZ_VERBS make it longer; a failure prints
// its seed, and KVCACHE_FUZZ_FIRST starts there.
#include <gtest/gtest.h>

#include <cstdlib>
#include <tuple>

#include "tests/support/toy_allocator.h"
#include "tests/support/toy_fuzz.h"

namespace kvcache::toy {
namespace {

unsigned number_from(const char* variable, unsigned otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr
             ? otherwise
             : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

using Case = std::tuple<size_t, Variant, int64_t, at::ScalarType>;

class FuzzTest : public testing::TestWithParam<Case> {};

TEST_P(FuzzTest, EqualsTheOracleAfterEveryVerb) {
  TestAllocator::install();  // fresh memory is NaN
  const auto [kind, variant, rows, dtype] = GetParam();
  const unsigned first = number_from("KVCACHE_FUZZ_FIRST", 0);
  const unsigned seeds = number_from("KVCACHE_FUZZ_SEEDS", kinds()[kind].seeds);
  const auto verbs = static_cast<int>(number_from("KVCACHE_FUZZ_VERBS", 120));
  for (unsigned seed = first; seed < first + seeds; ++seed) {
    const std::string error = run_fuzz({.kind = &kinds()[kind],
                                        .variant = variant,
                                        .rows = rows,
                                        .dtype = dtype,
                                        .seed = seed,
                                        .verbs = verbs});
    ASSERT_EQ(error, "");
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto [kind, variant, rows, dtype] = info.param;
  return kinds()[kind].name + name_of(variant) + "Rows" + std::to_string(rows) +
         (dtype == at::kFloat ? "Float" : "BFloat16");
}

INSTANTIATE_TEST_SUITE_P(
    EveryKind, FuzzTest,
    testing::Combine(testing::Range(size_t{0}, kinds().size()),
                     testing::ValuesIn(kVariants),
                     testing::Values(int64_t{1}, int64_t{3}),
                     testing::Values(at::kFloat, at::kBFloat16)),
    case_name);

}  // namespace
}  // namespace kvcache::toy
