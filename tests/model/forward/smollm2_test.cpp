// smollm2_test.cpp - SmolLM2-135M-Instruct in float32 against transformers.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/model/forward/reference_data.h"
#include "tests/support/model_path.h"

namespace kvcache::testing {
namespace {

// Float32 sums in another order through 30 layers.
constexpr double kTolerance = 0.02;
constexpr double kClearMargin = 0.1;  // of a greedy step, in logits
constexpr double kMostUnclear = 0.05;

class SmolLm2Test : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string path = smollm2_path().string();
    if (!path.empty()) model = model::load_model(path, {.dtype = at::kFloat});
  }
  static void TearDownTestSuite() { model.reset(); }
  void SetUp() override {
    if (model == nullptr) GTEST_SKIP() << kNoModel;
    numbers = read_json("smollm2.json");
  }
  static std::shared_ptr<const Transformer> model;
  nlohmann::json numbers;
};
std::shared_ptr<const Transformer> SmolLm2Test::model;

TEST_F(SmolLm2Test, LogProbabilitiesAreTransformers) {
  for (const auto& prompt : numbers["prompts"]) {
    SCOPED_TRACE(prompt["name"].get<std::string>());
    const Ids tokens = prompt["tokens"];
    const Tensor logits = all_logits(*model, tokens, Kind::kPreallocated, 256);
    EXPECT_LT(
        largest_difference(log_probs(logits, tokens),
                           prompt["log_probs"].get<std::vector<double>>()),
        kTolerance);
  }
}

// Teacher-forced: each step is judged by itself, where the reference is clear.
TEST_F(SmolLm2Test, GreedyTextIsTransformersWhereItIsClear) {
  int64_t steps = 0, unclear = 0;
  for (const auto& prompt : numbers["prompts"]) {
    if (!prompt.contains("greedy")) continue;
    SCOPED_TRACE(prompt["name"].get<std::string>());
    Ids tokens = prompt["tokens"];
    const Ids wanted = prompt["greedy"]["tokens"];
    const std::vector<double> margins = prompt["greedy"]["margins"];
    const auto from = static_cast<int64_t>(tokens.size()) - 1;
    tokens.insert(tokens.end(), wanted.begin(), wanted.end());
    const Tensor best =
        all_logits(*model, tokens, Kind::kConcat, 256).argmax(-1);
    for (size_t i = 0; i < wanted.size(); ++i) {
      ++steps;
      if (margins[i] <= kClearMargin) {
        ++unclear;
        continue;
      }
      EXPECT_EQ(best[from + static_cast<int64_t>(i)].item<int64_t>(), wanted[i])
          << "step " << i;
    }
  }
  std::printf("%lld of %lld greedy steps are left out: margin below %g\n",
              static_cast<long long>(unclear), static_cast<long long>(steps),
              kClearMargin);
  ASSERT_GT(steps, 100);
  EXPECT_LE(static_cast<double>(unclear),
            kMostUnclear * static_cast<double>(steps));
}

TEST_F(SmolLm2Test, ChunksGiveTheSameBits) {
  const Ids tokens = numbers["prompts"][1]["tokens"];
  const Tensor whole = all_logits(*model, tokens, Kind::kNone, 0);
  for (const int64_t chunk : {5, 64}) {
    EXPECT_TRUE(at::equal(
        all_logits(*model, tokens, Kind::kPreallocated, chunk), whole));
  }
}

}  // namespace
}  // namespace kvcache::testing
