// types.h: byte counts and defaults.
#include "kvcache/types.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace kvcache {
namespace {

TEST(Types, ACheckpointCountsEachStorageOnce) {
  const Tensor shared = at::zeros({2, 8, 4});
  auto point = std::make_shared<RestorePoint>();
  point->position = 3;
  point->state = at::zeros({1, 10});
  auto later = std::make_shared<RestorePoint>(*point);
  later->conv = at::zeros({1, 6}, at::kBFloat16);
  const Checkpoint from{.length = 4,
                        .kv = {{shared.narrow(1, 0, 4), shared.narrow(1, 4, 4)},
                               {at::zeros({1, 4, 2}), Tensor()}},
                        .points = {point, later}};
  EXPECT_EQ(from.bytes(), 2U * 8 * 4 * 4 + 4U * 2 * 4 + 10U * 4 + 6U * 2);
  EXPECT_EQ(Checkpoint{}.bytes(), 0U);
}

TEST(Types, ATotalIsUnboundedIfOnePartIs) {
  MemoryReport report;
  report.k = {.used = 1, .reserved = 10, .capacity = 100};
  report.v = {.used = 2, .reserved = 20, .capacity = 200};
  for (MemoryUse* part : {&report.scales, &report.conv, &report.recurrent,
                          &report.restore_points, &report.graphs}) {
    *part = {.used = 3, .reserved = 30, .capacity = 300};
  }
  EXPECT_EQ(report.total().used, 1U + 2 + 5 * 3);
  EXPECT_EQ(report.total().reserved, 10U + 20 + 5 * 30);
  EXPECT_EQ(report.total().capacity, 100U + 200 + 5 * 300);
  report.v.capacity.reset();
  EXPECT_FALSE(report.total().capacity.has_value());
}

TEST(Types, LayersCompareByTheirNumbers) {
  const LayerSpec attention = AttentionLayer{.heads = 2, .head_dim = 4};
  EXPECT_EQ(attention, LayerSpec(AttentionLayer{.heads = 2, .head_dim = 4}));
  EXPECT_NE(attention,
            LayerSpec(AttentionLayer{.heads = 2, .head_dim = 4, .sliding = 1}));
  EXPECT_NE(attention, LayerSpec(RecurrentLayer{.state_shape = {2, 4}}));
  EXPECT_EQ(CacheSpec{}.dtype, at::kBFloat16);  // B1
}

TEST(Types, ReasonsGoFromBestToWorst) {
  EXPECT_LT(TruncationReason::kNoChange, TruncationReason::kExact);
  EXPECT_LT(TruncationReason::kExact, TruncationReason::kRestorePoint);
  EXPECT_LT(TruncationReason::kRestorePoint, TruncationReason::kEvicted);
}

}  // namespace
}  // namespace kvcache
