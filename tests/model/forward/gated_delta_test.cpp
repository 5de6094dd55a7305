// gated_delta_test.cpp - the gated delta kernel against float64, and what must
// not change its bits: cuts, padding, neighbours, threads, places.
#include "src/model/forward/gated_delta.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "src/kernels/cpu_level.h"
#include "tests/model/forward/delta_cases.h"

namespace kvcache::model {
namespace {

using kernels::CpuLevel;

// Float32 sums of some hundred terms, states of some hundred tokens.
constexpr double kFloatError = 1e-6;
// The rounding of the output to bfloat16 alone: half a step of 2^-8.
constexpr double kBfloat16Error = 2e-3;

// Value heads of a key head: 1, 2 and 3; widths that fill vectors, and not.
const LinearAttentionConfig kEqual{4, 4, 32, 32, 4};
const LinearAttentionConfig kTwo{2, 4, 8, 8, 4};
const LinearAttentionConfig kThree{1, 3, 20, 37, 5};
const LinearAttentionConfig kLarge{16, 16, 128, 128, 4};

// Every instruction set that this machine runs.
class GatedDeltaTest : public ::testing::TestWithParam<CpuLevel> {
 protected:
  void SetUp() override {
    if (!kernels::cpu_supports(GetParam())) GTEST_SKIP() << "no such CPU";
    level_.emplace(GetParam());
  }
  void TearDown() override { level_.reset(); }

 private:
  std::optional<kernels::ForcedCpuLevel> level_;
};

void expect_close(const DeltaResult& found, const DeltaResult& wanted) {
  EXPECT_LT(relative_error(found.out, wanted.out), kFloatError);
  // On their own: a wrong edge of the convolution is lost among many tokens.
  const int64_t edge = std::min<int64_t>(4, found.out.size(1));
  EXPECT_LT(relative_error(found.out.narrow(1, 0, edge),
                           wanted.out.narrow(1, 0, edge)),
            kFloatError);
  EXPECT_LT(relative_error(found.memory.state, wanted.memory.state),
            kFloatError);
  EXPECT_TRUE(found.memory.conv.to(at::kDouble).equal(wanted.memory.conv));
}

// The first so many tokens of one text, for each of `counts`, ascending.
void expect_exact(DeltaCase layer, const std::vector<int64_t>& counts) {
  const Tensor in = layer.tokens(1, counts.back());
  const DeltaMemory before = layer.memory(1);
  DeltaResult wanted{{}, before};
  std::vector<Tensor> outs;
  int64_t done = 0;
  for (const int64_t count : counts) {
    SCOPED_TRACE(count);
    wanted = layer.exact(in.narrow(1, done, count - done), wanted.memory);
    outs.push_back(wanted.out);
    done = count;
    expect_close(DeltaCase::run(layer.core(), in.narrow(1, 0, count), before),
                 {at::cat(outs, 1), wanted.memory});
  }
}

// From a state and inputs that are there already; around tiles of 32 tokens.
TEST_P(GatedDeltaTest, IsTheRecurrenceOfFloat64) {
  for (const auto& sizes : {kEqual, kTwo, kThree}) {
    expect_exact(DeltaCase(sizes), {1, 2, 3, 4, 31, 32, 33, 63, 64, 65, 300});
  }
  expect_exact(DeltaCase(kLarge), {1, 33});
}

// Bfloat16 is what is read and written; all between is float32.
TEST_P(GatedDeltaTest, Bfloat16IsRoundedOnceAtTheEnd) {
  for (const auto& sizes : {kEqual, kThree}) {
    DeltaCase layer(sizes);
    const Tensor in = layer.tokens(1, 70, at::kBFloat16);
    const DeltaMemory before = layer.memory(1, at::kBFloat16);
    const DeltaResult found = DeltaCase::run(layer.core(), in, before);
    const DeltaResult wanted = layer.exact(in, before);
    EXPECT_LT(relative_error(found.out, wanted.out), kBfloat16Error);
    EXPECT_LT(relative_error(found.memory.state, wanted.memory.state),
              kFloatError);
    EXPECT_TRUE(found.memory.conv.to(at::kDouble).equal(wanted.memory.conv));
  }
}

// Value head h reads key head h / (Hv / Hk): the other order is another result.
TEST_P(GatedDeltaTest, NeighbouringValueHeadsReadOneKeyHead) {
  DeltaCase layer(kTwo);
  const Tensor in = layer.tokens(1, 5);
  const DeltaMemory before = layer.memory(1);
  const DeltaResult found = DeltaCase::run(layer.core(), in, before);
  EXPECT_GT(relative_error(found.out, layer.exact(in, before, true).out), 0.1);
}

// Parts one after the other, the second from what the first left.
DeltaResult in_parts(const GatedDeltaCore& core, const Tensor& in,
                     DeltaMemory memory, const std::vector<int64_t>& parts,
                     bool in_place) {
  std::vector<Tensor> outs;
  int64_t first = 0;
  for (const int64_t count : parts) {
    const DeltaResult part = DeltaCase::run(core, in.narrow(1, first, count),
                                            memory, {}, {}, in_place);
    outs.push_back(part.out);
    memory = part.memory;
    first += count;
  }
  return {at::cat(outs, 1), memory};
}

TEST_P(GatedDeltaTest, ACutAnywhereChangesNoBit) {
  constexpr int64_t kTokens = 70;
  for (const auto& sizes : {kEqual, kTwo, kThree}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      DeltaCase layer(sizes);
      const GatedDeltaCore core = layer.core();
      const Tensor in = layer.tokens(1, kTokens, dtype);
      const DeltaMemory before = layer.memory(1, dtype);
      const DeltaResult whole = DeltaCase::run(core, in, before);
      for (int64_t cut = 1; cut < kTokens; ++cut) {
        EXPECT_TRUE(same_bits(
            in_parts(core, in, before, {cut, kTokens - cut}, cut % 2 == 0),
            whole))
            << cut;
      }
      const std::vector<int64_t> each(kTokens, 1);
      EXPECT_TRUE(same_bits(in_parts(core, in, before, each, true), whole));
      EXPECT_TRUE(same_bits(in_parts(core, in, before, each, false), whole));
    }
  }
}

// One token of states so large that they are written past the caches.
TEST_P(GatedDeltaTest, ALargeStateTokenByTokenHasTheSameBits) {
  DeltaCase layer(kLarge);
  const GatedDeltaCore core = layer.core();
  const Tensor in = layer.tokens(1, 5, at::kBFloat16);
  const DeltaMemory before = layer.memory(1, at::kBFloat16);
  const DeltaResult whole = DeltaCase::run(core, in, before);
  for (const bool in_place : {false, true}) {
    EXPECT_TRUE(
        same_bits(in_parts(core, in, before, {1, 1, 2, 1}, in_place), whole));
  }
}

// A window holds, at each live token, what a run that ends there leaves; dead
// tokens are not written, and all else has the same bits. Small and large
// states, in place and not, over the border of a tile.
TEST_P(GatedDeltaTest, AWindowHoldsWhatEachTokenLeaves) {
  for (const auto& sizes : {kEqual, kTwo, kThree, kLarge}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      DeltaCase layer(sizes);
      const GatedDeltaCore core = layer.core();
      const std::vector<int64_t> skip = {2, 0}, count = {3, 35};
      const Tensor in = layer.tokens(2, 35, dtype);
      const DeltaMemory before = layer.memory(2, dtype);
      const int64_t taps = sizes.conv_kernel - 1;
      StateWindow window;
      window.state = at::full({2, 35, 2, sizes.value_heads, sizes.key_head_dim,
                               sizes.value_head_dim},
                              kNaN, at::TensorOptions(at::kFloat))
                         .select(2, 1);
      window.conv =
          at::full({2, sizes.conv_channels(), taps + 35}, kNaN, in.options());
      const bool in_place = dtype == at::kFloat;
      EXPECT_TRUE(same_bits(
          DeltaCase::run(core, in, before, skip, count, in_place, &window),
          DeltaCase::run(core, in, before, skip, count)));
      for (size_t b = 0; b < 2; ++b) {
        const auto row = static_cast<int64_t>(b);
        for (int64_t n = 1; n <= count[b]; n += n < 5 ? 1 : 5) {
          const DeltaResult alone = DeltaCase::run(
              core, in.narrow(0, row, 1).narrow(1, skip[b], n),
              {before.conv.narrow(0, row, 1), before.state.narrow(0, row, 1)});
          const int64_t end = skip[b] + n;
          EXPECT_TRUE(alone.memory.state[0].equal(window.state[row][end - 1]));
          EXPECT_TRUE(
              alone.memory.conv[0].equal(window.conv[row].narrow(1, end, taps)))
              << b << ' ' << n;
        }
      }
      EXPECT_TRUE(window.state[0][1].isnan().all().item<bool>());
      EXPECT_TRUE(window.state[0][5].isnan().all().item<bool>());
    }
  }
}

// One token's, both states past the caches; and where no vector is aligned.
TEST_P(GatedDeltaTest, ALargeWindowMayStandAnywhere) {
  DeltaCase layer(kLarge);
  const GatedDeltaCore core = layer.core();
  const DeltaMemory before = layer.memory(1);
  const Tensor in = layer.tokens(1, 2);
  for (const int64_t count : {1, 2}) {
    const DeltaResult plain =
        DeltaCase::run(core, in.narrow(1, 0, count), before);
    for (const int64_t offset : {0, 1, 4}) {
      for (const int64_t between : {0, 3}) {
        const int64_t size = before.state.numel(), stride = size + between;
        const Tensor memory =
            at::full({offset + count * stride}, kNaN, before.state.options());
        std::vector<int64_t> strides = before.state.strides().vec();
        strides.insert(strides.begin() + 1, stride);
        std::vector<int64_t> sizes = before.state.sizes().vec();
        sizes.insert(sizes.begin() + 1, count);
        const StateWindow window{
            memory.as_strided(sizes, strides, offset),
            at::full({1, before.conv.size(1), before.conv.size(2) + count},
                     kNaN, before.conv.options())};
        EXPECT_TRUE(same_bits(DeltaCase::run(core, in.narrow(1, 0, count),
                                             before, {}, {}, false, &window),
                              plain));
        EXPECT_TRUE(window.state[0][count - 1].equal(plain.memory.state[0]));
        EXPECT_EQ(memory.isnan().sum().item<int64_t>(),
                  offset + count * between);
      }
    }
  }
}

TEST_P(GatedDeltaTest, ThreadsChangeNoBit) {
  DeltaCase layer(kEqual);
  const GatedDeltaCore core = layer.core();
  const Tensor in = layer.tokens(2, 40);
  const DeltaMemory before = layer.memory(2);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const DeltaResult one = DeltaCase::run(core, in, before);
  at::set_num_threads(2);
  const DeltaResult two = DeltaCase::run(core, in, before);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two));
}

// Row 1 of three: its tokens behind padding and before it, NaN in all that is
// dead, an idle row beside it.
TEST_P(GatedDeltaTest, DeadTokensAndNeighboursChangeNoBit) {
  constexpr int64_t kTokens = 37;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    DeltaCase layer(kTwo);
    const GatedDeltaCore core = layer.core();
    const Tensor in = layer.tokens(1, kTokens, dtype);
    const DeltaMemory before = layer.memory(3, dtype);
    const DeltaResult alone = DeltaCase::run(
        core, in, {before.conv.narrow(0, 1, 1), before.state.narrow(0, 1, 1)});
    for (const auto& [left, right] :
         {std::pair<int64_t, int64_t>{0, 1}, {1, 0}, {20, 64}}) {
      const int64_t all = left + kTokens + right;
      const Tensor dead =
          at::full({1, all, layer.inputs()}, kNaN, in.options());
      Tensor rows = at::cat({layer.tokens(1, all, dtype), dead, dead});
      rows[1].narrow(0, left, kTokens).copy_(in[0]);
      const DeltaResult among =
          DeltaCase::run(core, rows, before, {0, left, 0}, {all, kTokens, 0});
      const auto row = [&](const Tensor& t) { return t.narrow(0, 1, 1); };
      EXPECT_TRUE(same_bits({row(among.out).narrow(1, left, kTokens),
                             {row(among.memory.conv), row(among.memory.state)}},
                            alone));
      EXPECT_TRUE(row(among.out).narrow(1, 0, left).eq(0).all().item<bool>());
      EXPECT_TRUE(among.out[2].eq(0).all().item<bool>());
      // Nothing was written for the idle row.
      EXPECT_TRUE(among.memory.conv[2].isnan().all().item<bool>());
      EXPECT_TRUE(among.memory.state[2].isnan().all().item<bool>());
    }
  }
}

// Why dead tokens must not run: zeros are no padding, they let a state decay.
TEST_P(GatedDeltaTest, ALiveTokenOfZerosChangesTheState) {
  DeltaCase layer(kTwo);
  const DeltaMemory before = layer.memory(1);
  const Tensor zeros = at::zeros({1, 1, layer.inputs()});
  const DeltaResult after = DeltaCase::run(layer.core(), zeros, before);
  EXPECT_GT(relative_error(after.memory.state, before.state), 0.01);
}

// A layer whose convolutions pass the token, with gates as they are told.
class Gates {
 public:
  Gates(float alpha_decay, float b) : layer_(kTwo) {
    layer_.weights().conv.zero_();
    layer_.weights().conv.select(1, 3).fill_(1.0);
    layer_.weights().decay.fill_(alpha_decay);
    before = layer_.memory(1);
    in = layer_.tokens(1, 1);
    const int64_t heads = kTwo.value_heads;
    in.narrow(2, layer_.inputs() - 2 * heads, heads).fill_(b);
    after = DeltaCase::run(layer_.core(), in, before);
  }
  // What value head `head` holds for the key that was written, and the value.
  std::pair<Tensor, Tensor> read(int64_t head) const {
    const auto active = [&](int64_t first, int64_t size) {
      const Tensor x = in[0][0].narrow(0, first, size).to(at::kDouble);
      return x * x.sigmoid();
    };
    const int64_t Dk = kTwo.key_head_dim, Dv = kTwo.value_head_dim;
    const Tensor key = active(kTwo.key_size() + head / 2 * Dk, Dk);
    const Tensor state = after.memory.state[0][head].to(at::kDouble);
    return {(state * (key / key.norm()).unsqueeze(1)).sum(0),
            active(2 * kTwo.key_size() + head * Dv, Dv)};
  }
  Tensor in;
  DeltaMemory before;
  DeltaResult after;

 private:
  DeltaCase layer_;
};

constexpr float kOpen = 100.0F, kShut = -200.0F;  // sigmoid 1 and 0

// With nothing forgotten and full strength a key reads the value written last.
TEST_P(GatedDeltaTest, AWrittenKeyReadsItsValue) {
  const Gates gates(0.0F, kOpen);
  for (int64_t head = 0; head < kTwo.value_heads; ++head) {
    const auto [found, wanted] = gates.read(head);
    EXPECT_LT(relative_error(found, wanted), 1e-5);  // epsilon of the length
  }
}

TEST_P(GatedDeltaTest, WithoutStrengthOrDecayAStateStays) {
  const Gates gates(0.0F, kShut);
  EXPECT_TRUE(gates.after.memory.state.equal(gates.before.state));
}

// alpha 0: only what the token wrote is left, so its key reads all of it.
TEST_P(GatedDeltaTest, FullDecayForgetsAllBefore) {
  const Gates gates(-1e6F, kOpen);
  for (int64_t head = 0; head < kTwo.value_heads; ++head) {
    const auto [found, wanted] = gates.read(head);
    EXPECT_LT(relative_error(found, wanted), 1e-5);
    EXPECT_NEAR(gates.after.memory.state[0][head].norm().item<double>(),
                wanted.norm().item<double>(), 1e-4);
  }
}

// The limits of the gates, and tokens of zeros from a state of zeros.
TEST_P(GatedDeltaTest, ExtremeInputsStayFinite) {
  DeltaCase layer(kTwo);
  for (const double value : {0.0, 1e4, -1e4}) {
    const Tensor in = at::full({1, 3, layer.inputs()}, value, at::kFloat);
    const DeltaMemory zero = {at::zeros_like(layer.memory(1).conv),
                              at::zeros_like(layer.memory(1).state)};
    const DeltaResult found = DeltaCase::run(layer.core(), in, zero);
    EXPECT_TRUE(found.out.isfinite().all().item<bool>()) << value;
    EXPECT_TRUE(found.memory.state.isfinite().all().item<bool>()) << value;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, GatedDeltaTest,
                         ::testing::Values(CpuLevel::kPortable, CpuLevel::kAvx2,
                                           CpuLevel::kAvx512),
                         [](const auto& info) {
                           return std::string(kernels::name(info.param));
                         });

}  // namespace
}  // namespace kvcache::model
