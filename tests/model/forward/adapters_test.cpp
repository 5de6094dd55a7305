// adapters_test.cpp - rows that run with adapters: PEFT's numbers, and bits
// that depend on nothing but the row.
#include "kvcache/model/adapter.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"
#include "tests/support/random_model.h"

namespace kvcache::testing {
namespace {

using model::Adapter;
using model::ForwardKind;
using model::ForwardOptions;
using ::testing::HasSubstr;

// Float32 sums in another order; the tiny models have logits of size 3.
constexpr double kTolerance = 1e-4;

std::shared_ptr<const Transformer> adapted(
    const std::string& path, const std::vector<std::string>& names,
    at::ScalarType dtype = at::kFloat,
    ForwardKind forward = ForwardKind::kAuto) {
  const auto model =
      model::load_model(data_path(path), {.dtype = dtype, .forward = forward});
  std::vector<Adapter> adapters;
  for (const std::string& name : names) {
    adapters.push_back(model::load_adapter(data_path("adapters/" + name), name,
                                           model->config()));
  }
  return model->with_adapters(adapters);
}

Tensor numbers(const Ids& values) { return at::tensor(values, at::kLong); }

// A forward of rows [B, T] that names adapters, in steps of `chunk` tokens.
Tensor run(const Transformer& model, const Tensor& ids, const Ids& adapters,
           int64_t chunk, const Ids& from = {}) {
  PreallocatedCache cache(model.cache_spec(ids.size(0), ids.size(1)));
  std::vector<Tensor> parts;
  for (int64_t at = 0; at < ids.size(1); at += chunk) {
    const Tensor now = ids.narrow(1, at, std::min(chunk, ids.size(1) - at));
    ForwardOptions options{.all_logits = true};
    if (!adapters.empty()) options.adapters = numbers(adapters);
    if (!from.empty()) options.adapters_from = numbers(from);
    Step step = cache.begin_step({.tokens = now.size(1)});
    parts.push_back(model.forward(now, step, options));
    step.commit();
  }
  return at::cat(parts, 1);
}

struct Variant {
  std::string model;
  std::string adapter;
  ForwardKind forward = ForwardKind::kPackedCpu;
};

class PeftNumbersTest : public ::testing::TestWithParam<Variant> {};

TEST_P(PeftNumbersTest, AreOurs) {
  const auto& [path, name, forward] = GetParam();
  const auto model = adapted(path, {name}, at::kFloat, forward);
  const nlohmann::json wanted =
      read_json("adapters/" + name + "/expected.json");
  const Ids tokens = wanted["tokens"];
  for (const int64_t chunk : {1, 7, 256}) {
    const Tensor logits = run(*model, as_row(tokens), {0}, chunk)[0];
    EXPECT_LT(
        largest_difference(log_probs(logits, tokens),
                           wanted["log_probs"].get<std::vector<double>>()),
        kTolerance);
    const Tensor last = logits[-1].to(at::kDouble).contiguous();
    const double* values = last.const_data_ptr<double>();
    EXPECT_LT(
        largest_difference({values, values + last.numel()},
                           wanted["last_logits"].get<std::vector<double>>()),
        kTolerance);
  }
  const Tensor stateless = model->forward(
      as_row(tokens), {.all_logits = true, .adapters = numbers({0})})[0];
  EXPECT_LT(largest_difference(log_probs(stateless, tokens),
                               wanted["log_probs"].get<std::vector<double>>()),
            kTolerance);
}

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const ForwardKind forward :
       {ForwardKind::kPackedCpu, ForwardKind::kOps}) {
    for (const auto& [model, adapter] :
         std::vector<std::pair<std::string, std::string>>{
             {"llama", "llama_all"},
             {"llama/model.gguf", "llama_all"},
             {"llama", "llama_upper"},
             {"gpt2", "gpt2_all"},
             {"gpt2/model.gguf", "gpt2_all"},
             {"qwen3", "qwen3_all"},
             {"llama_rope3", "talker_all"},
             {"llama_rope3", "talker_upper"},
             {"qwen3_5", "qwen3_5_all"},
             {"qwen3_5/model.gguf", "qwen3_5_all"}}) {
      all.push_back({model, adapter, forward});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, PeftNumbersTest, ::testing::ValuesIn(variants()));

class AdapterRowsTest : public ::testing::TestWithParam<Running> {
 protected:
  const std::shared_ptr<const Transformer> base =
      random_model(hybrid_config(), GetParam().dtype, ForwardKind::kAuto,
                   GetParam().packing);
  const std::shared_ptr<const Transformer> model =
      base->with_adapters({random_adapter(base->config(), "a", 3),
                           random_adapter(base->config(), "b", 18)});
  const Tensor ids = at::cat({as_row(Ids{5, 60, 17, 3, 3, 41, 9, 22, 0, 63}),
                              as_row(Ids{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}),
                              as_row(Ids{5, 60, 17, 3, 3, 41, 9, 22, 0, 63}),
                              as_row(Ids{9, 9, 9, 1, 1, 1, 5, 5, 5, 5})});
};

// In batches of any make-up, cut anywhere: each row has its own bits.
TEST_P(AdapterRowsTest, ARowIsTheRowAlone) {
  const Ids adapters = {0, 1, -1, 1};
  const Tensor together = run(*model, ids, adapters, 10);
  for (int64_t row = 0; row < 4; ++row) {
    const Tensor own = ids.narrow(0, row, 1);
    for (const int64_t chunk : {1, 3, 10}) {
      const Tensor alone =
          run(*model, own, {adapters[static_cast<size_t>(row)]}, chunk);
      EXPECT_TRUE(at::equal(together[row], alone[0])) << row << " " << chunk;
    }
  }
  EXPECT_FALSE(at::equal(together[0], together[2]));
  EXPECT_TRUE(at::equal(run(*model, ids, {1, 1, 1, 1}, 4)[3], together[3]));
}

TEST_P(AdapterRowsTest, WithoutOneItIsTheModelItself) {
  const Tensor wanted = run(*base, ids, {}, 10);
  EXPECT_TRUE(at::equal(run(*model, ids, {}, 10), wanted));
  EXPECT_TRUE(at::equal(run(*model, ids, {-1, -1, -1, -1}, 10), wanted));
  EXPECT_TRUE(at::equal(run(*model, ids, {0, 0, -1, 0}, 10)[2], wanted[2]));
  EXPECT_EQ(model->weight_bytes(), base->weight_bytes());
  EXPECT_TRUE(base->adapters().empty());
}

// Tokens before the first are the model's own; later ones see them.
TEST_P(AdapterRowsTest, BeginsAtAPosition) {
  const Tensor wanted = run(*base, ids, {}, 10);
  for (const int64_t chunk : {1, 4, 10}) {
    const Tensor found = run(*model, ids, {0, 1, 1, -1}, chunk, {6, 0, 10, 0});
    EXPECT_TRUE(at::equal(found[0].narrow(0, 0, 6), wanted[0].narrow(0, 0, 6)));
    EXPECT_FALSE(at::equal(found[0][6], wanted[0][6]));
    EXPECT_FALSE(at::equal(found[1][0], wanted[1][0]));
    EXPECT_TRUE(at::equal(found[2], wanted[2]));
    EXPECT_TRUE(at::equal(found[3], wanted[3]));
  }
}

// Left padding: dead tokens have no adapter, whatever their ids.
TEST_P(AdapterRowsTest, PaddedRowsAreTheRowsAlone) {
  const Ids adapters = {0, 1, 1, -1}, skip = {0, 3, 5, 9};
  PreallocatedCache cache(model->cache_spec(4, 10));
  Step step = cache.begin_step({.tokens = 10, .skip = skip});
  const Tensor padded = model->forward(
      ids, step, {.all_logits = true, .adapters = numbers(adapters)});
  step.commit();
  for (size_t row = 0; row < 4; ++row) {
    const auto b = static_cast<int64_t>(row);
    const Tensor own = ids.narrow(0, b, 1).narrow(1, skip[row], 10 - skip[row]);
    const Tensor alone = run(*model, own, {adapters[row]}, 10);
    EXPECT_TRUE(
        at::equal(padded[b].narrow(0, skip[row], 10 - skip[row]), alone[0]))
        << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AdapterRowsTest,
                         ::testing::ValuesIn(kRunnings), [](const auto& info) {
                           return std::string(info.param.name);
                         });

// By operators: the same meaning, sums in another order.
TEST(AdapterOpsTest, RowsBeginningsAndPaddingAreThoseOfThePackedForward) {
  const auto base = random_model(hybrid_config());
  const std::vector<Adapter> adapters = {
      random_adapter(base->config(), "a", 3),
      random_adapter(base->config(), "b", 8)};
  const auto packed = base->with_adapters(adapters);
  const auto ops = random_model(hybrid_config(), at::kFloat, ForwardKind::kOps)
                       ->with_adapters(adapters);
  const Tensor ids =
      at::cat({as_row(Ids{5, 60, 17, 3, 3, 41}), as_row(Ids{1, 2, 3, 4, 5, 6}),
               as_row(Ids{7, 7, 8, 8, 9, 9})});
  for (const Ids& from : {Ids{}, Ids{2, 0, 4}}) {
    const Tensor wanted = run(*packed, ids, {0, -1, 1}, 6, from);
    const Tensor found = run(*ops, ids, {0, -1, 1}, 6, from);
    EXPECT_LT(found.sub(wanted).abs().max().item<double>(), kTolerance);
  }
}

TEST(AdapterErrorsTest, NameWhatDoesNotFit) {
  const auto base = random_model(hybrid_config());
  const Adapter good = random_adapter(base->config(), "a", 2);
  EXPECT_THAT(error_text([&] {
                base->with_adapters({good, good});
              }),
              HasSubstr("must have a name of its own but one is \"a\""));
  Adapter bad = good;
  bad.modules[0].weight = "output.weight";
  EXPECT_THAT(error_text([&] { base->with_adapters({bad}); }),
              HasSubstr("but has \"output.weight\""));
  bad = good;
  bad.modules[0].a = at::randn({2, 31});
  EXPECT_THAT(error_text([&] { base->with_adapters({bad}); }),
              HasSubstr(bad.modules[0].weight));
  const auto model = base->with_adapters({good});
  const auto options = [](const Tensor& adapters, const Tensor& from = {}) {
    ForwardOptions made;
    made.adapters = adapters;
    made.adapters_from = from;
    return made;
  };
  const Tensor ids = as_row(Ids{1, 2});
  const auto error = [&](const Transformer& of, const ForwardOptions& with) {
    return error_text([&] { of.forward(ids, with); });
  };
  EXPECT_THAT(error(*model, options(numbers({1}))),
              HasSubstr("adapters must be in [-1, 1) but that of row 0 is 1"));
  EXPECT_THAT(error(*base, options(numbers({0}))),
              HasSubstr("adapters must be in [-1, 0) but that of row 0 is 0"));
  EXPECT_THAT(error(*model, options(numbers({0, 0}))),
              HasSubstr("must be [1] of Long but got [2] of Long"));
  EXPECT_THAT(error(*model, options(numbers({0}), numbers({0, 0}))),
              HasSubstr("must be [1] of Long but got"));
}

TEST(AdapterInfoTest, SaysWhichLayersChange) {
  const auto model = adapted("llama", {"llama_all", "llama_upper"});
  ASSERT_EQ(model->adapters().size(), 2U);
  EXPECT_EQ(model->adapters()[0].name, "llama_all");
  EXPECT_EQ(model->adapters()[0].first_layer, 0);
  EXPECT_EQ(model->adapters()[1].first_layer, 1);
  EXPECT_TRUE(model->with_adapters({})->adapters().empty());
}

}  // namespace
}  // namespace kvcache::testing
