// ops_forward_test.cpp - the forward by operators, run on the CPU: against
// transformers' numbers, against the packed forward, and what a recorded step
// must keep.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "src/model/forward/decoder.h"
#include "tests/model/forward/reference_data.h"
#include "tests/support/error_text.h"
#include "tests/support/model_path.h"

namespace kvcache::testing {
namespace {

using model::ForwardKind;
using ::testing::HasSubstr;

// Float32 sums in another order; the tiny models have logits of size 3.
constexpr double kTolerance = 1e-4;
// Roundings to bfloat16 in other places: a few steps of 2^-7 at size 3.
constexpr double kBfloat16Tolerance = 0.15;
// Random hybrids have logits of size 9, and bfloat16 moves those of
// transformers itself by up to 1.4.
constexpr double kHybridBfloat16Tolerance = 1.4;

std::shared_ptr<const Transformer> load_ops(const std::string& name,
                                            at::ScalarType dtype = at::kFloat) {
  return model::load_model(data_path(name),
                           {.dtype = dtype, .forward = ForwardKind::kOps});
}

double apart(const Tensor& a, const Tensor& b) {
  return a.sub(b).abs().max().item<double>();
}

class OpsForwardTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ops = load_ops(GetParam());
    const std::string folder = GetParam().substr(0, GetParam().find('/'));
    numbers = read_json(folder + (GetParam().ends_with("q8_0.gguf")
                                      ? "/expected-q8_0.json"
                                      : "/expected.json"));
  }
  Ids prompt(size_t index) const {
    return numbers["prompts"][index]["tokens"].get<Ids>();
  }
  std::shared_ptr<const Transformer> ops;
  nlohmann::json numbers;
};

TEST_P(OpsForwardTest, LogProbabilitiesAndGreedyTextAreTransformers) {
  for (const auto& each : numbers["prompts"]) {
    SCOPED_TRACE(each["name"].get<std::string>());
    const Ids tokens = each["tokens"];
    const std::vector<double> wanted = each["log_probs"];
    for (const Kind kind : {Kind::kNone, Kind::kConcat, Kind::kPreallocated}) {
      for (const int64_t chunk : {3, 256}) {
        const Tensor logits = all_logits(*ops, tokens, kind, chunk);
        EXPECT_LT(largest_difference(log_probs(logits, tokens), wanted),
                  kTolerance);
      }
    }
    const Ids greedy_tokens = each["greedy"]["tokens"];
    EXPECT_EQ(greedy(*ops, tokens, Kind::kPreallocated,
                     static_cast<int64_t>(greedy_tokens.size())),
              greedy_tokens);
  }
}

TEST_P(OpsForwardTest, IsCloseToThePackedForwardInBothTypes) {
  const Ids tokens = prompt(4);
  for (const auto& [dtype, tolerance] :
       {std::pair{at::kFloat, kTolerance},
        std::pair{at::kBFloat16, GetParam().starts_with("qwen3_5")
                                     ? kHybridBfloat16Tolerance
                                     : kBfloat16Tolerance}}) {
    const auto packed = load_tiny(GetParam(), dtype);
    const auto by_ops = load_ops(GetParam(), dtype);
    EXPECT_EQ(by_ops->dtype(), dtype);
    for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
      EXPECT_LT(apart(all_logits(*by_ops, tokens, kind, 5),
                      all_logits(*packed, tokens, kind, 5)),
                tolerance)
          << dtype;
    }
  }
}

// Rows of other lengths behind dead tokens whose ids are no tokens, an idle row
// among them; then a step of one token in some rows.
TEST_P(OpsForwardTest, PaddedAndIdleRowsAreTheRowsAlone) {
  const Ids longer = prompt(4), shorter = prompt(3);
  const auto total = static_cast<int64_t>(longer.size());
  const auto skipped = total - static_cast<int64_t>(shorter.size());
  Tensor ids = at::full({3, total}, int64_t{1} << 40, at::kLong);
  ids[0].copy_(as_row(longer)[0]);
  ids[2].narrow(0, skipped, total - skipped).copy_(as_row(shorter)[0]);
  for (const Kind kind : {Kind::kConcat, Kind::kPreallocated}) {
    for (const bool all : {true, false}) {
      const auto cache = make_cache(kind, *ops, 3, total + 1);
      const Tensor logits = step(*ops, *cache, ids, all, Ids{0, 0, skipped},
                                 Ids{total, 0, total - skipped});
      ASSERT_EQ(logits.size(1), all ? total : 1);
      EXPECT_TRUE(logits[1].eq(0).all().item<bool>());
      const int64_t from = all ? skipped : 0, from_long = all ? 0 : total - 1;
      const Tensor alone = all_logits(*ops, longer, Kind::kNone, 0);
      EXPECT_LT(apart(logits[0], alone.narrow(0, from_long, total - from_long)),
                kTolerance);
      Tensor last = all_logits(*ops, shorter, Kind::kNone, 0);
      if (!all) last = last.narrow(0, last.size(0) - 1, 1);
      EXPECT_LT(apart(logits[2].narrow(0, from, last.size(0)), last),
                kTolerance);
      EXPECT_TRUE(logits[2].narrow(0, 0, from).eq(0).all().item<bool>());

      const Tensor next = at::full({3, 1}, 3, at::kLong);
      const Tensor decoded = step(*ops, *cache, next, all, {}, Ids{1, 0, 0})[0];
      Ids grown = longer;
      grown.push_back(3);
      const Tensor whole = all_logits(*ops, grown, Kind::kNone, 0);
      EXPECT_LT(apart(decoded[0], whole[total]), kTolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, OpsForwardTest,
    ::testing::Values("gpt2", "gpt2/model.gguf", "llama", "llama/model.gguf",
                      "llama/model-q8_0.gguf", "llama_rope3",
                      "llama_rope3/model.gguf", "llama_bias",
                      "llama_bias/model.gguf", "mistral", "qwen2",
                      "qwen2/model.gguf", "qwen3", "qwen3/model.gguf",
                      "qwen3_5_three"),
    [](const auto& info) {
      std::string name = info.param;
      for (char& c : name) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
      }
      return name;
    });

// What the operator decoder gets, without a Transformer's checks before it.
struct Bare {
  explicit Bare(const std::string& name) {
    model::OpenedModel opened = model::open_model(data_path(name));
    config = opened.config;
    decoder = model::make_ops_decoder({config, std::move(opened.weights),
                                       at::kFloat, model::WeightPacking::kNone,
                                       at::kCPU, options});
  }
  Tensor run(const Tensor& ids, const Tensor& positions, const Tensor& limits,
             bool all = true) const {
    CacheSpec spec;
    spec.layers.resize(static_cast<size_t>(config.layers), AttentionLayer{});
    model::NoMemory memory(limits, spec);
    return run(ids, positions, limits, memory, all);
  }
  Tensor run(const Tensor& ids, const Tensor& positions, const Tensor& limits,
             model::LayerMemory& memory, bool all) const {
    return decoder->run({ids, positions, limits}, memory,
                        {.all_logits = all, .last_layer = config.layers});
  }
  model::ModelConfig config;
  model::LoadOptions options;
  std::unique_ptr<model::Decoder> decoder;
};

// Ids on a device are not read back: whatever they are, nothing is read beyond
// a table. Likewise positions.
TEST(OpsForward, NumbersOutOfRangeAreClamped) {
  for (const char* name : {"gpt2", "llama"}) {
    const Bare bare(name);
    const int64_t last_id = bare.config.vocab_size - 1;
    const int64_t last = bare.config.context_length - 1;
    const Tensor limits = at::arange(1, 4, at::kLong).view({1, 3});
    constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
    const Tensor found =
        bare.run(as_row(Ids{-kFar, kFar, 5}), as_row(Ids{-1, 1, kFar}), limits);
    const Tensor wanted =
        bare.run(as_row(Ids{0, last_id, 5}), as_row(Ids{0, 1, last}), limits);
    EXPECT_TRUE(found.equal(wanted)) << name;
    EXPECT_TRUE(found.isfinite().all().item<bool>());
  }
}

// A memory that keeps K and V of dead tokens, and writes NaN over them.
class PoisonedMemory final : public model::LayerMemory {
 public:
  explicit PoisonedMemory(const Tensor& limits) { view_.limits = limits; }
  const KvView& update(int64_t, const Tensor& k, const Tensor& v) override {
    const Tensor dead = view_.limits.eq(0).unsqueeze(1).unsqueeze(-1);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    view_.k = k.masked_fill(dead, nan);
    view_.v = v.masked_fill(dead, nan);
    view_.window = k.size(2);
    return view_;
  }
  const StateView& state(int64_t) override { return state_; }
  Tensor extend_conv(int64_t, const Tensor& x) override { return x; }
  const StateWindow* state_window(int64_t) override { return nullptr; }

 private:
  KvView view_;
  StateView state_;
};

TEST(OpsForward, NanInDeadTokensDoesNotLeak) {
  const Bare bare("llama");
  const Tensor ids = as_row(Ids{7, 8, 9, 10, -5, 1 << 20});
  const Tensor positions = as_row(Ids{0, 1, 2, 3, 0, 0});
  const Tensor limits = as_row(Ids{1, 2, 3, 4, 0, 0});
  for (const bool all : {true, false}) {
    PoisonedMemory memory(limits);
    const Tensor found = bare.run(ids, positions, limits, memory, all);
    const Tensor wanted =
        bare.run(ids.narrow(1, 0, 4), positions.narrow(1, 0, 4),
                 limits.narrow(1, 0, 4), all);
    EXPECT_LT(apart(found.narrow(1, 0, wanted.size(1)), wanted), kTolerance);
    if (all) {
      EXPECT_TRUE(found.narrow(1, 4, 2).eq(0).all().item<bool>());
    }
  }
  PoisonedMemory idle(at::zeros({1, 3}, at::kLong));
  const Tensor zeros = at::zeros({1, 3}, at::kLong);
  EXPECT_TRUE(
      bare.run(zeros, zeros, zeros, idle, false).eq(0).all().item<bool>());
}

// The operators that a forward calls, by name.
class CalledOperators {
 public:
  CalledOperators() {
    names().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          names().insert(function.name());
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CalledOperators() { at::removeCallback(handle_); }
  static std::set<std::string>& names() {
    static std::set<std::string> all;
    return all;
  }

 private:
  at::CallbackHandle handle_;
};

// What a CUDA graph cannot record: values that come to the host, shapes that
// hang on values, scalars that are copied over (where), tensors made on the
// host. The first forward as well: nothing is put off to it, K19.
TEST(OpsForward, K19ARecordedStepFindsNothingThatWaitsForTheDevice) {
  const std::set<std::string> refused = {
      "aten::item",          "aten::_local_scalar_dense",
      "aten::is_nonzero",    "aten::nonzero",
      "aten::masked_select", "aten::where",
      "aten::index",         "aten::scalar_tensor",
      "aten::lift_fresh",    "aten::equal",
      "aten::allclose",      "aten::unique_dim",
      "aten::index_put_",    "aten::tensor_split",
      "aten::from_blob"};
  for (const char* name :
       {"gpt2", "mistral", "llama_rope3", "qwen3", "qwen3_5"}) {
    const auto ops = load_ops(name, at::kBFloat16);
    for (const int64_t tokens : {1, 4}) {
      const auto cache = make_cache(Kind::kPreallocated, *ops, 2, 8);
      Step open = cache->begin_step({.tokens = tokens});
      const Tensor ids = at::full({2, tokens}, 3, at::kLong);
      const CalledOperators called;
      ops->forward(ids, open, {.role = Role::kDecode});
      EXPECT_TRUE(called.names().contains("aten::linear"));
      for (const std::string& operator_name : called.names()) {
        EXPECT_FALSE(refused.contains(operator_name)) << operator_name;
      }
    }
  }
}

TEST(OpsForward, SaysWhatItIs) {
  const auto ops = load_ops("llama");
  EXPECT_EQ(ops->forward_kind(), ForwardKind::kOps);
  EXPECT_EQ(ops->device(), at::Device(at::kCPU));
  EXPECT_EQ(ops->cache_spec(1, 8).device, at::Device(at::kCPU));
  EXPECT_FALSE(ops->row_exact(Role::kDecode));
  EXPECT_FALSE(ops->roles_agree());
  const auto packed = load_tiny("llama");
  EXPECT_EQ(packed->forward_kind(), ForwardKind::kPackedCpu);
  EXPECT_EQ(ops->weight_bytes(), packed->weight_bytes());
}

// The same calls give the same bits, so chunks at absolute multiples make a
// warm run repeat a cold one. Results may be changed by their owner.
TEST(OpsForward, EqualCallsGiveEqualBits) {
  const auto ops = load_ops("llama", at::kBFloat16);
  const Ids tokens =
      read_json("llama/expected.json")["prompts"][4]["tokens"].get<Ids>();
  const Tensor once = all_logits(*ops, tokens, Kind::kPreallocated, 4);
  EXPECT_TRUE(once.equal(all_logits(*ops, tokens, Kind::kPreallocated, 4)));
  Tensor logits = ops->forward(as_row(tokens), {});
  EXPECT_EQ(logits.scalar_type(), at::kFloat);
  EXPECT_FALSE(logits.is_inference());
  logits.mul_(2.0);
}

// As the packed forward: ids and positions on the CPU are checked.
TEST(OpsForward, BadNumbersOnTheCpuAreRefused) {
  const auto ops = load_ops("llama");
  EXPECT_THAT(error_text([&] {
                ops->forward(as_row(Ids{1, 64}), {});
              }),
              HasSubstr("ids must be in [0, 64) but token 1 of row 0 is 64"));
  EXPECT_THAT(
      error_text([&] {
        ops->forward(at::zeros({1, 129}, at::kLong), {});
      }),
      HasSubstr("positions must be below the model's context of 128 tokens"));
  const auto cache = make_cache(Kind::kConcat, *ops, 1, 200);
  step(*ops, *cache, at::zeros({1, 128}, at::kLong));
  EXPECT_THAT(error_text([&] {
                step(*ops, *cache, at::zeros({1, 1}, at::kLong));
              }),
              HasSubstr("token 0 of row 0 is at 128"));
}

TEST(OpsForward, DevicesThatAreNotThereAreRefused) {
  const auto load = [](at::Device device, ForwardKind kind) {
    return error_text([&] {
      model::load_model(data_path("llama"),
                        {.device = device, .forward = kind});
    });
  };
  EXPECT_THAT(load(at::Device(at::kCUDA, 99), ForwardKind::kAuto),
              HasSubstr("device cuda:99"));
  EXPECT_THAT(load(at::Device(at::kXPU), ForwardKind::kAuto),
              HasSubstr("device xpu must be linked into this program"));
  EXPECT_THAT(
      load(at::Device(at::kMeta, 5), ForwardKind::kAuto),
      HasSubstr("there must be a device meta:5 but this machine has 1"));
  EXPECT_THAT(load(at::Device(at::kMeta), ForwardKind::kPackedCpu),
              HasSubstr("the packed forward must be on the CPU but the device "
                        "is meta"));
}

// Tensors of the meta device have no values: what a model away from the CPU
// says of itself.
TEST(OpsForward, AModelOnAnotherDeviceSaysSo) {
  const auto away =
      model::load_model(data_path("llama"), {.device = at::Device(at::kMeta)});
  EXPECT_EQ(away->forward_kind(), ForwardKind::kOps);
  EXPECT_TRUE(away->device().is_meta());
  const CacheSpec spec = away->cache_spec(1, 8);
  EXPECT_EQ(spec.device, away->device());
  EXPECT_NO_THROW(away->check_cache(spec));
  const CacheSpec here = load_ops("llama")->cache_spec(1, 8);
  EXPECT_EQ(error_text([&] { away->check_cache(here); }),
            "[Transformer::check_cache] the cache must be on meta like the "
            "model but is on cpu; make the cache from cache_spec().");
  EXPECT_THAT(error_text([&] { away->forward(at::zeros({1}, at::kLong), {}); }),
              HasSubstr("of int64 on the CPU or meta but got [1] of Long"));
}

TEST(OpsForward, ACacheOnAnotherDeviceIsRefused) {
  const auto ops = load_ops("llama");
  CacheSpec spec = ops->cache_spec(1, 8);
  spec.device = at::Device(at::kCUDA, 1);
  EXPECT_EQ(error_text([&] { ops->check_cache(spec); }),
            "[Transformer::check_cache] the cache must be on cpu like the "
            "model but is on cuda:1; make the cache from cache_spec().");
}

// The real model: the text of a prompt, and its scores.
TEST(OpsForward, SmolLm2TextIsThePackedForwards) {
  const std::string path = smollm2_path().string();
  if (path.empty()) GTEST_SKIP() << kNoModel;
  const auto packed = model::load_model(path, {.dtype = at::kFloat});
  const auto ops = model::load_model(
      path, {.dtype = at::kFloat, .forward = ForwardKind::kOps});
  const nlohmann::json numbers = read_json("smollm2.json");
  const Ids tokens = numbers["prompts"][0]["tokens"].get<Ids>();
  EXPECT_EQ(greedy(*ops, tokens, Kind::kPreallocated, 16),
            greedy(*packed, tokens, Kind::kPreallocated, 16));
}

}  // namespace
}  // namespace kvcache::testing
