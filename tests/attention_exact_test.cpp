// attention_exact_test.cpp - what must not change a single bit of attend().

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <gtest/gtest.h>

#include "src/kernels/cpu_level.h"
#include "tests/support/attention_cases.h"

namespace kvcache::testing {
namespace {

using kernels::CpuLevel;
using kernels::ForcedCpuLevel;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16};

// Every level that this machine runs; both dtypes.
template <class F>
void on_every_level(const F& check) {
  for (const CpuLevel level : kernels::kCpuLevels) {
    if (!kernels::cpu_supports(level)) continue;
    const ForcedCpuLevel forced(level);
    for (const at::ScalarType dtype : kDtypes) {
      SCOPED_TRACE(std::string(name(level)) + " " + c10::toString(dtype));
      check(dtype);
    }
  }
}

Tensor decode(const Tensor& q, const KvView& view) {
  return attend(q, view, {.role = Role::kDecode});
}

// Queries [first, first + count) of a case.
AttentionCase part_of(const AttentionCase& c, int64_t first, int64_t count) {
  AttentionCase part = c;
  part.q = c.q.narrow(2, first, count);
  part.view.limits = c.view.limits.narrow(1, first, count);
  return part;
}

Tensor in_chunks(const AttentionCase& c, int64_t chunk, Role role) {
  std::vector<Tensor> outs;
  for (int64_t t = 0; t < c.q.size(2); t += chunk) {
    const AttentionCase part = part_of(c, t, std::min(chunk, c.q.size(2) - t));
    outs.push_back(attend(part.q, part.view, {.role = role}));
  }
  return at::cat(outs, 2);
}

class ThreadCount {
 public:
  explicit ThreadCount(int count) : before_(at::get_num_threads()) {
    at::set_num_threads(count);
  }
  ~ThreadCount() { at::set_num_threads(before_); }

 private:
  int before_;
};

TEST(AttendExact, AtOnceInChunksAndOneByOne) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t group : {1, 3, 4}) {
      for (const int64_t prefix : {0, 100, 127, 128, 129, 250, 385}) {
        const AttentionCase c = make_case({.rows = 2,
                                           .heads = 2,
                                           .group = group,
                                           .prefix = prefix,
                                           .tokens = 37,
                                           .dtype = dtype});
        const Tensor whole = attend(c.q, c.view);
        EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kDecode)));
        EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kPrefill)));
        EXPECT_TRUE(at::equal(whole, in_chunks(c, 5, Role::kDecode)));
        EXPECT_TRUE(at::equal(whole, in_chunks(c, 16, Role::kPrefill)));
      }
    }
  });
}

TEST(AttendExact, EveryHeadSizeInBothRoles) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t D : {1, 2, 7, 8, 16, 20, 32, 33, 48, 64, 80, 96, 128,
                            160, 192, 256, 320}) {
      SCOPED_TRACE(D);
      const AttentionCase c = make_case({.heads = 2,
                                         .group = 2,
                                         .head_dim = D,
                                         .prefix = 140,
                                         .tokens = 9,
                                         .dtype = dtype});
      const Tensor whole = attend(c.q, c.view);
      EXPECT_TRUE(at::equal(whole, decode(c.q, c.view)));
      EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kDecode)));
      EXPECT_TRUE(at::equal(whole, in_chunks(c, 2, Role::kDecode)));
    }
  });
}

void expect_the_same_in_chunks(const AttentionCase& c) {
  const Tensor whole = attend(c.q, c.view);
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kDecode)));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 7, Role::kDecode)));
  EXPECT_TRUE(at::equal(whole, in_chunks(c, 11, Role::kPrefill)));
}

TEST(AttendExact, SlidingWindowsOfEverySize) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t sliding : {1, 2, 3, 4, 63, 64, 127, 128, 129, 200}) {
      SCOPED_TRACE(sliding);
      expect_the_same_in_chunks(make_case({.heads = 2,
                                           .group = 3,
                                           .prefix = 240,
                                           .tokens = 30,
                                           .sliding = sliding,
                                           .dtype = dtype}));
    }
  });
}

TEST(AttendExact, SinksOfEveryNumber) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t sinks : {1, 2, 3, 16, 63, 127, 128}) {
      for (const int64_t prefix : {0, 120, 240}) {
        SCOPED_TRACE(c10::str(sinks, " sinks, prefix ", prefix));
        expect_the_same_in_chunks(make_case({.heads = 2,
                                             .group = 3,
                                             .prefix = prefix,
                                             .tokens = 30,
                                             .sliding = 50,
                                             .sinks = sinks,
                                             .dtype = dtype}));
      }
    }
  });
}

TEST(AttendExact, ThreadCount) {
  on_every_level([](at::ScalarType dtype) {
    const AttentionCase prefill = make_case(
        {.rows = 2, .heads = 3, .group = 3, .tokens = 150, .dtype = dtype});
    const AttentionCase step = make_case(
        {.rows = 2, .heads = 3, .group = 3, .prefix = 700, .dtype = dtype});
    AttentionCase sinks = step;
    sinks.view.sliding = 400;
    sinks.view.sinks = 70;
    std::vector<Tensor> prefilled, decoded, with_sinks;
    for (const int threads : {1, 2, 3, 5}) {
      const ThreadCount count(threads);
      prefilled.push_back(attend(prefill.q, prefill.view));
      decoded.push_back(decode(step.q, step.view));
      EXPECT_TRUE(at::equal(prefilled.front(), prefilled.back())) << threads;
      EXPECT_TRUE(at::equal(decoded.front(), decoded.back())) << threads;
      with_sinks.push_back(decode(sinks.q, sinks.view));
      with_sinks.push_back(attend(sinks.q, sinks.view));
      EXPECT_TRUE(at::equal(with_sinks.front(), with_sinks.back())) << threads;
    }
  });
}

TEST(AttendExact, NeighboursAndPadding) {
  on_every_level([](at::ScalarType dtype) {
    AttentionCase batch = make_case({.rows = 3,
                                     .heads = 2,
                                     .group = 3,
                                     .prefix = 200,
                                     .tokens = 20,
                                     .dtype = dtype});
    // Row 1 is padded on the left by 7, row 2 holds fewer keys and ends early.
    int64_t* limits = batch.view.limits.mutable_data_ptr<int64_t>();
    for (int64_t t = 0; t < 20; ++t) {
      limits[20 + t] = t < 7 ? 0 : 31 + t - 7;
      limits[40 + t] = t < 11 ? 130 + t : 0;
    }
    const Tensor together = attend(batch.q, batch.view);
    EXPECT_TRUE(at::equal(together, decode(batch.q, batch.view)));
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t first = b == 1 ? 7 : 0, count = b == 2 ? 11 : 20 - first;
      AttentionCase alone = part_of(batch, first, count);
      alone.q = alone.q.narrow(0, b, 1);
      alone.view.k = alone.view.k.narrow(0, b, 1);
      alone.view.v = alone.view.v.narrow(0, b, 1);
      alone.view.limits = alone.view.limits.narrow(0, b, 1);
      const Tensor expected = attend(alone.q, alone.view);
      EXPECT_TRUE(at::equal(together.narrow(0, b, 1).narrow(2, first, count),
                            expected));
      EXPECT_TRUE(at::equal(expected, decode(alone.q, alone.view)));
    }
    EXPECT_EQ(
        together.narrow(0, 1, 1).narrow(2, 0, 7).abs().max().item<float>(), 0);
    EXPECT_EQ(
        together.narrow(0, 2, 1).narrow(2, 11, 9).abs().max().item<float>(), 0);
  });
}

TEST(AttendExact, StorageOrderCapacityAndRing) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t sinks : {0, 3, 128}) {
      const AttentionShape shape = {.rows = 2,
                                    .heads = 2,
                                    .group = 3,
                                    .prefix = 290,
                                    .tokens = 5,
                                    .sliding = 140,
                                    .sinks = sinks,
                                    .dtype = dtype};
      const AttentionCase plain = make_case(shape);
      const Tensor expected = attend(plain.q, plain.view);
      for (const bool position_major : {false, true}) {
        for (const int64_t capacity : {295, 296, 512, 1000}) {
          if (sinks > 0 && capacity != 512) continue;
          for (const int64_t ring : {0, 144, 145, 200, 256, 295}) {
            AttentionShape other = shape;
            other.position_major = position_major;
            other.capacity = capacity;
            other.ring = ring;
            AttentionCase c = plain;
            c.view.k = store(other, plain.view.k);
            c.view.v = store(other, plain.view.v);
            c.view.window = 0;
            c.view.ring = ring;
            SCOPED_TRACE(
                c10::str(sinks, " ", position_major, " ", capacity, " ", ring));
            EXPECT_TRUE(at::equal(expected, attend(c.q, c.view)));
            EXPECT_TRUE(at::equal(expected, decode(c.q, c.view)));
          }
        }
      }
    }
  });
}

TEST(AttendExact, StridesOfQueries) {
  on_every_level([](at::ScalarType dtype) {
    const AttentionCase c = make_case({.rows = 2,
                                       .heads = 2,
                                       .group = 3,
                                       .head_dim = 40,
                                       .prefix = 30,
                                       .tokens = 6,
                                       .dtype = dtype});
    const Tensor expected = attend(c.q, c.view);
    // As a part of fused q, k, v rows, and as [B, Hq, T, D].
    const Tensor fused = at::cat({at::randn({2, 6, 3}, c.q.options()),
                                  c.q.transpose(1, 2).reshape({2, 6, 6 * 40})},
                                 2);
    const Tensor q =
        fused.narrow(2, 3, 6 * 40).unflatten(2, {6, 40}).transpose(1, 2);
    EXPECT_TRUE(at::equal(expected, attend(q, c.view)));
    EXPECT_TRUE(at::equal(expected, decode(q, c.view)));
    EXPECT_TRUE(at::equal(expected, attend(c.q.contiguous(), c.view)));
    // Keys of one row for all rows.
    AttentionCase shared = c;
    shared.view.k = c.view.k.narrow(0, 0, 1).expand({2, 2, 36, 40});
    shared.view.v = c.view.v.narrow(0, 0, 1).expand({2, 2, 36, 40});
    AttentionCase copied = shared;
    copied.view.k = shared.view.k.contiguous();
    copied.view.v = shared.view.v.contiguous();
    EXPECT_TRUE(at::equal(attend(shared.q, shared.view),
                          attend(copied.q, copied.view)));
  });
}

// A later token may be NaN or infinite, in K and in V: no earlier one sees it.
TEST(AttendExact, LaterTokensDoNotMatter) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t sliding : {0, 33}) {
      for (const int64_t prefix : {0, 1, 126, 127, 128, 131}) {
        const AttentionCase c = make_case({.heads = 2,
                                           .group = 3,
                                           .prefix = prefix,
                                           .tokens = 12,
                                           .sliding = sliding,
                                           .dtype = dtype});
        const Tensor expected = attend(c.q, c.view);
        for (int64_t t = 1; t < 12; ++t) {
          AttentionCase spoilt = c;
          spoilt.view.k = c.view.k.clone();
          spoilt.view.v = c.view.v.clone();
          spoilt.view.k.narrow(2, prefix + t, 12 - t)
              .fill_(std::numeric_limits<double>::quiet_NaN());
          spoilt.view.v.narrow(2, prefix + t, 12 - t)
              .fill_(std::numeric_limits<double>::infinity());
          for (const Role role : {Role::kPrefill, Role::kDecode}) {
            const Tensor out = attend(c.q, spoilt.view, {.role = role});
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

// A window that has moved on does not see what was there before.
TEST(AttendExact, EarlierTokensBehindTheWindowDoNotMatter) {
  on_every_level([](at::ScalarType dtype) {
    const AttentionCase c = make_case({.heads = 1,
                                       .group = 3,
                                       .prefix = 260,
                                       .tokens = 10,
                                       .sliding = 50,
                                       .dtype = dtype});
    const Tensor expected = attend(c.q, c.view);
    for (int64_t t = 0; t < 10; ++t) {
      AttentionCase spoilt = c;
      spoilt.view.k = c.view.k.clone();
      spoilt.view.v = c.view.v.clone();
      const int64_t seen_from = 260 + t + 1 - 50;
      const double nan = std::numeric_limits<double>::quiet_NaN();
      spoilt.view.k.narrow(2, 0, seen_from).fill_(nan);
      spoilt.view.v.narrow(2, 0, seen_from).fill_(nan);
      for (const Role role : {Role::kPrefill, Role::kDecode}) {
        const Tensor out = attend(c.q, spoilt.view, {.role = role});
        EXPECT_TRUE(
            at::equal(expected.narrow(2, t, 10 - t), out.narrow(2, t, 10 - t)));
      }
    }
  });
}

// Between the sinks and the window nothing is seen, whatever tile the query is
// in and whatever its neighbours see.
TEST(AttendExact, WhatLiesBetweenSinksAndWindowDoesNotMatter) {
  on_every_level([](at::ScalarType dtype) {
    for (const int64_t sinks : {1, 5, 64}) {
      const AttentionCase c = make_case({.heads = 1,
                                         .group = 3,
                                         .prefix = 260,
                                         .tokens = 10,
                                         .sliding = 50,
                                         .sinks = sinks,
                                         .dtype = dtype});
      const Tensor expected = attend(c.q, c.view);
      for (int64_t t = 0; t < 10; ++t) {
        AttentionCase spoilt = c;
        spoilt.view.k = c.view.k.clone();
        spoilt.view.v = c.view.v.clone();
        const int64_t unseen = 260 + t + 1 - 50 - sinks;
        const double nan = std::numeric_limits<double>::quiet_NaN();
        spoilt.view.k.narrow(2, sinks, unseen).fill_(nan);
        spoilt.view.v.narrow(2, sinks, unseen).fill_(nan);
        for (const Role role : {Role::kPrefill, Role::kDecode}) {
          const Tensor out = attend(c.q, spoilt.view, {.role = role});
          EXPECT_TRUE(at::equal(expected.narrow(2, t, 10 - t),
                                out.narrow(2, t, 10 - t)));
        }
      }
    }
  });
}

// Limits in no order: what a tile of queries sees has holes.
TEST(AttendExact, AnyLimits) {
  on_every_level([](at::ScalarType dtype) {
    AttentionCase c = make_case({.heads = 2,
                                 .group = 2,
                                 .head_dim = 32,
                                 .prefix = 380,
                                 .tokens = 20,
                                 .dtype = dtype});
    for (const auto& [sliding, sinks] : {std::pair<int64_t, int64_t>{0, 0},
                                         {1, 0},
                                         {50, 0},
                                         {1, 7},
                                         {50, 100}}) {
      c.view.sliding = sliding;
      c.view.sinks = sinks;
      for (int64_t t = 0; t < 20; ++t) {
        c.view.limits.mutable_data_ptr<int64_t>()[t] = t * 7919 % 401;
      }
      const Tensor whole = attend(c.q, c.view);
      EXPECT_TRUE(at::equal(whole, decode(c.q, c.view)));
      EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kDecode)));
      EXPECT_TRUE(at::equal(whole, in_chunks(c, 1, Role::kPrefill)));
    }
  });
}

}  // namespace
}  // namespace kvcache::testing
