// preallocated_cache.h: every line of behaviour B, and growth.
#include "kvcache/preallocated_cache.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <sstream>

#include "tests/support/toy_allocator.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

CacheSpec three_layers(int64_t rows = 1, int64_t capacity = 16) {
  return {.rows = rows,
          .capacity = capacity,
          .dtype = at::kFloat,
          .layers = {AttentionLayer{.heads = 2, .head_dim = 4},
                     AttentionLayer{.heads = 1, .head_dim = 8},
                     AttentionLayer{.heads = 2, .head_dim = 4, .sliding = 3}}};
}

// The same numbers, [B, 1, T, D] of ascending values, in every layer.
Tensor numbers(int64_t rows, int64_t heads, int64_t first, int64_t tokens,
               int64_t dim) {
  return at::arange(first, first + tokens, at::kFloat)
      .view({1, 1, tokens, 1})
      .expand({rows, heads, tokens, dim});
}

void step_of(Cache& cache, int64_t first, int64_t tokens) {
  Step step = cache.begin_step({.tokens = tokens});
  const int64_t rows = cache.spec().rows;
  for (int64_t layer = 0; layer < 3; ++layer) {
    const bool wide = layer == 1;
    const Tensor k =
        numbers(rows, wide ? 1 : 2, first, tokens, wide ? 8 : 4).contiguous();
    step.update(layer, k, k.neg());
  }
  step.commit();
}

std::string source(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_FALSE(text.str().empty()) << path << ": run from the project's root";
  return text.str();
}

// B1: one allocation for K and one for V of each group of equal layers, zeros.
TEST(PreallocatedCache, B1OneAllocationForEachGroup) {
  TestAllocator& memory = TestAllocator::install();
  const int64_t before = memory.allocations;
  const PreallocatedCache cache(three_layers(2));
  EXPECT_EQ(memory.allocations - before, 4 + 1);  // and the rows' numbers
  ASSERT_EQ(cache.storage().size(), 2U);
  EXPECT_EQ(cache.storage()[0].k.sizes(), at::IntArrayRef({2, 2, 16, 2, 4}));
  EXPECT_EQ(cache.storage()[1].v.sizes(), at::IntArrayRef({1, 2, 16, 1, 8}));
  for (const KvTensors& group : cache.storage()) {
    EXPECT_TRUE(group.k.is_contiguous() && group.v.is_contiguous());
    EXPECT_TRUE(group.k.eq(0).all().item<bool>());
    EXPECT_TRUE(group.v.eq(0).all().item<bool>());
  }
  EXPECT_EQ(PreallocatedCache({.capacity = 1, .layers = three_layers().layers})
                .storage()[0]
                .k.scalar_type(),
            at::kBFloat16);  // the default
}

// B2: views are built once and show the storage; a step writes its own tokens.
TEST(PreallocatedCache, B2ViewsAreBuiltOnce) {
  PreallocatedCache cache(three_layers(2));
  const void* first = nullptr;
  for (int i = 0; i < 5; ++i) {
    Step step = cache.begin_step();
    const KvView& view = step.reserve(2);
    EXPECT_EQ(view.k.sizes(), at::IntArrayRef({2, 2, 16, 4}));
    EXPECT_EQ(view.k.storage().unsafeGetStorageImpl(),
              cache.storage()[0].k.storage().unsafeGetStorageImpl());
    EXPECT_EQ(view.k.const_data_ptr(),
              cache.storage()[0].k.select(0, 1).const_data_ptr());
    const void* impl = view.k.unsafeGetTensorImpl();
    first = i == 0 ? impl : first;
    EXPECT_EQ(impl, first);  // the very tensor, not a new view of it
  }
  step_of(cache, 1, 3);
  for (const KvTensors& group : cache.storage()) {  // nothing but 3 cells
    EXPECT_TRUE(group.k.narrow(2, 3, 13).eq(0).all().item<bool>());
    EXPECT_TRUE(group.v.narrow(2, 3, 13).eq(0).all().item<bool>());
    EXPECT_EQ(group.k.narrow(2, 0, 3).sum().item<float>() * -1,
              group.v.narrow(2, 0, 3).sum().item<float>());
  }
  const std::string text = source("src/preallocated_cache.cpp");
  EXPECT_EQ(text.find("cat("), std::string::npos);
  EXPECT_EQ(text.find("stack("), std::string::npos);
}

// B2: rows that do not align are written one by one, any strides given.
TEST(PreallocatedCache, B2UnalignedRowsAndStrides) {
  for (const bool dense : {true, false}) {
    PreallocatedCache cache(three_layers(2));
    const std::vector<int64_t> counts[] = {{2, 3}, {0, 1}, {3, 2}};
    std::vector<Tensor> held(2);
    for (const auto& count : counts) {
      const Tensor k = at::randn({2, 2, 4, 3}).transpose(2, 3);  // [2, 2, 3, 4]
      Step step = cache.begin_step({.tokens = 3, .count = count});
      step.update(0, dense ? k.contiguous() : k, k);
      const Tensor wide = at::randn({2, 1, 3, 8});
      step.update(1, wide, wide);
      step.update(2, k, dense ? k.contiguous() : k);
      step.commit();
      for (int64_t row = 0; row < 2; ++row) {
        const Tensor live = k.select(0, row).narrow(1, 0, count[row]);
        Tensor& all = held[row];
        all = all.defined() ? at::cat({all, live}, 1) : live;
      }
    }
    for (const int64_t layer : {0, 2}) {
      const KvTensors kv = cache.export_kv(layer);
      EXPECT_TRUE(kv.k.select(0, 0).narrow(1, 0, 5).equal(held[0]));
      EXPECT_TRUE(kv.v.select(0, 1).narrow(1, 0, 6).equal(held[1]));
    }
  }
}

// B3: outputs of a recorded graph are sliced, never select()ed.
TEST(PreallocatedCache, B3WritesSlice) {
  EXPECT_EQ(source("src/write_rows.cpp").find(".select("), std::string::npos);
}

// B4: overflow names slots and capacity; another dtype is refused; nothing is
// written by either.
TEST(PreallocatedCache, B4OverflowAndDtype) {
  PreallocatedCache cache(three_layers(1, 4));
  step_of(cache, 1, 3);
  const std::string held = bytes_of(cache.storage()[0].k);
  EXPECT_EQ(error_of([&] { step_of(cache, 7, 2); }),
            "[Cache::begin_step] row 0 would need slots [3, 5) but capacity is "
            "4; truncate() first or raise CacheSpec::capacity.");
  {
    Step step = cache.begin_step();
    const Tensor k = at::full({1, 2, 1, 4}, 9, at::kBFloat16);
    EXPECT_EQ(error_of([&] { step.update(0, k, k); }),
              "[Step::update] layer 0: cache holds float32, got bfloat16 in k; "
              "convert it or set CacheSpec::dtype.");
  }
  EXPECT_EQ(bytes_of(cache.storage()[0].k), held);
}

// B5: reset frees and zeroes nothing; the numbers; the one line.
TEST(PreallocatedCache, B5ResetAndNumbers) {
  PreallocatedCache cache(three_layers(2));
  step_of(cache, 1, 3);
  const std::string held = bytes_of(cache.storage()[1].v);
  const uint64_t epoch = cache.address_epoch();
  EXPECT_EQ(cache.bytes(), 2U * 2 * 16 * (8 + 8 + 8) * 4);
  EXPECT_EQ(cache.mib(), static_cast<double>(cache.bytes()) / 1048576);
  EXPECT_EQ(cache.bytes_per_token(), 2U * (8 + 8 + 8) * 4);
  EXPECT_EQ(cache.memory().total().reserved, cache.bytes());
  EXPECT_EQ(cache.describe(),
            "PreallocatedCache(layers=3, rows=2, capacity=16, kv_heads=1..2, "
            "head_dim=4..8, dtype=float32, 0.0 MiB, 0 KiB/token, length=3)");
  cache.reset();
  EXPECT_EQ(bytes_of(cache.storage()[1].v), held);
  EXPECT_EQ(cache.address_epoch(), epoch);
  EXPECT_EQ(cache.lengths()[0], 0);
}

// B5 with numbers that show the rounding: 36 layers of 8 heads of 128.
TEST(PreallocatedCache, B5Description) {
  const PreallocatedCache cache(
      {.capacity = 64,
       .layers = std::vector<LayerSpec>(
           36, AttentionLayer{.heads = 8, .head_dim = 128})});
  EXPECT_EQ(cache.describe(),
            "PreallocatedCache(layers=36, rows=1, capacity=64, kv_heads=8, "
            "head_dim=128, dtype=bfloat16, 9.0 MiB, 144 KiB/token, length=0)");
}

// K09: every value survives each growth; sizes are multiples of the step.
TEST(PreallocatedCache, K09GrowthKeepsEveryValue) {
  for (const Growth growth : {Growth::kExact, Growth::kDoubling}) {
    for (const int64_t rows : {1, 3}) {
      CacheSpec spec = three_layers(rows);
      spec.capacity.reset();
      PreallocatedCache cache(spec, {.growth = growth, .multiple = 8});
      EXPECT_EQ(cache.allocated(), 0);
      int64_t length = 0;
      uint64_t epoch = cache.address_epoch();
      for (const int64_t block : {5, 9, 1, 8, 7, 16, 1, 1}) {
        const int64_t before = cache.allocated();
        step_of(cache, length, block);
        length += block;
        EXPECT_EQ(cache.address_epoch(),
                  epoch + (cache.allocated() > before ? 1 : 0));
        epoch = cache.address_epoch();
        EXPECT_EQ(cache.allocated() % 8, 0);
        EXPECT_GE(cache.allocated(), length);
        if (growth == Growth::kExact) {
          EXPECT_LT(cache.allocated(), length + 8);
        } else if (cache.allocated() > before) {
          EXPECT_GE(cache.allocated(), 2 * before);
        }
        for (int64_t layer = 0; layer < 3; ++layer) {
          const KvTensors kv = cache.export_kv(layer);
          const Tensor want =
              numbers(rows, layer == 1 ? 1 : 2, 0, length, layer == 1 ? 8 : 4);
          ASSERT_TRUE(kv.k.equal(want)) << length;
          ASSERT_TRUE(kv.v.equal(want.neg())) << length;
        }
      }
    }
  }
}

// Growth stops at the capacity, whatever doubling or multiples would ask for.
TEST(PreallocatedCache, GrowthStopsAtTheCapacity) {
  const auto cells = [](const PreallocatedOptions& options,
                        const std::vector<int64_t>& reserves) {
    PreallocatedCache cache(three_layers(1, 13), options);
    std::vector<int64_t> found{cache.allocated()};
    for (const int64_t tokens : reserves) {
      cache.reserve(tokens);
      found.push_back(cache.allocated());
    }
    return found;
  };
  using Cells = std::vector<int64_t>;
  EXPECT_EQ(cells({.growth = Growth::kDoubling, .initial = 3}, {4, 7, 2, 13}),
            (Cells{3, 6, 12, 12, 13}));
  EXPECT_EQ(cells({.growth = Growth::kExact}, {4, 2, 5, 13}),
            (Cells{0, 4, 4, 5, 13}));
  EXPECT_EQ(cells({.growth = Growth::kExact, .multiple = 8}, {1, 9}),
            (Cells{0, 8, 13}));
  EXPECT_EQ(cells({.growth = Growth::kExact,
                   .multiple = std::numeric_limits<int64_t>::max()},
                  {1}),
            (Cells{0, 13}));
  EXPECT_EQ(cells({}, {1, 13}), (Cells{13, 13, 13}));
}

// A reservation beyond what can be allocated is an error and changes nothing.
TEST(PreallocatedCache, AHugeReservationIsAnError) {
  CacheSpec spec = three_layers();
  spec.capacity.reset();
  PreallocatedCache cache(spec, {.growth = Growth::kDoubling, .multiple = 8});
  step_of(cache, 1, 3);
  const std::string held = picture(cache);
  EXPECT_NE(
      error_of([&] { cache.reserve(std::numeric_limits<int64_t>::max()); }),
      "");
  EXPECT_EQ(picture(cache), held);
  EXPECT_EQ(cache.allocated(), 8);
  step_of(cache, 4, 9);
}

}  // namespace
}  // namespace kvcache::toy
