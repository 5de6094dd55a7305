// nan_rows_test.cpp - a sequence that has become NaN, and NaN in dead tokens,
// change no bit of the sequences beside them.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "tests/model/forward/reference_data.h"

namespace kvcache::testing {
namespace {

constexpr int64_t kPoison = 5;  // the token whose embedding is NaN

// The weights of another source but for that embedding.
class PoisonedWeights final : public model::WeightSource {
 public:
  explicit PoisonedWeights(std::unique_ptr<model::WeightSource> inner)
      : inner_(std::move(inner)) {
    for (const model::WeightInfo& info : inner_->tensors()) add(info);
  }
  void release_pages() const noexcept override { inner_->release_pages(); }

 private:
  at::Tensor do_read(const model::WeightInfo& info,
                     c10::ScalarType dtype) const override {
    return inner_->read(info.name, dtype);
  }
  void do_read_rows(const model::WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    inner_->read_rows(info.name, first, count, out);
    if (first == kPoison && info.name == "token_embd.weight") {
      std::fill(out, out + info.shape[1],
                std::numeric_limits<float>::quiet_NaN());
    }
  }
  std::unique_ptr<model::WeightSource> inner_;
};

class NanRowsTest : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    model::OpenedModel opened = model::open_model(data_path("llama"));
    model = std::make_shared<const Transformer>(
        opened.config,
        std::make_shared<PoisonedWeights>(std::move(opened.weights)),
        model::LoadOptions{.dtype = GetParam()});
    tokens =
        read_json("llama/expected.json")["prompts"][3]["tokens"].get<Ids>();
    std::replace(tokens.begin(), tokens.end(), kPoison, int64_t{6});
    alone = model->forward(as_row(tokens), {.all_logits = true});
  }
  std::shared_ptr<const Transformer> model;
  Ids tokens;
  Tensor alone;
};

TEST_P(NanRowsTest, ANeighbourOfNaNKeepsItsBits) {
  ASSERT_TRUE(alone.isfinite().all().item<bool>());
  const auto total = static_cast<int64_t>(tokens.size());
  for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
    const auto cache = make_cache(kind, *model, 3, total);
    const Tensor poison = at::full({1, total}, kPoison, at::kLong);
    const Tensor ids = at::cat({poison, as_row(tokens), poison});
    for (int64_t at = 0; at < total; at += 4) {
      const int64_t count = std::min<int64_t>(4, total - at);
      const Tensor logits = step(*model, *cache, ids.narrow(1, at, count));
      EXPECT_TRUE(at::equal(logits[1], alone[0].narrow(0, at, count)));
      EXPECT_TRUE(logits[0].isnan().all().item<bool>());
    }
  }
}

TEST_P(NanRowsTest, DeadTokensOfNaNChangeNothing) {
  const auto total = static_cast<int64_t>(tokens.size());
  const auto cache = make_cache(Kind::kPreallocated, *model, 2, total + 3);
  const Tensor padding = at::full({2, 3}, kPoison, at::kLong);
  const Tensor ids =
      at::cat({padding, at::cat({as_row(tokens), as_row(tokens)}), padding}, 1);
  const Ids skip = {3, 3}, count = {total, 0};
  const Tensor logits = step(*model, *cache, ids, true, skip, count);
  EXPECT_TRUE(at::equal(logits[0].narrow(0, 3, total), alone[0]));
  EXPECT_TRUE(logits[1].eq(0).all().item<bool>());
}

// A row that was NaN serves its next request as if new.
TEST_P(NanRowsTest, ARowRecoversAfterReset) {
  const auto total = static_cast<int64_t>(tokens.size());
  const auto cache = make_cache(Kind::kPreallocated, *model, 1, total);
  step(*model, *cache, at::full({1, total}, kPoison, at::kLong));
  cache->reset();
  EXPECT_TRUE(at::equal(step(*model, *cache, as_row(tokens)), alone));
}

INSTANTIATE_TEST_SUITE_P(Types, NanRowsTest,
                         ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param));
                         });

}  // namespace
}  // namespace kvcache::testing
