// transformer_test.cpp - what a forward refuses, and what a cache must fit.
#include "kvcache/model/transformer.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"

namespace kvcache::testing {
namespace {

using ::testing::HasSubstr;

class TransformerTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Transformer> model = load_tiny("llama");
};

TEST_F(TransformerTest, DescribesTheCacheItNeeds) {
  const CacheSpec spec = load_tiny("mistral")->cache_spec(3, 100);
  EXPECT_EQ(spec.rows, 3);
  EXPECT_EQ(spec.capacity, 100);
  EXPECT_EQ(spec.dtype, at::kFloat);
  ASSERT_EQ(spec.layers.size(), 3u);
  for (const LayerSpec& layer : spec.layers) {
    EXPECT_EQ(std::get<AttentionLayer>(layer), (AttentionLayer{2, 8, 6}));
  }
  EXPECT_NO_THROW(load_tiny("mistral")->check_cache(spec));
}

// A.1: the mismatch names the layer.
TEST_F(TransformerTest, A1ACacheOfAnotherModelIsRefusedByLayer) {
  CacheSpec spec = model->cache_spec(1, 100);
  spec.layers[1] = AttentionLayer{4, 8, 0};
  EXPECT_EQ(error_text([&] { model->check_cache(spec); }),
            "[Transformer::check_cache] layer 1 must be attention with 2 "
            "key/value heads of size 8 but the cache has attention with 4 "
            "key/value heads of size 8; make the cache from cache_spec().");
  spec.layers[1] = RecurrentLayer{};
  EXPECT_THAT(error_text([&] { model->check_cache(spec); }),
              HasSubstr("layer 1 must be attention with 2 key/value heads of "
                        "size 8 but the cache has a recurrent layer"));
  spec.layers.pop_back();
  EXPECT_THAT(error_text([&] { model->check_cache(spec); }),
              HasSubstr("the cache must have layers 0 to 1 but has 1 layers "
                        "from 0 on"));
  spec = model->cache_spec(1, 100);
  spec.dtype = at::kBFloat16;
  EXPECT_THAT(error_text([&] { model->check_cache(spec); }),
              HasSubstr("the cache must hold Float but holds BFloat16"));
}

TEST_F(TransformerTest, IdsOfAnotherShapeOrTypeAreRefused) {
  const auto run = [&](const Tensor& ids) {
    return error_text([&] { model->forward(ids, {}); });
  };
  EXPECT_THAT(run({}), HasSubstr("but got an undefined tensor"));
  EXPECT_THAT(run(at::zeros({3}, at::kLong)), HasSubstr("but got [3] of Long"));
  EXPECT_THAT(run(at::zeros({1, 0}, at::kLong)),
              HasSubstr("ids must be a non-empty [B, T] of int64"));
  EXPECT_THAT(run(at::zeros({1, 3}, at::kInt)),
              HasSubstr("but got [1, 3] of Int"));
}

TEST_F(TransformerTest, IdsThatAreNoTokensAreRefusedBeforeAnythingRuns) {
  for (const int64_t id :
       {int64_t{-1}, int64_t{64}, std::numeric_limits<int64_t>::max()}) {
    const Tensor ids = at::zeros({2, 3}, at::kLong);
    ids[1].narrow(0, 2, 1).fill_(id);
    EXPECT_EQ(error_text([&] { model->forward(ids, {}); }),
              c10::str("[Transformer::forward] ids must be in [0, 64) but "
                       "token 2 of row 1 is ",
                       id, "; use the model's own tokenizer."));
  }
  const auto cache = make_cache(Kind::kPreallocated, *model, 1, 8);
  EXPECT_ANY_THROW(step(*model, *cache, at::full({1, 2}, 64, at::kLong)));
  EXPECT_EQ(cache->lengths()[0], 0);
}

TEST_F(TransformerTest, IdsMustBeThoseOfTheStep) {
  const auto cache = make_cache(Kind::kPreallocated, *model, 2, 8);
  Step open = cache->begin_step({.tokens = 3});
  EXPECT_EQ(error_text([&] {
              model->forward(at::zeros({2, 4}, at::kLong), open, {});
            }),
            "[Transformer::forward] ids must be [2, 3] like the step but got "
            "[2, 4]; open the step for these rows and tokens.");
  EXPECT_THAT(error_text([&] {
                model->forward(at::zeros({1, 3}, at::kLong), open, {});
              }),
              HasSubstr("ids must be [2, 3] like the step"));
}

// Learned and rotary positions alike end with the context.
TEST_F(TransformerTest, PositionsBeyondTheContextAreRefused) {
  for (const char* name : {"gpt2", "llama"}) {
    const auto tiny = load_tiny(name);
    const auto wanted =
        "[Transformer::forward] positions must be below the model's context of "
        "128 tokens but token 128 of row 0 is at 128; prefill the cropped "
        "window.";
    EXPECT_EQ(error_text([&] {
                tiny->forward(at::zeros({1, 129}, at::kLong), {});
              }),
              wanted);
    const auto cache = make_cache(Kind::kConcat, *tiny, 1, 200);
    step(*tiny, *cache, at::zeros({1, 128}, at::kLong));
    EXPECT_THAT(error_text([&] {
                  step(*tiny, *cache, at::zeros({1, 1}, at::kLong));
                }),
                HasSubstr("token 0 of row 0 is at 128"));
    EXPECT_EQ(cache->lengths()[0], 128);
  }
}

TEST_F(TransformerTest, AStepOfAnotherCacheIsRefused) {
  const auto other = make_cache(Kind::kPreallocated, *load_tiny("qwen3"), 1, 8);
  EXPECT_ANY_THROW(step(*model, *other, at::zeros({1, 2}, at::kLong)));
  EXPECT_EQ(other->lengths()[0], 0);
}

TEST_F(TransformerTest, OtherTypesThanFloat32AndBfloat16AreRefused) {
  EXPECT_THAT(error_text([] { load_tiny("llama", at::kHalf); }),
              HasSubstr("dtype must be float32 or bfloat16 but got Half"));
}

// float16 files run in bfloat16, quantised ones as they are.
TEST_F(TransformerTest, AutoTypeIsTheFilesOwn) {
  const auto automatic = [](const std::string& name) {
    return model::load_model(data_path(name))->dtype();
  };
  EXPECT_EQ(automatic("llama"), at::kFloat);
  EXPECT_EQ(automatic("llama_rope3"), at::kBFloat16);
  EXPECT_EQ(automatic("llama_bias"), at::kBFloat16);
  const auto quantised = model::load_model(data_path("llama/model-q8_0.gguf"));
  EXPECT_EQ(quantised->packing(), model::WeightPacking::kAuto);
  EXPECT_EQ(quantised->dtype(), at::kBFloat16);
}

TEST_F(TransformerTest, LoadingReportsItsProgress) {
  std::vector<double> seen;
  model::load_model(data_path("qwen2"), {.progress = [&](double fraction) {
                      seen.push_back(fraction);
                    }});
  ASSERT_GE(seen.size(), 4u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_GT(seen.front(), 0.0);
  EXPECT_EQ(seen.back(), 1.0);
}

}  // namespace
}  // namespace kvcache::testing
