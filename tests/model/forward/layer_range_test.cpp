// layer_range_test.cpp - parts of a model: some layers from given hidden
// states, over a cache of their own; outputs of chosen tokens.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"
#include "tests/support/random_model.h"

namespace kvcache::testing {
namespace {

using model::ForwardKind;
using model::ForwardOptions;
using ::testing::HasSubstr;

const Ids kIds = {5, 60, 17, 3, 3, 41, 9, 22, 0, 63};
constexpr int64_t kLayers = 4, kWidth = 32;

Tensor run(const Transformer& model, Cache& cache, const Tensor& ids,
           const ForwardOptions& options, const StepSpec& spec = {}) {
  StepSpec wanted = spec;
  wanted.tokens = ids.size(1);
  Step open = cache.begin_step(wanted);
  Tensor out = model.forward(ids, open, options);
  open.commit();
  return out;
}

class LayerRangeTest
    : public ::testing::TestWithParam<std::pair<ForwardKind, at::ScalarType>> {
 protected:
  const std::shared_ptr<const Transformer> model =
      random_model(hybrid_config(), GetParam().second, GetParam().first);
  std::unique_ptr<Cache> part(int64_t first, int64_t last,
                              int64_t rows = 1) const {
    return std::make_unique<PreallocatedCache>(
        model->cache_spec(rows, 16, first, last));
  }
};

// In steps of several tokens and of one, cut before each layer.
TEST_P(LayerRangeTest, LowerThenUpperIsTheWhole) {
  const Tensor ids = as_row(kIds);
  for (int64_t cut = 1; cut < kLayers; ++cut) {
    const auto whole = part(0, kLayers), lower = part(0, cut),
               upper = part(cut, kLayers);
    for (const auto& [first, count] :
         {std::pair<int64_t, int64_t>{0, 6}, {6, 1}, {7, 3}}) {
      const Tensor now = ids.narrow(1, first, count);
      const Tensor wanted = run(*model, *whole, now, {.all_logits = true});
      const Tensor hidden = run(*model, *lower, now, {.last_layer = cut});
      EXPECT_EQ(hidden.sizes(), at::IntArrayRef({1, count, kWidth}));
      EXPECT_EQ(hidden.scalar_type(), at::kFloat);
      const Tensor found =
          run(*model, *upper, now,
              {.all_logits = true, .first_layer = cut, .hidden = hidden});
      EXPECT_TRUE(at::equal(found, wanted)) << "cut " << cut;
    }
    EXPECT_EQ(lower->lengths()[0], 10);
    EXPECT_EQ(upper->lengths()[0], 10);
  }
}

TEST_P(LayerRangeTest, WithoutMemoryAsWell) {
  const Tensor ids = as_row(kIds);
  const Tensor wanted = model->forward(ids, {.all_logits = true});
  const Tensor hidden = model->forward(ids, {.last_layer = 2});
  EXPECT_TRUE(at::equal(
      model->forward(ids,
                     {.all_logits = true, .first_layer = 2, .hidden = hidden}),
      wanted));
}

// What leaves the last layer, and the head alone over some of it.
TEST_P(LayerRangeTest, TheHeadRunsAloneOverKeptHiddenStates) {
  const Tensor ids = as_row(kIds);
  const Tensor wanted = model->forward(ids, {});
  const Tensor last = as_row(Ids{9});
  const Tensor hidden =
      model->forward(ids, {.logit_positions = last, .return_hidden = true});
  EXPECT_EQ(hidden.sizes(), at::IntArrayRef({1, 1, kWidth}));
  const Tensor found =
      model->forward(last, {.first_layer = kLayers, .hidden = hidden});
  EXPECT_TRUE(at::equal(found, wanted));
}

// Any order, twice the same, none, and tokens that are dead.
TEST_P(LayerRangeTest, LogitsOfChosenTokensAreThoseOfAll) {
  const Tensor ids = at::cat({as_row(kIds), as_row(kIds)});
  const Ids skip = {0, 4}, count = {8, 5};
  const StepSpec spec{.skip = skip, .count = count};
  const auto all_of = part(0, kLayers, 2), some_of = part(0, kLayers, 2);
  const Tensor all = run(*model, *all_of, ids, {.all_logits = true}, spec);
  const std::vector<Ids> chosen = {{7, 0, 0, -1}, {4, 8, 3, 9}};
  const Tensor positions = at::cat({as_row(chosen[0]), as_row(chosen[1])});
  const Tensor found =
      run(*model, *some_of, ids, {.logit_positions = positions}, spec);
  ASSERT_EQ(found.sizes(), at::IntArrayRef({2, 4, 64}));
  constexpr double kTolerance = 1e-5;  // operators add in another order
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t t =
          chosen[static_cast<size_t>(row)][static_cast<size_t>(i)];
      const Tensor wanted =
          t < 0 ? at::zeros({64}, found.options()) : all[row][t];
      if (GetParam().first == ForwardKind::kPackedCpu) {
        EXPECT_TRUE(at::equal(found[row][i], wanted)) << row << " " << i;
      } else {
        EXPECT_LT(found[row][i].sub(wanted).abs().max().item<double>(),
                  kTolerance);
      }
    }
  }
  EXPECT_TRUE(found[0][3].eq(0).all().item<bool>());
  EXPECT_TRUE(found[1].narrow(0, 2, 2).eq(0).all().item<bool>());
}

// Some of the vocabulary, in the order and as often as they are named.
TEST_P(LayerRangeTest, LogitsOfSomeOfTheVocabulary) {
  const Tensor ids = as_row(kIds);
  const Tensor tokens = as_row(Ids{63, 0, 17, 16, 15, 17})[0];
  const Tensor wanted =
      model->forward(ids, {.all_logits = true}).index_select(2, tokens);
  const Tensor found =
      model->forward(ids, {.all_logits = true, .logit_ids = tokens});
  ASSERT_EQ(found.sizes(), wanted.sizes());
  // Another order of additions than the whole head's, in the dtype.
  const double tolerance = GetParam().second == at::kBFloat16 ? 0.05 : 1e-5;
  EXPECT_LT(found.sub(wanted).abs().max().item<double>(), tolerance);
  // A token alone has the bits that it has among others.
  const Tensor last = model->forward(ids, {.logit_ids = tokens});
  if (GetParam().first == ForwardKind::kPackedCpu) {
    EXPECT_TRUE(at::equal(last, found.narrow(1, 9, 1)));
  }
}

// NaN in rows of hidden states that belong to dead tokens.
TEST_P(LayerRangeTest, HiddenStatesOfDeadTokensAreNotRead) {
  const Tensor ids = as_row(kIds);
  const Ids skip = {2}, count = {5};
  const StepSpec spec{.skip = skip, .count = count};
  const auto lower = part(0, 1), upper = part(1, kLayers), again = part(1, 4);
  Tensor hidden = run(*model, *lower, ids, {.last_layer = 1}, spec);
  EXPECT_TRUE(hidden[0].narrow(0, 0, 2).eq(0).all().item<bool>());
  const Tensor wanted =
      run(*model, *upper, ids, {.first_layer = 1, .hidden = hidden}, spec);
  hidden[0].narrow(0, 0, 2).fill_(std::numeric_limits<double>::quiet_NaN());
  hidden[0].narrow(0, 7, 3).fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(at::equal(
      run(*model, *again, ids, {.first_layer = 1, .hidden = hidden}, spec),
      wanted));
  // `hidden` is the caller's and stays.
  EXPECT_TRUE(hidden[0][0].isnan().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(
    Forwards, LayerRangeTest,
    ::testing::Values(std::pair{ForwardKind::kPackedCpu, at::kFloat},
                      std::pair{ForwardKind::kPackedCpu, at::kBFloat16},
                      std::pair{ForwardKind::kOps, at::kFloat}),
    [](const auto& info) {
      return std::string(info.param.first == ForwardKind::kOps ? "Ops_"
                                                               : "Packed_") +
             c10::toString(info.param.second);
    });

// The tiles of quantised weights hold 16 outputs each: the bits are the same.
TEST(LayerRange, QuantisedHeadsGiveSomeLogitsWithTheBitsOfAll) {
  using enum model::WeightPacking;
  for (const auto packing : {kQ8, kQ4}) {
    const auto model = random_model(hybrid_config(), at::kBFloat16,
                                    ForwardKind::kAuto, packing);
    const Tensor ids = as_row(kIds), tokens = as_row(Ids{63, 0, 15, 16, 0})[0];
    EXPECT_TRUE(at::equal(
        model->forward(ids, {.all_logits = true, .logit_ids = tokens}),
        model->forward(ids, {.all_logits = true}).index_select(2, tokens)));
  }
}

// Bad requests name what they are about, before any layer runs.
TEST(LayerRange, WrongRequestsAreRefused) {
  const auto model = random_model(hybrid_config());
  const Tensor ids = as_row(kIds);
  const auto error = [&](const ForwardOptions& options) {
    return error_text([&] { model->forward(ids, options); });
  };
  EXPECT_EQ(error({.last_layer = 5}),
            "[Transformer::forward] layers must be a range within [0, 4) but "
            "got [0, 5); count them from 0.");
  EXPECT_THAT(error({.first_layer = 3, .last_layer = 2}),
              HasSubstr("but got [3, 2)"));
  EXPECT_THAT(error({.first_layer = -1}), HasSubstr("but got [-1, 4)"));
  EXPECT_EQ(error({.first_layer = 2}),
            "[Transformer::forward] what enters layer 2 must be given but "
            "`hidden` is undefined; pass what an earlier forward returned from "
            "its last layer.");
  EXPECT_EQ(error({.first_layer = 2, .hidden = at::zeros({1, 9, 32})}),
            "[Transformer::forward] hidden must be [1, 10, 32] of Float on cpu "
            "but got [1, 9, 32] of Float on cpu; pass what an earlier forward "
            "of the same tokens returned.");
  EXPECT_THAT(error({.first_layer = 2,
                     .hidden = at::zeros({1, 10, 32}, at::kBFloat16)}),
              HasSubstr("but got [1, 10, 32] of BFloat16"));
  EXPECT_EQ(error({.logit_positions = as_row(Ids{3, 10})}),
            "[Transformer::forward] logit_positions must be in [-1, 10) but "
            "one of row 0 is 10; count the tokens of the step.");
  EXPECT_THAT(error({.logit_positions = at::zeros({2, 1}, at::kLong)}),
              HasSubstr("logit_positions must be [1, n] of Long with n above 0 "
                        "but got [2, 1] of Long on cpu"));
  EXPECT_THAT(error({.all_logits = true, .logit_positions = as_row(Ids{3})}),
              HasSubstr("either all logits or those of logit_positions"));
  EXPECT_EQ(error({.logit_ids = as_row(Ids{3, 64})[0]}),
            "[Transformer::forward] logit_ids must be in [0, 64) but number 1 "
            "is 64; use the model's own tokenizer.");
  EXPECT_THAT(error({.logit_ids = as_row(Ids{3})}),
              HasSubstr("logit_ids must be [N] of Long with N above 0, and "
                        "logits asked for, but got [1, 1] of Long on cpu"));
  EXPECT_THAT(error({.logit_ids = as_row(Ids{3})[0], .last_layer = 2}),
              HasSubstr("for hidden states"));
  EXPECT_EQ(error_text([&] { model->cache_spec(1, 8, 2, 2); }),
            "[Transformer::cache_spec] layers must be a range within [0, 4) "
            "that is not empty but got [2, 2); count them from 0.");
}

// A cache of a part has no other layers, and says so.
TEST(LayerRange, ACacheOfAPartIsForThatPart) {
  const auto model = random_model(hybrid_config());
  PreallocatedCache upper(model->cache_spec(1, 8, 2, 4));
  EXPECT_EQ(upper.spec().first_layer, 2);
  EXPECT_THAT(error_text([&] { model->check_cache(upper.spec()); }),
              HasSubstr("layers 0 to 3 but has 2 layers from 2 on"));
  EXPECT_THAT(error_text([&] { run(*model, upper, as_row(Ids{1}), {}); }),
              HasSubstr("layer must be in [2, 4) but got 0"));
  EXPECT_EQ(upper.lengths()[0], 0);
  const Tensor hidden = at::zeros({1, 1, kWidth});
  EXPECT_THAT(error_text([&] {
                run(*model, upper, as_row(Ids{1}),
                    {.first_layer = 2, .last_layer = 3, .hidden = hidden});
              }),
              HasSubstr("layer 3 was left out"));
}

}  // namespace
}  // namespace kvcache::testing
