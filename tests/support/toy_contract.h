// support/toy_contract.h - the fixture of the contract suite: every kind, toy
// variant, row count and dtype.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/support/toy_allocator.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {

using ContractCase = std::tuple<size_t, Variant, int64_t, at::ScalarType>;

class ContractTest : public testing::TestWithParam<ContractCase> {
 protected:
  ContractTest()
      : kind(kinds()[std::get<0>(GetParam())]),
        variant(std::get<1>(GetParam())),
        rows(std::get<2>(GetParam())),
        dtype(std::get<3>(GetParam())),
        model(make_model(variant)),
        hybrid(has_states(model.layers)) {
    TestAllocator::install();  // fresh memory is NaN
  }
  std::unique_ptr<Cache> make(int64_t capacity = 16) const {
    std::unique_ptr<Cache> made =
        kind.make(spec_of(model, rows, capacity, dtype));
    poison(*made);
    return made;
  }
  // Feeds `ids` to every row in steps of `chunk` and checks every number.
  void feed_checked(Cache& cache, Ids before, const Ids& ids, size_t chunk = 0,
                    bool fused = false) const {
    chunk = chunk == 0 ? std::max<size_t>(ids.size(), 1) : chunk;
    for (size_t i = 0; i < ids.size(); i += chunk) {
      const Ids part(ids.begin() + i,
                     ids.begin() + std::min(i + chunk, ids.size()));
      before = joined(before, part);
      const Floats want = last_of(cache, model, before, part.size());
      for (const Floats& got : feed_all(cache, model, part, fused)) {
        ASSERT_EQ(got, want) << "after " << before.size() << " tokens";
      }
    }
  }
  std::vector<int64_t> all(int64_t length) const {
    return std::vector<int64_t>(static_cast<size_t>(rows), length);
  }
  std::vector<int64_t> lengths(const Cache& cache) const {
    return {cache.lengths().begin(), cache.lengths().end()};
  }

  const Kind& kind;
  Variant variant;
  int64_t rows;
  at::ScalarType dtype;
  Model model;
  bool hybrid;
};

inline std::string contract_name(
    const testing::TestParamInfo<ContractCase>& info) {
  const auto& [kind, variant, rows, dtype] = info.param;
  return kinds()[kind].name + name_of(variant) + "Rows" + std::to_string(rows) +
         (dtype == at::kFloat ? "Float" : "BFloat16");
}

// Runs the tests of `fixture`, a ContractTest, on everything.
#define KVCACHE_CONTRACT(fixture)                                   \
  INSTANTIATE_TEST_SUITE_P(                                         \
      EveryKind, fixture,                                           \
      testing::Combine(testing::Range(size_t{0}, kinds().size()),   \
                       testing::ValuesIn(kVariants),                \
                       testing::Values(int64_t{1}, int64_t{3}),     \
                       testing::Values(at::kFloat, at::kBFloat16)), \
      contract_name)

}  // namespace kvcache::toy
