// What constructors refuse, word for word: sizes come from model files.
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

std::string refusal(CacheSpec spec) {
  const std::string text = error_of([&] { ConcatCache cache(spec); });
  if (spec.layers.empty() || !spec.capacity || *spec.capacity < 1) {
    return text;  // the preallocated kind says these in its own words
  }
  const auto* a = std::get_if<AttentionLayer>(&spec.layers[0]);
  if (a == nullptr || (a->heads >= 1 && a->head_dim >= 1)) {
    EXPECT_EQ(error_of([&] { PreallocatedCache cache(spec); }), text);
  }
  return text;
}

CacheSpec good() {
  return {.capacity = 4,
          .dtype = at::kFloat,
          .layers = {AttentionLayer{.heads = 2, .head_dim = 4}}};
}

TEST(SpecErrors, Numbers) {
  CacheSpec spec = good();
  spec.rows = 0;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] rows must be >= 1 but got 0; set CacheSpec::rows.");
  spec = good();
  spec.layers.clear();
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] layers must be >= 1 but got 0; fill "
            "CacheSpec::layers.");
  spec = good();
  spec.capacity = 0;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] capacity must be >= 1 but got 0; set "
            "CacheSpec::capacity.");
  spec = good();
  spec.device = at::Device("cuda:0");
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] device must be one that this program links but got "
            "cuda:0; link LibTorch's half for it, or use cpu.");
  spec = good();
  spec.max_step = 0;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] max_step must be >= 1 but got 0; set "
            "CacheSpec::max_step.");
  spec = good();
  spec.first_layer = -1;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] first_layer must be >= 0 but got -1; set "
            "CacheSpec::first_layer.");
  spec = good();
  spec.dtype = at::kLong;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] dtype must be a floating type but got int64; set "
            "CacheSpec::dtype.");
  spec = good();
  spec.conv_dtype = at::kInt;
  EXPECT_EQ(refusal(spec),
            "[Cache::Cache] conv_dtype must be a floating type but got int32; "
            "set CacheSpec::conv_dtype.");
}

TEST(SpecErrors, AttentionLayers) {
  const auto text = [](AttentionLayer layer) {
    CacheSpec spec = good();
    spec.first_layer = 5;
    spec.layers = {layer};
    return refusal(spec);
  };
  EXPECT_EQ(text({.heads = 0, .head_dim = 4}),
            "[Cache::Cache] layer 5 must have heads >= 1, head_dim >= 1 and "
            "sliding >= 0 but got 0, 4 and 0; fix its AttentionLayer.");
  EXPECT_EQ(text({.heads = 2, .head_dim = -1}),
            "[Cache::Cache] layer 5 must have heads >= 1, head_dim >= 1 and "
            "sliding >= 0 but got 2, -1 and 0; fix its AttentionLayer.");
  EXPECT_EQ(text({.heads = 2, .head_dim = 4, .sliding = -2}),
            "[Cache::Cache] layer 5 must have heads >= 1, head_dim >= 1 and "
            "sliding >= 0 but got 2, 4 and -2; fix its AttentionLayer.");
  EXPECT_EQ(text({.heads = kHuge, .head_dim = kHuge}),
            "[kvcache::bytes_needed] layer 5 must need less than 2^63 bytes "
            "but its sizes are [1, 1099511627776, 1099511627776, 1]; fix the "
            "CacheSpec.");
}

TEST(SpecErrors, RecurrentLayers) {
  const auto text = [](RecurrentLayer layer) {
    CacheSpec spec = good();
    spec.layers = {layer};
    return refusal(spec);
  };
  EXPECT_EQ(text({.conv_channels = -1, .conv_taps = 2, .state_shape = {3}}),
            "[Cache::Cache] layer 0 must have conv_channels >= 0, conv_taps >= "
            "0 and a positive state_shape but got -1, 2 and [3]; fix its "
            "RecurrentLayer.");
  EXPECT_EQ(text({.state_shape = {3, 0}}),
            "[Cache::Cache] layer 0 must have conv_channels >= 0, conv_taps >= "
            "0 and a positive state_shape but got 0, 0 and [3, 0]; fix its "
            "RecurrentLayer.");
  // A layer that keeps nothing would make a commit fail.
  EXPECT_EQ(text({}),
            "[Cache::Cache] layer 0 must keep a convolution or a state but got "
            "0 channels, 0 taps and an empty state_shape; fix its "
            "RecurrentLayer.");
  EXPECT_EQ(text({.conv_channels = 4}),
            "[Cache::Cache] layer 0 must keep a convolution or a state but got "
            "4 channels, 0 taps and an empty state_shape; fix its "
            "RecurrentLayer.");
  EXPECT_EQ(text({.state_shape = {kHuge, kHuge}}),
            "[kvcache::bytes_needed] layer 0 must need less than 2^63 bytes "
            "but its sizes are [1099511627776, 1099511627776, 1]; fix the "
            "CacheSpec.");
  EXPECT_EQ(text({.conv_channels = kHuge, .conv_taps = kHuge}),
            "[kvcache::bytes_needed] layer 0 must need less than 2^63 bytes "
            "but its sizes are [1099511627776, 1099511627776, 1]; fix the "
            "CacheSpec.");
}

// A layer with a state and no convolution has nothing to extend.
TEST(SpecErrors, ALayerWithoutConvolution) {
  const Model model = make_model({RecurrentLayer{.state_shape = {3, 2}}});
  ConcatCache cache(spec_of(model));
  Step step = cache.begin_step();
  EXPECT_EQ(error_of([&] { step.extend_conv(0, Tensor()); }),
            "[Step::extend_conv] layer 0 must have a convolution but its "
            "RecurrentLayer has 0 channels and 0 taps.");
}

// B1: all four numbers are printed.
TEST(SpecErrors, PreallocatedPrintsAllFour) {
  CacheSpec spec = good();
  spec.capacity.reset();
  const auto text = [&](PreallocatedOptions options = {}) {
    return error_of([&] { PreallocatedCache cache(spec, options); });
  };
  const std::string start =
      "[PreallocatedCache::PreallocatedCache] layers, capacity, kv_heads and "
      "head_dim must be >= 1 but got ";
  EXPECT_EQ(text(), start +
                        "layers=1 capacity=0 kv_heads=2 head_dim=4; fix the "
                        "CacheSpec.");
  spec.capacity = -3;
  EXPECT_EQ(text(), start +
                        "layers=1 capacity=-3 kv_heads=2 head_dim=4; fix the "
                        "CacheSpec.");
  spec = good();
  spec.layers = {AttentionLayer{.heads = 0, .head_dim = 4}};
  EXPECT_EQ(text(), start +
                        "layers=1 capacity=4 kv_heads=0 head_dim=4; fix the "
                        "CacheSpec.");
  spec.layers = {AttentionLayer{.heads = 2, .head_dim = 0}};
  EXPECT_EQ(text(), start +
                        "layers=1 capacity=4 kv_heads=2 head_dim=0; fix the "
                        "CacheSpec.");
  spec.layers.clear();
  EXPECT_EQ(text(), start +
                        "layers=0 capacity=4 kv_heads=1 head_dim=1; fix the "
                        "CacheSpec.");
  spec = good();
  EXPECT_EQ(text({.growth = Growth::kExact, .multiple = 0}),
            "[PreallocatedCache::PreallocatedCache] multiple must be >= 1 but "
            "got 0; 1 allocates exactly.");
  EXPECT_EQ(text({.growth = Growth::kExact, .initial = 5}),
            "[PreallocatedCache::PreallocatedCache] initial must be in [0, "
            "capacity] of a growing cache but got 5; set "
            "PreallocatedOptions::growth.");
  EXPECT_EQ(text({.initial = 2}),
            "[PreallocatedCache::PreallocatedCache] initial must be in [0, "
            "capacity] of a growing cache but got 2; set "
            "PreallocatedOptions::growth.");
}

TEST(SpecErrors, BytesNeeded) {
  EXPECT_EQ(error_of([] { bytes_needed(good(), -1); }),
            "[kvcache::bytes_needed] tokens must be >= 0 but got -1; ask for "
            "the tokens of a row.");
  EXPECT_EQ(error_of([] {
              bytes_needed(good(), std::numeric_limits<int64_t>::max());
            }),
            "[kvcache::bytes_needed] layer 0 must need less than 2^63 bytes "
            "but its sizes are [9223372036854775807, 2, 4, 1]; fix the "
            "CacheSpec.");
}

}  // namespace
}  // namespace kvcache::toy
