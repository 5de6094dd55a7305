// attention_int8_test.cpp - attend() over 8-bit codes: against the definition,
// and what must not change a single bit.

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include <array>

#include "src/kernels/cpu_level.h"
#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

using kernels::CpuLevel;
using kernels::ForcedCpuLevel;

// Against the stored codes, in float64. Parts of a query and weights are
// rounded to 2^-16 of the largest of them: of 64 products of size 1, and of 128
// weights in a block. bfloat16: the result has 8 bits.
constexpr double kFloatTolerance = 5e-4;
constexpr double kBFloat16Tolerance = 2.0 / 256 * 4;

// Every level that this machine runs, both dtypes of queries.
template <class F>
void on_every_level(const F& check) {
  for (const CpuLevel level : kernels::kCpuLevels) {
    if (!kernels::cpu_supports(level)) continue;
    const ForcedCpuLevel forced(level);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(std::string(name(level)) + " " + c10::toString(dtype));
      check(AttentionShape{.dtype = dtype, .format = KvFormat::kInt8});
    }
  }
}

Tensor in_chunks(const AttentionCase& c, int64_t chunk, Role role) {
  std::vector<Tensor> outs;
  for (int64_t t = 0; t < c.q.size(2); t += chunk) {
    const int64_t count = std::min(chunk, c.q.size(2) - t);
    KvView view = c.view;
    view.limits = c.view.limits.narrow(1, t, count);
    outs.push_back(attend(c.q.narrow(2, t, count), view, {.role = role}));
  }
  return at::cat(outs, 2);
}

void expect_the_same_in_chunks(const AttentionCase& c) {
  const Tensor whole = attend(c.q, c.view);
  EXPECT_TRUE(at::isfinite(whole).all().item<bool>());
  EXPECT_TRUE(at::equal(whole, attend(c.q, c.view, {.role = Role::kDecode})));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kDecode)));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 2, Role::kDecode)));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 7, Role::kDecode)));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 11, Role::kPrefill)));
}

TEST(AttendInt8, IsTheDefinition) {
  on_every_level([](AttentionShape shape) {
    for (const auto& [heads, group, D, prefix, tokens] :
         std::vector<std::array<int64_t, 5>>{{1, 1, 64, 0, 1},
                                             {2, 3, 64, 0, 70},
                                             {2, 3, 64, 400, 1},
                                             {1, 8, 128, 130, 3},
                                             {3, 3, 20, 255, 9},
                                             {1, 2, 576, 140, 2}}) {
      shape.heads = heads, shape.group = group, shape.head_dim = D;
      shape.prefix = prefix, shape.tokens = tokens;
      const AttentionCase c = make_case(shape);
      const Tensor expected =
          reference_attend(c.q, c.view, 1 / std::sqrt(static_cast<double>(D)));
      const double tolerance =
          shape.dtype == at::kFloat ? kFloatTolerance : kBFloat16Tolerance;
      for (const Role role : {Role::kPrefill, Role::kDecode}) {
        const Tensor out = attend(c.q, c.view, {.role = role});
        EXPECT_EQ(out.scalar_type(), shape.dtype);
        const Tensor error = out.to(at::kDouble).sub(expected).abs();
        EXPECT_LE(error.max().item<double>(), tolerance) << D << " " << prefix;
      }
    }
  });
}

// K56
TEST(AttendInt8, EveryHeadSizeInBothRoles) {
  on_every_level([](AttentionShape shape) {
    for (const int64_t D :
         {1, 2, 6, 7, 8, 12, 16, 20, 24, 33, 48, 64, 80, 96, 128, 256}) {
      SCOPED_TRACE(D);
      shape.heads = shape.group = 2;
      shape.head_dim = D, shape.prefix = 140, shape.tokens = 9;
      expect_the_same_in_chunks(make_case(shape));
    }
  });
}

TEST(AttendInt8, PrefixesWindowsAndSinks) {
  on_every_level([](AttentionShape shape) {
    shape.heads = 2, shape.group = 3, shape.tokens = 13;
    for (const int64_t prefix : {0, 100, 127, 128, 129, 250, 385}) {
      for (const auto& [sliding, sinks] : std::vector<std::array<int64_t, 2>>{
               {0, 0}, {1, 0}, {3, 0}, {64, 0}, {129, 5}, {50, 128}}) {
        SCOPED_TRACE(c10::str(prefix, " ", sliding, " ", sinks));
        shape.prefix = prefix, shape.sliding = sliding, shape.sinks = sinks;
        expect_the_same_in_chunks(make_case(shape));
      }
    }
  });
}

TEST(AttendInt8, ThreadCount) {
  const int before = at::get_num_threads();
  on_every_level([](AttentionShape shape) {
    shape.rows = 2, shape.heads = shape.group = 3;
    shape.prefix = 700;
    const AttentionCase step = make_case(shape);
    shape.prefix = 0, shape.tokens = 150;
    const AttentionCase prefill = make_case(shape);
    std::vector<Tensor> decoded, prefilled;
    for (const int threads : {1, 2, 3, 5}) {
      at::set_num_threads(threads);
      decoded.push_back(attend(step.q, step.view, {.role = Role::kDecode}));
      prefilled.push_back(attend(prefill.q, prefill.view));
      EXPECT_TRUE(at::equal(decoded.front(), decoded.back())) << threads;
      EXPECT_TRUE(at::equal(prefilled.front(), prefilled.back())) << threads;
    }
  });
  at::set_num_threads(before);
}

// Rows that are padded, idle or shorter: each as if it were alone.
TEST(AttendInt8, NeighboursAndPadding) {
  on_every_level([](AttentionShape shape) {
    shape.rows = 3, shape.heads = 2, shape.group = 3;
    shape.prefix = 200, shape.tokens = 20;
    const AttentionCase batch = make_case(shape);
    int64_t* limits = batch.view.limits.mutable_data_ptr<int64_t>();
    for (int64_t t = 0; t < 20; ++t) {
      limits[20 + t] = t < 7 ? 0 : 31 + t - 7;
      limits[40 + t] = 0;
    }
    const Tensor together = attend(batch.q, batch.view);
    for (int64_t b = 0; b < 3; ++b) {
      KvView alone = batch.view;
      for (Tensor* t : {&alone.k, &alone.v, &alone.k_scale, &alone.v_scale,
                        &alone.limits}) {
        *t = t->narrow(0, b, 1);
      }
      EXPECT_TRUE(at::equal(together.narrow(0, b, 1),
                            attend(batch.q.narrow(0, b, 1), alone)));
    }
    EXPECT_EQ(together[2].abs().max().item<float>(), 0);
    EXPECT_EQ(together[1].narrow(1, 0, 7).abs().max().item<float>(), 0);
  });
}

TEST(AttendInt8, StorageOrderCapacityAndRing) {
  on_every_level([](AttentionShape shape) {
    for (const int64_t sinks : {0, 3}) {
      shape.rows = shape.heads = 2, shape.group = 3;
      shape.prefix = 290, shape.tokens = 5;
      shape.sliding = 140, shape.sinks = sinks;
      AttentionShape plain = shape;
      plain.format = KvFormat::kPlain;
      const AttentionCase numbers = make_case(plain);
      AttentionCase c = numbers;
      quantise(shape, c.view);
      const Tensor expected = attend(c.q, c.view);
      for (const bool position_major : {false, true}) {
        for (const int64_t capacity : {295, 512}) {
          for (const int64_t ring : {0, 144, 145, 200, 256, 295}) {
            AttentionShape other = shape;
            other.position_major = position_major;
            other.capacity = capacity;
            other.ring = ring;
            c.view = numbers.view;
            c.view.k = store(other, numbers.view.k);
            c.view.v = store(other, numbers.view.v);
            c.view.window = 0;
            c.view.ring = ring;
            quantise(other, c.view);
            SCOPED_TRACE(
                c10::str(sinks, " ", position_major, " ", capacity, " ", ring));
            EXPECT_TRUE(at::equal(expected, attend(c.q, c.view)));
            EXPECT_TRUE(at::equal(
                expected, attend(c.q, c.view, {.role = Role::kDecode})));
          }
        }
      }
    }
  });
}

// Cells that a query does not see: any codes, scales of NaN or infinity.
TEST(AttendInt8, UnseenCellsDoNotMatter) {
  on_every_level([](AttentionShape shape) {
    shape.heads = 2, shape.group = 3, shape.tokens = 12;
    for (const int64_t sliding : {0, 33}) {
      for (const int64_t prefix : {0, 1, 126, 127, 128, 131}) {
        shape.sliding = sliding, shape.prefix = prefix, shape.capacity = 150;
        const AttentionCase c = make_case(shape);
        const Tensor expected = attend(c.q, c.view);
        for (int64_t t = 1; t < 12; t += 2) {
          const int64_t first = prefix + t, count = 150 - first;
          KvView spoilt = c.view;
          spoilt.k = c.view.k.clone(), spoilt.v = c.view.v.clone();
          spoilt.k_scale = c.view.k_scale.clone();
          spoilt.v_scale = c.view.v_scale.clone();
          spoilt.k.narrow(2, first, count).fill_(-128);
          spoilt.v.narrow(2, first, count).fill_(-128);
          spoilt.k_scale.narrow(2, first, count)
              .fill_(std::numeric_limits<float>::quiet_NaN());
          spoilt.v_scale.narrow(2, first, count)
              .fill_(std::numeric_limits<float>::infinity());
          for (const Role role : {Role::kPrefill, Role::kDecode}) {
            const Tensor out = attend(c.q, spoilt, {.role = role});
            EXPECT_TRUE(
                at::equal(expected.narrow(2, 0, t), out.narrow(2, 0, t)))
                << prefix << " " << t;
            EXPECT_FALSE(at::isfinite(out.narrow(2, t, 1)).any().item<bool>());
          }
        }
      }
    }
  });
}

// Sums of products fit into 32 bits whatever the numbers: the largest head, all
// codes and parts of the query at their ends.
TEST(AttendInt8, TheLargestSumsFit) {
  on_every_level([](AttentionShape shape) {
    for (const int64_t D : {512, 513, 4096}) {
      shape.head_dim = D, shape.prefix = 130;
      AttentionCase c = make_case(shape);
      c.q.fill_(2);
      c.view.k.fill_(127);
      c.view.v.fill_(-127);
      c.view.k_scale.fill_(1.0 / 127);
      c.view.v_scale.fill_(1.0 / 127);
      for (const Role role : {Role::kPrefill, Role::kDecode}) {
        const Tensor out = attend(c.q, c.view, {.scale = 1e-3, .role = role});
        EXPECT_LE(out.add(1).abs().max().item<float>(), 1e-3) << D;
      }
    }
  });
}

// A query of zeros, and rows of zeros: the mean of the values.
TEST(AttendInt8, Zeros) {
  on_every_level([](AttentionShape shape) {
    shape.prefix = 40;
    AttentionCase c = make_case(shape);
    c.q.zero_();
    const Tensor expected = reference_attend(c.q, c.view, 1);
    const Tensor out = attend(c.q, c.view, {.scale = 1.0});
    EXPECT_LE(out.sub(expected).abs().max().item<double>(), 5e-3);
    c.view.v.zero_();
    c.view.v_scale.zero_();
    EXPECT_EQ(attend(c.q, c.view).abs().max().item<float>(), 0);
  });
}

}  // namespace
}  // namespace kvcache::testing
