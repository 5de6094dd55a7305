// attention_error_test.cpp - what attend() refuses, word for word.

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "src/kernels/cpu_level.h"
#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

using ::testing::StartsWith;

// The first line of the error, or "" if there is none.
template <class Error>
std::string refusal(const AttentionCase& c, const AttendOptions& options = {}) {
  try {
    attend(c.q, c.view, options);
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

AttentionCase good() {
  return make_case(
      {.rows = 2, .heads = 2, .group = 3, .prefix = 4, .tokens = 2});
}

TEST(AttendErrors, Tensors) {
  AttentionCase c = good();
  c.view.v = Tensor();
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] q, view.k, view.v and view.limits must be defined but got "
      "[2, 6, 2, 64] float32 on cpu, [2, 2, 6, 64] float32 on cpu, an "
      "undefined tensor and [2, 2] int64 on cpu.");
  c = good();
  c.q = c.q[0];
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] q must be [B, Hq, T, D] but got [6, 2, 64] float32 on cpu.");
  c = good();
  c.view.k = c.view.k.to(at::kBFloat16);
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] view.k must be [2, H, S, 64] float32 on cpu like q but got "
      "[2, 2, 6, 64] bfloat16 on cpu.");
  c = good();
  c.view.v = c.view.v.narrow(2, 0, 5);
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.k and view.v must have one shape but got "
            "[2, 2, 6, 64] and [2, 2, 5, 64].");
  c = good();
  c.q = c.q.narrow(1, 0, 5);
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] the query heads must be a multiple of the key/value heads "
      "but got 5 and 2.");
  c = good();
  c.view.k = c.view.k.transpose(2, 3).contiguous().transpose(2, 3);
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.k must have a dense last dimension but its strides "
            "are [768, 384, 1, 6]; call contiguous() first.");
  c = good();
  c.view.limits = c.view.limits.to(at::kInt);
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] view.limits must be [2, 2] int64 on cpu but got [2, 2] int32 "
      "on cpu.");
}

TEST(AttendErrors, Types) {
  AttentionCase c = good();
  c.q = c.q.to(at::kHalf);
  c.view.k = c.view.k.to(at::kHalf);
  c.view.v = c.view.v.to(at::kHalf);
  EXPECT_EQ(refusal<c10::TypeError>(c),
            "[attend] q must be float32 or bfloat16 on cpu but got float16; "
            "convert the model and its cache to one of them.");
  c.q = c.q.to(at::kDouble);
  EXPECT_THAT(refusal<c10::TypeError>(c),
              StartsWith("[attend] q must be float32 or bfloat16 on cpu but "
                         "got float64;"));
  c.q = c.q.to(at::kMeta);
  EXPECT_THAT(refusal<c10::TypeError>(c),
              StartsWith("[attend] q must be float32, bfloat16 or float16 on "
                         "meta but got float64;"));
}

TEST(AttendErrors, Devices) {
  AttentionCase c = good();
  c.q = c.q.to(at::kMeta);
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.k must be [2, H, S, 64] float32 on meta like q but "
            "got [2, 2, 6, 64] float32 on cpu.");
  c.view.k = c.view.k.to(at::kMeta);
  c.view.v = c.view.v.to(at::kMeta);
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.limits must be [2, 2] int64 on meta but got [2, 2] "
            "int64 on cpu.");
}

TEST(AttendErrors, OtherStorage) {
  const std::string text =
      "[attend] the view must be plain, or int8 with scales and on the CPU, "
      "but is quantised otherwise or paged; use a cache kind that stores K and "
      "V plainly.";
  AttentionCase c = good();
  c.view.k_scale = at::full({1}, 1.0);
  EXPECT_EQ(refusal<c10::NotImplementedError>(c), text);
  c.view.v_scale = c.view.k_scale;
  EXPECT_EQ(refusal<c10::NotImplementedError>(c), text);
  c = good();
  c.view.format = KvFormat::kInt8;
  EXPECT_EQ(refusal<c10::NotImplementedError>(c), text);
  c = good();
  c.view.format = static_cast<KvFormat>(7);
  EXPECT_EQ(refusal<c10::NotImplementedError>(c), text);
  c = good();
  c.view.blocks = at::full({1, 1}, 0, at::kInt);
  EXPECT_EQ(refusal<c10::NotImplementedError>(c), text);
}

TEST(AttendErrors, Int8Views) {
  AttentionCase c = good();
  quantise({.head_dim = 64}, c.view);
  EXPECT_NO_THROW(attend(c.q, c.view));
  AttentionCase other = c;
  other.view.k = other.view.k.to(at::kFloat);
  EXPECT_THAT(
      refusal<c10::ValueError>(other),
      StartsWith("[attend] view.k must be [2, H, S, 64] int8 on cpu but "
                 "got [2, 2, 6, 64] float32"));
  other = c;
  other.view.v_scale = other.view.v_scale.narrow(2, 0, 5);
  EXPECT_EQ(refusal<c10::ValueError>(other),
            "[attend] view.v_scale must be [2, 2, 6, 1] float32 on cpu but got "
            "[2, 2, 5, 1] float32 on cpu.");
  other = c;
  other.view.k_scale = other.view.k_scale.to(at::kDouble);
  EXPECT_EQ(refusal<c10::ValueError>(other),
            "[attend] view.k_scale must be [2, 2, 6, 1] float32 on cpu but got "
            "[2, 2, 6, 1] float64 on cpu.");
}

TEST(AttendErrors, Ranges) {
  AttentionCase c = good();
  c.view.limits.mutable_data_ptr<int64_t>()[3] = 7;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 1 of row 1 must see at most the 6 cells it may but "
            "its limit is 7.");
  c.view.limits.mutable_data_ptr<int64_t>()[3] = -1;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 1 of row 1 must see at most the 6 cells it may but "
            "its limit is -1.");
  c = good();
  c.view.window = 5;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 1 of row 0 must see at most the 5 cells it may but "
            "its limit is 6.");
  c.view.window = 7;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.window must be within [0, 6], the cells of view.k, "
            "but got 7.");
  c = good();
  c.view.ring = 7;
  EXPECT_EQ(
      refusal<c10::ValueError>(c),
      "[attend] view.ring must be within [0, 6], the cells of view.k, but "
      "got 7.");
  c.view.ring = 5;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 1 of row 0 must see at most the 5 keys of the ring "
            "but its limit is 6.");
  c.view.sliding = 5;
  EXPECT_EQ(refusal<c10::ValueError>(c), "");
  const Tensor fair = c.view.limits.clone();
  c.view.limits.fill_(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 0 of row 0 must see at most the 5 keys of the ring "
            "but its limit is 9223372036854775807.");
  c.view.limits.copy_(fair);
  c.view.sliding = -1;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.sliding must be 0 or more but got -1.");
  c = good();
  EXPECT_EQ(refusal<c10::ValueError>(
                c, {.scale = std::numeric_limits<double>::infinity()}),
            "[attend] scale must be finite but got inf.");
}

TEST(AttendErrors, Sinks) {
  AttentionCase c = good();
  c.view.sinks = 2;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.sinks must be 0 without a sliding window but got 2; "
            "set view.sliding, or leave sinks out: without it every key is "
            "seen anyway.");
  c.view.sliding = 2;
  EXPECT_EQ(refusal<c10::ValueError>(c), "");
  for (const int64_t sinks : {-1, 129}) {
    c.view.sinks = sinks;
    EXPECT_EQ(refusal<c10::ValueError>(c),
              c10::str("[attend] view.sinks must be within [0, 128] but got ",
                       sinks, "."));
  }
  c.view.sinks = 2;
  c.view.ring = 5;
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] view.k must have cells for view.sinks and view.ring but "
            "got 6 for 2 and 5.");
  c.view.ring = 4;
  c.view.limits.fill_(1000);
  EXPECT_EQ(refusal<c10::ValueError>(c), "");
  c.view.ring = 1;
  c.view.limits.fill_(3);
  EXPECT_EQ(refusal<c10::ValueError>(c), "");
  c.view.limits.fill_(4);
  EXPECT_EQ(refusal<c10::ValueError>(c),
            "[attend] query 0 of row 0 must see at most the 1 keys of the ring "
            "beside the sinks but its limit is 4.");
}

TEST(CpuLevel, IsSupportedAndHasAName) {
  EXPECT_TRUE(kernels::cpu_supports(kernels::CpuLevel::kPortable));
  EXPECT_TRUE(kernels::cpu_supports(kernels::cpu_level()));
  EXPECT_STREQ(kernels::name(kernels::CpuLevel::kAvx512Bf16), "avx512_bf16");
  EXPECT_STREQ(kernels::name(kernels::CpuLevel::kAmx), "amx");
  const kernels::CpuLevel before = kernels::cpu_level();
  {
    const kernels::ForcedCpuLevel forced(kernels::CpuLevel::kPortable);
    EXPECT_EQ(kernels::cpu_level(), kernels::CpuLevel::kPortable);
  }
  EXPECT_EQ(kernels::cpu_level(), before);
}

}  // namespace
}  // namespace kvcache::testing
