// row_loops_test.cpp - the elementwise loops against float64, and their bits.
#include "src/model/forward/row_loops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "src/kernels/cpu_level.h"

namespace kvcache::model {
namespace {

using kernels::CpuLevel;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float rounded(float x) { return x; }
float widened(float x) { return x; }
float widened(Bf16 x) {
  const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

template <typename T>
T narrowed(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return rounded(x);
  } else {
    return {c10::BFloat16(x).x};
  }
}

template <typename T>
std::vector<T> random_values(int64_t count, float scale, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = narrowed<T>(uniform(random));
  return values;
}

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(T)) == 0;
}

// |found - wanted| allowed: `ulps` roundings of T.
template <typename T>
void expect_close(T found, double wanted, double ulps, double floor) {
  const double step = std::is_same_v<T, float> ? 0x1p-23 : 0x1p-8;
  EXPECT_NEAR(widened(found), wanted, std::abs(wanted) * step * ulps + floor);
}

// Every set of loops that this machine runs, times the two types.
template <typename T>
class RowLoopsTest : public ::testing::Test {
 protected:
  template <typename F>
  void on_each_level(F&& check) {
    for (const CpuLevel level : kernels::kCpuLevels) {
      if (!kernels::cpu_supports(level)) continue;
      SCOPED_TRACE(kernels::name(level));
      const kernels::ForcedCpuLevel forced(level);
      check(row_loops<T>());
    }
  }
};
using RowTypes = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(RowLoopsTest, RowTypes);

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double gelu_tanh(double x) {
  const double u = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1.0 + std::tanh(u));
}

TYPED_TEST(RowLoopsTest, ActivationsAreThoseOfFloat64) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const std::vector<
        std::pair<typename RowLoops<T>::Activate, double (*)(double)>>
        pairs = {{loops.silu, silu},
                 {loops.gelu, gelu},
                 {loops.gelu_tanh, gelu_tanh},
                 {loops.sigmoid, sigmoid}};
    for (const auto& [loop, reference] : pairs) {
      for (const float scale : {0.01F, 1.0F, 12.0F, 100.0F}) {
        const auto x = random_values<T>(1000, scale, 1);
        std::vector<T> out(x.size());
        loop(out.data(), x.data(), nullptr, 1000);
        for (size_t i = 0; i < x.size(); ++i) {
          // Below 1e-6 the exact tail of a GELU is of no use to anyone.
          expect_close(out[i], reference(widened(x[i])), 8.0, 1e-6);
        }
      }
    }
  });
}

TYPED_TEST(RowLoopsTest, GatedActivationMultiplies) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const auto x = random_values<T>(77, 3.0F, 1);
    const auto factor = random_values<T>(77, 3.0F, 2);
    std::vector<T> out(x.size());
    loops.silu(out.data(), x.data(), factor.data(), 77);
    for (size_t i = 0; i < x.size(); ++i) {
      expect_close(out[i], silu(widened(x[i])) * widened(factor[i]), 8.0, 1e-6);
    }
  });
}

TYPED_TEST(RowLoopsTest, ActivationsKeepNaNAndSaturate) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const std::vector<T> x = {narrowed<T>(kNaN), narrowed<T>(-1e30F),
                              narrowed<T>(1e30F), narrowed<T>(0.0F)};
    for (const auto loop : {loops.silu, loops.gelu, loops.gelu_tanh}) {
      std::vector<T> out(x.size());
      loop(out.data(), x.data(), nullptr, 4);
      EXPECT_TRUE(std::isnan(widened(out[0])));
      EXPECT_TRUE(std::isfinite(widened(out[1])));
      EXPECT_EQ(widened(out[2]), widened(x[2]));
      EXPECT_EQ(widened(out[3]), 0.0F);
    }
  });
}

// The bits of an element do not hang on how many stand beside it: that is what
// LibTorch's own activations break when a width is no multiple of 32.
TYPED_TEST(RowLoopsTest, ActivationsHaveTheSameBitsAtAnyWidth) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const auto x = random_values<T>(200, 6.0F, 3);
    for (const auto loop :
         {loops.silu, loops.gelu, loops.gelu_tanh, loops.sigmoid}) {
      std::vector<T> alone(x.size()), out(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        loop(&alone[i], &x[i], &x[i], 1);
      }
      for (const int64_t width : {1, 15, 16, 17, 31, 32, 33, 47, 63, 199}) {
        loop(out.data(), x.data(), x.data(), width);
        EXPECT_TRUE(same_bits(out.data(), alone.data(), width)) << width;
      }
    }
  });
}

TYPED_TEST(RowLoopsTest, NormsAreThoseOfFloat64) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    for (const int64_t width : {1, 7, 16, 33, 576}) {
      for (const bool centre : {false, true}) {
        const auto size = static_cast<size_t>(width);
        std::vector<float> residual = random_values<float>(width, 4.0F, 1);
        const auto before = residual;
        const auto delta = random_values<T>(width, 2.0F, 2);
        const auto weight = random_values<float>(width, 2.0F, 3);
        const auto bias = random_values<float>(width, 2.0F, 4);
        std::vector<T> out(size);
        const float eps = 1e-5F;
        loops.add_norm(
            out.data(), residual.data(), delta.data(),
            {weight.data(), centre ? bias.data() : nullptr, eps, centre},
            width);
        double mean = 0.0, squares = 0.0;
        for (size_t i = 0; i < size; ++i) {
          EXPECT_EQ(residual[i], before[i] + widened(delta[i]));
          if (centre) mean += static_cast<double>(residual[i]) / width;
        }
        for (const float x : residual) {
          squares += (x - mean) * (x - mean) / width;
        }
        for (size_t i = 0; i < size; ++i) {
          const double wanted =
              (residual[i] - mean) / std::sqrt(squares + eps) * weight[i] +
              (centre ? bias[i] : 0.0);
          expect_close(out[i], wanted, 8.0, 1e-5);
        }
      }
    }
  });
}

// Adding alone is what the norm does before it: what leaves a part of a model
// has the bits that its next layer would have made.
TYPED_TEST(RowLoopsTest, AddingIsTheNormsOwn) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    auto residual = random_values<float>(33, 4.0F, 1);
    const auto before = residual;
    const auto delta = random_values<T>(33, 2.0F, 2);
    loops.add(residual.data(), delta.data(), 33);
    for (size_t i = 0; i < residual.size(); ++i) {
      EXPECT_EQ(residual[i], before[i] + widened(delta[i]));
    }
  });
}

// Without delta the residual stream is only read.
TYPED_TEST(RowLoopsTest, NormWithoutDeltaLeavesTheResidual) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    auto residual = random_values<float>(33, 4.0F, 1);
    const auto before = residual;
    const std::vector<float> weight(33, 1.0F);
    std::vector<T> out(33);
    loops.add_norm(out.data(), residual.data(), nullptr,
                   {weight.data(), nullptr, 1e-5F, false}, 33);
    EXPECT_EQ(residual, before);
  });
}

TYPED_TEST(RowLoopsTest, ZerosStayFinite) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    std::vector<float> residual(48, 0.0F);
    const std::vector<float> weight(48, 2.0F);
    for (const bool centre : {false, true}) {
      std::vector<T> out(48, narrowed<T>(kNaN));
      loops.add_norm(out.data(), residual.data(), nullptr,
                     {weight.data(), nullptr, 1e-6F, centre}, 48);
      for (const T x : out) EXPECT_EQ(widened(x), 0.0F);
    }
  });
}

// K73: with a quarter of a head of 16 turned, only channels 0 to 3 change, and
// the pairs are (0, 2) and (1, 3).
TYPED_TEST(RowLoopsTest, K73PartialRotaryPairsWithinTheTurnedSlice) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const float cosine[] = {0.5F, 0.25F}, sine[] = {0.75F, -0.125F};
    for (int unit = 0; unit < 16; ++unit) {
      std::vector<T> q(16, narrowed<T>(0.0F)), out(16, narrowed<T>(kNaN));
      q[static_cast<size_t>(unit)] = narrowed<T>(1.0F);
      loops.turn_heads(out.data(), q.data(), 1, 16, nullptr, {cosine, sine, 2});
      std::vector<float> wanted(16, 0.0F);
      const int pair = unit % 2;
      if (unit < 2) {
        wanted[static_cast<size_t>(pair)] = cosine[pair];
        wanted[static_cast<size_t>(pair + 2)] = sine[pair];
      } else if (unit < 4) {
        wanted[static_cast<size_t>(pair)] = -sine[pair];
        wanted[static_cast<size_t>(pair + 2)] = cosine[pair];
      } else {
        wanted[static_cast<size_t>(unit)] = 1.0F;
      }
      for (size_t i = 0; i < 16; ++i) EXPECT_EQ(widened(out[i]), wanted[i]);
    }
  });
}

TYPED_TEST(RowLoopsTest, HeadsAreNormedBeforeTheTurn) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    constexpr int64_t kHeads = 3, kSize = 20, kPairs = 9;
    const auto x = random_values<T>(kHeads * kSize, 2.0F, 1);
    const auto weight = random_values<float>(kSize, 2.0F, 2);
    const auto cosine = random_values<float>(kPairs, 1.0F, 3);
    const auto sine = random_values<float>(kPairs, 1.0F, 4);
    const NormParameters norm = {weight.data(), nullptr, 1e-6F, false};
    std::vector<T> out(x.size());
    loops.turn_heads(out.data(), x.data(), kHeads, kSize, &norm,
                     {cosine.data(), sine.data(), kPairs});
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto value = [&](int64_t i) {
        double squares = 0.0;
        for (int64_t j = 0; j < kSize; ++j) {
          const double each = widened(x[static_cast<size_t>(head * kSize + j)]);
          squares += each * each / kSize;
        }
        return widened(x[static_cast<size_t>(head * kSize + i)]) /
               std::sqrt(squares + 1e-6) * weight[static_cast<size_t>(i)];
      };
      for (int64_t i = 0; i < kSize; ++i) {
        double wanted = value(i);
        if (i < kPairs) {
          const auto p = static_cast<size_t>(i);
          wanted = value(i) * cosine[p] - value(i + kPairs) * sine[p];
        } else if (i < 2 * kPairs) {
          const auto p = static_cast<size_t>(i - kPairs);
          wanted = value(i) * cosine[p] + value(i - kPairs) * sine[p];
        }
        expect_close(out[static_cast<size_t>(head * kSize + i)], wanted, 8.0,
                     1e-5);
      }
    }
  });
}

TYPED_TEST(RowLoopsTest, FloatsOfARowAreExact) {
  using T = TypeParam;
  this->on_each_level([](const RowLoops<T>& loops) {
    const auto x = random_values<T>(37, 1e3F, 1);
    std::vector<float> out(37);
    loops.to_float(out.data(), x.data(), 37);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(out[i], widened(x[i]));
  });
}

}  // namespace
}  // namespace kvcache::model
