// cases_test.cpp - reports against other programs, area "model, RoPE, masks".
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tests/model/forward/reference_data.h"

namespace kvcache::testing {
namespace {

constexpr double kTolerance = 1e-4;  // of float32 logits of size 3

Ids tokens_of(const std::string& name, size_t prompt) {
  return read_json(name + "/expected.json")["prompts"][prompt]["tokens"]
      .get<Ids>();
}

// K65 pytorch/pytorch#108108: causal with more keys than queries must be
// aligned to the end, for a block of 3 and for a single token.
TEST(ModelCases, K65CausalIsAlignedToTheEnd) {
  const auto model = load_tiny("llama");
  const Ids tokens = tokens_of("llama", 3);
  const Tensor whole = model->forward(as_row(tokens), {.all_logits = true});
  for (const int64_t block : {3, 1}) {
    const auto cache = make_cache(Kind::kPreallocated, *model, 1, 16);
    step(*model, *cache, as_row(tokens).narrow(1, 0, 5));
    const Tensor found =
        step(*model, *cache, as_row(tokens).narrow(1, 5, block));
    EXPECT_TRUE(at::equal(found, whole.narrow(1, 5, block))) << block;
  }
}

// K66 pytorch/pytorch#103749: rows without any visible key must not be NaN.
TEST(ModelCases, K66FullyMaskedRowsStayFinite) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = load_tiny("llama", dtype);
    const Tensor ids = at::full({3, 4}, 7, at::kLong);
    const auto cache = make_cache(Kind::kPreallocated, *model, 3, 8);
    // pad pad pad x; x x x x; a row that is all padding
    const Ids skip = {3, 0, 4}, count = {1, 4, 0};
    const Tensor logits = step(*model, *cache, ids, true, skip, count);
    EXPECT_TRUE(logits.isfinite().all().item<bool>());
    const Tensor four =
        model->forward(ids.narrow(0, 0, 1), {.all_logits = true});
    EXPECT_TRUE(at::equal(logits[1], four[0]));
    EXPECT_TRUE(at::equal(logits[0][3], four[0][0]));
    EXPECT_TRUE(logits[2].eq(0).all().item<bool>());
  }
}

// K67 unslothai/unsloth#4078: each row counts positions from its own start.
TEST(ModelCases, K67PositionsArePerRowInALeftPaddedBatch) {
  for (const char* name : {"llama", "gpt2"}) {
    const auto model = load_tiny(name);
    const Ids tokens = tokens_of(name, 3);
    const auto cache = make_cache(Kind::kPreallocated, *model, 2, 16);
    const Tensor six = as_row(tokens).narrow(1, 0, 6);
    const Tensor two = at::cat(
        {at::zeros({1, 4}, at::kLong), as_row(tokens).narrow(1, 0, 2)}, 1);
    const Ids skip = {4, 0};
    {
      Step open = cache->begin_step({.tokens = 6, .skip = skip});
      const Tensor positions = open.positions();
      EXPECT_EQ(positions[0][4].item<int64_t>(), 0);
      EXPECT_EQ(positions[0][5].item<int64_t>(), 1);
      EXPECT_EQ(positions[1][5].item<int64_t>(), 5);
      model->forward(at::cat({two, six}), open, {});
      open.commit();
    }
    for (int64_t i = 0; i < 3; ++i) {
      Step open = cache->begin_step();
      EXPECT_EQ(open.positions()[0][0].item<int64_t>(), 2 + i);
      EXPECT_EQ(open.positions()[1][0].item<int64_t>(), 6 + i);
      const Tensor next = at::cat({as_row(tokens).narrow(1, 2 + i, 1),
                                   as_row(tokens).narrow(1, 6 + i, 1)});
      const Tensor logits = model->forward(next, open, {.role = Role::kDecode});
      open.commit();
      const Tensor whole = model->forward(as_row(tokens), {.all_logits = true});
      EXPECT_TRUE(at::equal(logits[0][0], whole[0][2 + i])) << name;
      EXPECT_TRUE(at::equal(logits[1][0], whole[0][6 + i])) << name;
    }
  }
}

// K68 ml-explore/mlx-lm#93: learned positions go on from the cached length.
TEST(ModelCases, K68LearnedPositionsContinueBehindTheCache) {
  const auto model = load_tiny("gpt2");
  const Ids tokens = tokens_of("gpt2", 2);
  ASSERT_EQ(tokens.size(), 5u);
  const Tensor at_once = model->forward(as_row(tokens), {.all_logits = true});
  for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
    const auto cache = make_cache(kind, *model, 1, 8);
    step(*model, *cache, as_row(tokens).narrow(1, 0, 3));
    for (int64_t i = 3; i < 5; ++i) {
      const Tensor found = step(*model, *cache, as_row(tokens).narrow(1, i, 1));
      EXPECT_TRUE(at::equal(found[0][0], at_once[0][i]));
    }
  }
}

// K70 huggingface/candle#3520: a bfloat16 model far along gives what float32
// does, up to bfloat16's own rounding; with tables in bfloat16 it does not.
TEST(ModelCases, K70Bfloat16ModelsKeepTheirPositions) {
  const auto wide = load_tiny("llama_rope3");
  const auto narrow = load_tiny("llama_rope3", at::kBFloat16);
  Ids tokens;
  for (int64_t i = 0; i < 500; ++i) tokens.push_back(i * 37 % 256);
  const auto last = [&](const Transformer& model) {
    return at::log_softmax(model.forward(as_row(tokens), {})[0][0], -1);
  };
  const double apart =
      last(*wide).sub(last(*narrow)).abs().max().item<double>();
  EXPECT_LT(apart, 0.25);  // logits of size 10 in steps of 2^-5, three layers
}

// K71 lablup/mlxcel#1355: rope_scaling is applied, see rotary_test.cpp for the
// frequencies; here the model that has it differs from one without.
TEST(ModelCases, K71ScalingChangesTheModel) {
  const model::OpenedModel opened = model::open_model(data_path("llama_rope3"));
  EXPECT_EQ(opened.config.rope.scaling, model::RopeScaling::kLlama3);
  model::ModelConfig plain = opened.config;
  plain.rope.scaling = model::RopeScaling::kNone;
  model::OpenedModel again = model::open_model(data_path("llama_rope3"));
  const Transformer without(plain, std::move(again.weights));
  const auto with = load_tiny("llama_rope3");
  const Ids tokens = tokens_of("llama_rope3", 4);
  const Tensor a = with->forward(as_row(tokens), {});
  const Tensor b = without.forward(as_row(tokens), {});
  EXPECT_GT(a.sub(b).abs().max().item<double>(), 100 * kTolerance);
}

}  // namespace
}  // namespace kvcache::testing
