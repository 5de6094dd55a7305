// hybrid_test.cpp - a model of linear and full attention over every kind of
// cache: the bits of the stateless forward however its tokens are cut.
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <numeric>

#include "kvcache/graph_decoder.h"
#include "tests/model/forward/reference_data.h"
#include "tests/support/random_model.h"
#include "tests/support/toy_kinds.h"

namespace kvcache::testing {
namespace {

Ids some_ids(int64_t count) {
  Ids ids(static_cast<size_t>(count));
  int64_t next = 5;
  for (int64_t& id : ids) id = next = (next * 29 + 11) % 64;
  return ids;
}

// What a row remembers: conv inputs and states of all linear layers.
void expect_same_states(const Cache& a, const Cache& b, int64_t row_b = 0) {
  const auto of = [](const Cache& cache, int64_t row) {
    return cache.checkpoint(row).points.back();
  };
  const auto found = of(a, 0), wanted = of(b, row_b);
  EXPECT_EQ(found->position, wanted->position);
  EXPECT_TRUE(at::equal(found->conv, wanted->conv));
  EXPECT_TRUE(at::equal(found->state, wanted->state));
}

class HybridTest : public ::testing::TestWithParam<toy::Kind> {
 protected:
  std::unique_ptr<Cache> make(const Transformer& of, int64_t rows,
                              int64_t capacity) const {
    return GetParam().make(of.cache_spec(rows, capacity));
  }
  // Logits [T, V] of one row, fed in `parts`.
  Tensor feed(const Transformer& of, Cache& cache, const Ids& ids,
              const std::vector<int64_t>& parts) const {
    const Tensor all = as_row(ids);
    std::vector<Tensor> found;
    int64_t first = 0;
    for (const int64_t count : parts) {
      found.push_back(step(of, cache, all.narrow(1, first, count))[0]);
      first += count;
    }
    return at::cat(found);
  }
  std::shared_ptr<const Transformer> model = random_model(hybrid_config());
};

TEST_P(HybridTest, ChunksOfAnySizeGiveTheStatelessBits) {
  const Ids ids = some_ids(40);
  for (const Running& running : kRunnings) {
    SCOPED_TRACE(running.name);
    const auto of = random_model(hybrid_config(), running.dtype,
                                 model::ForwardKind::kAuto, running.packing);
    EXPECT_TRUE(of->row_exact(Role::kDecode));
    const Tensor alone = all_logits(*of, ids, Kind::kNone, 0);
    const Ids chunks =
        running.dtype == at::kFloat ? Ids{1, 2, 3, 7, 33, 40} : Ids{1, 7};
    for (const int64_t chunk : chunks) {
      const auto cache = make(*of, 1, 40);
      std::vector<int64_t> parts;
      for (int64_t at = 0; at < 40; at += chunk) {
        parts.push_back(std::min<int64_t>(chunk, 40 - at));
      }
      EXPECT_TRUE(at::equal(feed(*of, *cache, ids, parts), alone)) << chunk;
    }
  }
}

// K38: a prefill that does not begin at token 0 continues the states.
TEST_P(HybridTest, K38EverySplitOfAPromptLeavesTheSameStates) {
  const Ids ids = some_ids(20);
  const auto whole = make(*model, 1, 24);
  const Tensor wanted = feed(*model, *whole, ids, {20});
  const std::vector<std::vector<int64_t>> splits = {
      {10, 10}, {1, 19}, {19, 1}, {7, 7, 6}, std::vector<int64_t>(20, 1)};
  for (const auto& parts : splits) {
    const auto cache = make(*model, 1, 24);
    EXPECT_TRUE(at::equal(feed(*model, *cache, ids, parts), wanted));
    expect_same_states(*cache, *whole);
  }
}

// K49: drafts that were not accepted leave nothing in any layer.
TEST_P(HybridTest, K49RejectedDraftsLeaveNothing) {
  const Ids ids = some_ids(6), drafts = {9, 8, 7, 6};
  for (int64_t accepted = 0; accepted <= 4; ++accepted) {
    const auto cache = make(*model, 1, 24), plain = make(*model, 1, 24);
    feed(*model, *cache, ids, {6});
    cache->mark();
    feed(*model, *cache, drafts, {4});
    const Truncation back = cache->truncate(6 + accepted);
    const int64_t replay = back.replay[0];
    EXPECT_EQ(replay, accepted < 4 ? accepted : 0);
    if (replay > 0) {
      feed(*model, *cache, {drafts.begin(), drafts.begin() + replay}, {replay});
    }
    feed(*model, *plain, ids, {6});
    for (int64_t i = 0; i < accepted; ++i) {
      feed(*model, *plain, {drafts[static_cast<size_t>(i)]}, {1});
    }
    EXPECT_EQ(cache->lengths()[0], 6 + accepted);
    expect_same_states(*cache, *plain);
    EXPECT_TRUE(at::equal(feed(*model, *cache, {1, 2}, {1, 1}),
                          feed(*model, *plain, {1, 2}, {1, 1})));
  }
}

// `tokens` in row 1 of two behind padding, row 0 idle, with a window of states;
// what came behind the first `kept` is dropped again.
void keep_some(const Transformer& of, Cache& cache, const Ids& tokens,
               int64_t kept) {
  const auto count = static_cast<int64_t>(tokens.size());
  Tensor ids = at::full({2, count + 2}, -1, at::kLong);
  ids[1].narrow(0, 2, count).copy_(as_row(tokens)[0]);
  const int64_t before = cache.lengths()[1];
  const Ids skip = {0, 2}, live = {0, count};
  Step step = cache.begin_step(
      {.tokens = count + 2, .skip = skip, .count = live, .state_window = true});
  of.forward(ids, step, {.all_logits = true});
  step.commit();
  const Truncation cut =
      cache.truncate(std::vector<int64_t>{before, before + kept});
  EXPECT_EQ(cut.replay, (std::vector<int64_t>{0, 0}));
}

// K49 by a window: the n-th states of a step of drafts, dense weights and
// packed ones, are those of a run that never saw the rest.
TEST_P(HybridTest, K49AWindowHoldsTheStatesOfEveryDraft) {
  const Ids ids = some_ids(6), drafts = {9, 8, 7, 6, 5};
  for (const Running& running : kRunnings) {
    SCOPED_TRACE(running.name);
    const auto of = random_model(hybrid_config(), running.dtype,
                                 model::ForwardKind::kAuto, running.packing);
    for (int64_t count = 1; count <= 5; ++count) {
      for (int64_t kept = 1; kept <= count; ++kept) {
        const auto cache = make(*of, 2, 24), plain = make(*of, 1, 24);
        step(*of, *cache, at::cat({as_row(ids), as_row(ids)}));
        feed(*of, *plain, ids, {6});
        const Ids all(drafts.begin(), drafts.begin() + count);
        keep_some(*of, *cache, all, kept);
        const Ids right(drafts.begin(), drafts.begin() + kept);
        feed(*of, *plain, right, {kept});
        EXPECT_EQ(cache->lengths()[1], 6 + kept);
        expect_same_states(*plain, *cache, 1);
        const Tensor next =
            step(*of, *cache, at::tensor({3, 4}, at::kLong).view({2, 1}));
        EXPECT_TRUE(at::equal(next[1], feed(*of, *plain, {4}, {1})));
      }
    }
  }
}

// By operators sums depend on the shapes, so: the same bits whatever the rest
// was, and close to a run without it.
TEST_P(HybridTest, K49AWindowByOperators) {
  constexpr double kClose = 1e-5;  // float32, sums of 32 terms
  const auto of =
      random_model(hybrid_config(), at::kFloat, model::ForwardKind::kOps);
  const Ids ids = some_ids(6);
  for (int64_t kept = 1; kept <= 4; ++kept) {
    const auto one = make(*of, 2, 24), other = make(*of, 2, 24);
    const auto plain = make(*of, 2, 24);
    Ids drafts = {9, 8, 7, 6};
    for (Cache* cache : {one.get(), other.get(), plain.get()}) {
      step(*of, *cache, at::cat({as_row(ids), as_row(ids)}));
    }
    keep_some(*of, *one, drafts, kept);
    std::fill(drafts.begin() + kept, drafts.end(), 33);
    keep_some(*of, *other, drafts, kept);
    drafts.resize(static_cast<size_t>(kept));
    keep_some(*of, *plain, drafts, kept);
    const auto found = one->checkpoint(1).points.back(),
               same = other->checkpoint(1).points.back(),
               wanted = plain->checkpoint(1).points.back();
    EXPECT_TRUE(at::equal(found->state, same->state));
    EXPECT_TRUE(at::equal(found->conv, same->conv));
    EXPECT_TRUE(at::allclose(found->state, wanted->state, kClose, kClose));
    EXPECT_TRUE(at::allclose(found->conv, wanted->conv, kClose, kClose));
  }
}

// Taken up at any token by any kind, twice: what was run from it left the
// checkpoint as it was, also where fewer tokens came than a convolution keeps.
TEST_P(HybridTest, ACheckpointAtAnyTokenContinuesTheColdRun) {
  const Ids ids = some_ids(12);
  const Tensor cold = all_logits(*model, ids, Kind::kNone, 0);
  for (const int64_t kept : {1, 2, 3, 4, 6, 11}) {
    const auto source = make_cache(Kind::kConcat, *model, 1, 24);
    step(*model, *source, as_row({ids.data(), static_cast<size_t>(kept)}));
    const Checkpoint checkpoint = source->checkpoint(0);
    const RestorePoint before{kept, checkpoint.points.back()->conv.clone(),
                              checkpoint.points.back()->state.clone()};
    for (const int64_t first : {int64_t{1}, 12 - kept}) {
      const auto cache = make(*model, 1, 24);
      cache->restore(checkpoint, 0);
      const Ids rest(ids.begin() + kept, ids.end());
      const Tensor warm =
          feed(*model, *cache, rest,
               std::vector<int64_t>(static_cast<size_t>((12 - kept) / first),
                                    first));
      EXPECT_TRUE(at::equal(warm, cold.narrow(0, kept, 12 - kept))) << kept;
      EXPECT_TRUE(at::equal(checkpoint.points.back()->conv, before.conv));
      EXPECT_TRUE(at::equal(checkpoint.points.back()->state, before.state));
    }
  }
}

// Three layers: a float32 state, and inputs of the convolution as they run.
TEST_P(HybridTest, MemoryIsTheStatesAndConvolutionInputs) {
  for (const Running& running : kRunnings) {
    SCOPED_TRACE(running.name);
    const auto of = random_model(hybrid_config(), running.dtype,
                                 model::ForwardKind::kAuto, running.packing);
    const auto cache = make(*of, 1, 24);
    feed(*of, *cache, some_ids(2), {2});
    const MemoryReport report = cache->memory();
    EXPECT_EQ(report.recurrent.used, size_t{3} * 4 * 8 * 8 * sizeof(float));
    const at::ScalarType conv = of->packing() == model::WeightPacking::kNone
                                    ? running.dtype
                                    : at::kFloat;
    EXPECT_EQ(report.conv.used, size_t{3} * 64 * 3 * c10::elementSize(conv));
  }
}

// Row 1 is ours, behind dead tokens whose ids are none, among a row that sits
// out and one of other tokens; then it decodes while others idle.
TEST_P(HybridTest, NeighboursPaddingAndIdleRowsChangeNothing) {
  constexpr int64_t kLeft = 3, kTokens = 11, kRight = 2;
  constexpr int64_t kAll = kLeft + kTokens + kRight;
  const Ids ids = some_ids(kTokens + 2);
  const auto alone = make(*model, 1, 24), among = make(*model, 3, 24);
  const Tensor wanted = feed(*model, *alone, ids, {kTokens, 1, 1});
  Tensor rows = at::full({3, kAll}, int64_t{1} << 40, at::kLong);
  rows[2].copy_(as_row(some_ids(kAll))[0]);
  const Tensor ours = as_row(ids)[0];
  rows[1].narrow(0, kLeft, kTokens).copy_(ours.narrow(0, 0, kTokens));
  const Tensor found =
      step(*model, *among, rows, true, Ids{0, kLeft, 0}, Ids{0, kTokens, kAll});
  EXPECT_TRUE(at::equal(found[1].narrow(0, kLeft, kTokens),
                        wanted.narrow(0, 0, kTokens)));
  EXPECT_TRUE(found[0].eq(0).all().item<bool>());
  for (int64_t i = kTokens; i < kTokens + 2; ++i) {
    Tensor next = at::full({3, 1}, -1, at::kLong);
    next[1].copy_(ours.narrow(0, i, 1));
    const Tensor decoded = step(*model, *among, next, true, {}, Ids{0, 1, 0});
    EXPECT_TRUE(at::equal(decoded[1][0], wanted[i]));
  }
  expect_same_states(*alone, *among, 1);
}

INSTANTIATE_TEST_SUITE_P(Kinds, HybridTest,
                         ::testing::ValuesIn(toy::plain_kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(Hybrid, ACacheIsMadeForItsLayers) {
  const auto model = random_model(hybrid_config(), at::kBFloat16);
  const CacheSpec spec = model->cache_spec(2, 50);
  const RecurrentLayer linear{64, 3, {4, 8, 8}};
  const std::vector<LayerSpec> wanted = {linear, linear, linear,
                                         AttentionLayer{1, 16}};
  EXPECT_EQ(spec.layers, wanted);
  EXPECT_EQ(spec.conv_dtype.value_or(spec.dtype), at::kBFloat16);
  EXPECT_NO_THROW(model->check_cache(spec));
}

// K39: a full pass against all but the last token and one step, around the
// tiles and chunks of other implementations; here to the bit.
TEST(Hybrid, K39PrefillAndAStepIsAFullPassAtEveryLength) {
  model::ModelConfig config = hybrid_config();
  config.linear_attention->value_head_dim = 16;
  const auto model = random_model(config);
  const Ids ids = some_ids(70);
  const Tensor all = all_logits(*model, ids, Kind::kNone, 0);
  const auto cache = make_cache(Kind::kPreallocated, *model, 1, 70);
  for (int64_t tokens = 2; tokens <= 70; ++tokens) {
    cache->reset();
    step(*model, *cache, as_row(ids).narrow(1, 0, tokens - 1), false);
    const Tensor last =
        step(*model, *cache, as_row(ids).narrow(1, tokens - 1, 1));
    EXPECT_TRUE(at::equal(last[0][0], all[tokens - 1])) << tokens;
  }
}

// A recorded step of one token continues the states in place, in either
// forward, across windows and for two texts.
TEST(Hybrid, RecordedStepsGiveTheBitsOfPlainOnes) {
  for (const auto kind :
       {model::ForwardKind::kPackedCpu, model::ForwardKind::kOps}) {
    const auto model = random_model(hybrid_config(), at::kFloat, kind);
    const GraphModel graph{
        .forward =
            [&](const Tensor& ids, Step& step, const GraphModel::Call& call) {
              return model->forward(
                  ids, step,
                  {.role = call.role, .all_logits = call.all_logits});
            },
        .context = model->context_length(),
        .vocab_size = model->vocab_size()};
    WindowCache recorded(model->cache_spec(2, 24), {.buckets = {4, 8, 24}});
    WindowCache plain(model->cache_spec(2, 24), {.buckets = {4, 8, 24}});
    GraphDecoder replays(graph, recorded);
    for (const int64_t prompt : {3, 5}) {
      const Tensor ids =
          at::cat({as_row(some_ids(prompt)), as_row(some_ids(prompt))});
      const Ids skip = {0, 2};
      replays.prefill(ids, {.skip = skip});
      plain.reset();
      step(*model, plain, ids, true, skip);
      for (int64_t i = 0; i < 10; ++i) {
        const Tensor next = at::full({2, 1}, 7 + i, at::kLong);
        const Tensor wanted = step(*model, plain, next);
        EXPECT_TRUE(at::equal(replays.step(next), wanted)) << i;
      }
      expect_same_states(recorded, plain);
    }
    EXPECT_GT(replays.statistics().replays, 0);
  }
}

// Partial rotary, gates, and a bias in q, k and v: the two forwards agree.
TEST(Hybrid, OperatorsAgreeWithThePackedForward) {
  model::ModelConfig config = hybrid_config();
  config.qkv_bias = true;
  config.linear_attention->value_heads = 6;
  const auto packed = random_model(config);
  const auto ops = random_model(config, at::kFloat, model::ForwardKind::kOps);
  const Tensor ids = at::cat({as_row(some_ids(9)), as_row(some_ids(9))});
  const auto of = [&](const Transformer& model) {
    const auto cache = make_cache(Kind::kPreallocated, model, 2, 12);
    step(model, *cache, ids, true, Ids{2, 0}, Ids{4, 9});
    const Tensor next = step(model, *cache, ids.narrow(1, 0, 1));
    return std::pair{next, cache->checkpoint(0).points.back()->state};
  };
  const auto [found, state] = of(*ops);
  const auto [wanted, wanted_state] = of(*packed);
  constexpr double kTolerance = 1e-5;  // float32 sums in another order
  EXPECT_LT(found.sub(wanted).abs().max().item<double>(), kTolerance);
  EXPECT_LT(state.sub(wanted_state).abs().max().item<double>(), kTolerance);
}

}  // namespace
}  // namespace kvcache::testing
