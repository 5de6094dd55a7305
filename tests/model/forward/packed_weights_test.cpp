// packed_weights_test.cpp - models whose weights stay quantised, against
// float32 of the same weights.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "kvcache/window_cache.h"
#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"
#include "tests/support/model_path.h"
#include "tests/support/random_model.h"

namespace kvcache::testing {
namespace {

using model::WeightPacking;
using ::testing::HasSubstr;

// Of SmolLM2's log-probabilities. bfloat16 K and V are most of the difference;
// 8-bit activations, as others have them, differ by some 0.08 on average.
constexpr double kMeanDifference = 0.02;
constexpr double kMostDifference = 0.25;
constexpr double kClearMargin = 0.1;  // of a greedy step, in logits

struct Differences {
  double mean = 0, most = 0;
};

Differences differences(const std::vector<double>& a,
                        const std::vector<double>& b) {
  Differences found;
  EXPECT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const double each = std::abs(a[i] - b[i]);
    EXPECT_TRUE(std::isfinite(each));
    found.mean += each / static_cast<double>(a.size());
    found.most = std::max(found.most, each);
  }
  return found;
}

class PackedSmolLm2Test : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string path = smollm2_path().string();
    if (path.empty()) return;
    packed = model::load_model(path);
    exact = model::load_model(path, {.dtype = at::kFloat});
  }
  static void TearDownTestSuite() {
    packed.reset();
    exact.reset();
  }
  void SetUp() override {
    if (packed == nullptr) GTEST_SKIP() << kNoModel;
    numbers = read_json("smollm2.json");
  }
  Ids prompt(const std::string& name) const {
    for (const auto& each : numbers["prompts"]) {
      if (each["name"] == name) return each["tokens"];
    }
    return {};
  }
  static std::shared_ptr<const Transformer> packed, exact;
  nlohmann::json numbers;
};
std::shared_ptr<const Transformer> PackedSmolLm2Test::packed;
std::shared_ptr<const Transformer> PackedSmolLm2Test::exact;

TEST_F(PackedSmolLm2Test, IsWhatAQuantisedFileLoadsAs) {
  EXPECT_EQ(packed->packing(), WeightPacking::kAuto);
  EXPECT_EQ(packed->dtype(), at::kBFloat16);
  EXPECT_EQ(exact->packing(), WeightPacking::kNone);
  EXPECT_TRUE(packed->row_exact(Role::kDecode));
  EXPECT_TRUE(packed->roles_agree());
  // 4-bit matrices and an 8-bit head instead of 538 MB.
  EXPECT_LT(packed->weight_bytes(), size_t{150} << 20);
}

TEST_F(PackedSmolLm2Test, LogProbabilitiesAreThoseOfFloat32) {
  for (const auto& each : numbers["prompts"]) {
    const Ids tokens = each["tokens"];
    const auto found = differences(
        log_probs(all_logits(*packed, tokens, Kind::kPreallocated, 256),
                  tokens),
        each["log_probs"].get<std::vector<double>>());
    std::printf("%s, %zu tokens: mean |d| %.4f, largest %.4f\n",
                each["name"].get<std::string>().c_str(), tokens.size(),
                found.mean, found.most);
    EXPECT_LT(found.mean, kMeanDifference);
    EXPECT_LT(found.most, kMostDifference);
  }
}

// One token at a time, and prefilled: the same arithmetic.
TEST_F(PackedSmolLm2Test, PrefillAndDecodeGiveTheSameBits) {
  const Ids tokens = prompt("raw_code");
  const Tensor whole = all_logits(*packed, tokens, Kind::kNone, 0);
  for (const int64_t chunk : {1, 2, 5, 64}) {
    for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
      EXPECT_TRUE(at::equal(all_logits(*packed, tokens, kind, chunk), whole));
    }
  }
}

TEST_F(PackedSmolLm2Test, GreedyTextOf200TokensIsFloat32sWhereThatIsClear) {
  for (const char* name : {"chat", "raw"}) {
    SCOPED_TRACE(name);
    Ids tokens = prompt(name);
    const Ids text = greedy(*packed, tokens, Kind::kPreallocated, 200);
    const auto from = static_cast<int64_t>(tokens.size()) - 1;
    tokens.insert(tokens.end(), text.begin(), text.end());
    const Tensor logits = all_logits(*exact, tokens, Kind::kNone, 0);
    const auto [values, indices] = logits.topk(2, -1);
    int64_t unclear = 0;
    for (int64_t i = 0; i < 200; ++i) {
      const Tensor top = values[from + i];
      if (top[0].item<double>() - top[1].item<double>() <= kClearMargin) {
        ++unclear;
        continue;
      }
      EXPECT_EQ(indices[from + i][0].item<int64_t>(),
                text[static_cast<size_t>(i)])
          << "token " << i;
    }
    EXPECT_LT(unclear, 30);
  }
}

// Every family, from files that were never quantised: rounded to 8 bits.
TEST(PackedWeights, FamiliesAreCloseToFloat32) {
  // Tiny models of random weights: logits of some 5, 8-bit weights.
  constexpr double kTolerance = 0.15;
  for (const char* name : {"gpt2", "llama", "llama_rope3", "llama_bias",
                           "mistral", "qwen2", "qwen3", "qwen3_5"}) {
    SCOPED_TRACE(name);
    const Ids tokens =
        read_json(std::string(name) + "/expected.json")["prompts"][0]["tokens"];
    const auto exact = load_tiny(name);
    const auto packed = load_tiny(name, at::kFloat, WeightPacking::kAuto);
    const Tensor wanted = all_logits(*exact, tokens, Kind::kNone, 0);
    const Tensor found = all_logits(*packed, tokens, Kind::kPreallocated, 3);
    EXPECT_LT((found - wanted).abs().max().item<double>(), kTolerance);
    EXPECT_LT(packed->weight_bytes(), exact->weight_bytes());
  }
}

// A window and its graph replay the bits of the stateless forward.
TEST(PackedWeights, AStaticWindowGivesTheSameBits) {
  const auto model =
      random_model(hybrid_config(), at::kBFloat16, model::ForwardKind::kAuto,
                   WeightPacking::kQ4);
  const Ids tokens = {1, 9, 4, 60, 33, 2, 17};
  const Tensor wanted = all_logits(*model, tokens, Kind::kNone, 0);
  WindowCache cache(model->cache_spec(1, 32));
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Tensor logits = step(*model, cache, as_row({&tokens[i], 1}));
    EXPECT_TRUE(at::equal(logits[0][0], wanted[static_cast<int64_t>(i)])) << i;
  }
}

TEST(PackedWeights, ChoicesThatDoNotFitAreRefused) {
  EXPECT_THAT(error_text([] {
                random_model(hybrid_config(), at::kFloat,
                             model::ForwardKind::kOps, WeightPacking::kQ8);
              }),
              HasSubstr("packed weights must run on the CPU"));
  const auto model =
      random_model(hybrid_config(), at::kBFloat16, model::ForwardKind::kAuto,
                   WeightPacking::kQ8);
  CacheSpec spec = model->cache_spec(1, 8);
  spec.conv_dtype.reset();
  EXPECT_THAT(error_text([&] { model->check_cache(spec); }),
              HasSubstr("must hold convolution inputs of Float"));
}

}  // namespace
}  // namespace kvcache::testing
