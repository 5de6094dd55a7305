// GraphDecoder: prefill, steps and many steps a replay, over the toy models.
#include "kvcache/graph_decoder.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/toy_allocator.h"
#include "tests/support/toy_graph.h"

namespace kvcache::toy {
namespace {

using testing::HasSubstr;

constexpr int64_t kCapacity = 24;

class GraphDecoderTest : public testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<WindowCache> make(int64_t rows,
                                    at::ScalarType dtype = at::kFloat) const {
    auto cache = std::make_unique<WindowCache>(
        spec_of(model, rows, kCapacity, dtype),
        WindowOptions{.buckets = {4, 8, 16, kCapacity}});
    poison(*cache);
    return cache;
  }
  // What greedy decoding of each row alone gives, `steps` tokens.
  std::vector<Ids> greedy_alone(const std::vector<Ids>& prompts,
                                int64_t steps) const {
    std::vector<Ids> all;
    for (const Ids& prompt : prompts) {
      PreallocatedCache cache(spec_of(model, 1, kCapacity));
      Ids fed = prompt, made;
      for (int64_t i = 0; i < steps; ++i) {
        const Floats hidden = feed(cache, model, {fed})[0];
        const auto last = hidden.end() - kWidth;
        made.push_back(
            static_cast<int>(std::max_element(last, hidden.end()) - last));
        fed = {made.back()};
      }
      all.push_back(made);
    }
    return all;
  }

  const Model model = make_model(GetParam());
};
INSTANTIATE_TEST_SUITE_P(EveryModel, GraphDecoderTest,
                         testing::ValuesIn(kVariants),
                         [](const auto& info) { return name_of(info.param); });

// C4, C5, K16: prefill and steps across all buckets, twice.
TEST_P(GraphDecoderTest, EqualsThePlainCacheBitForBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto cache = make(2, dtype);
    GraphDecoder decoder(toy_graph_model(model, *cache), *cache);
    for (int round = 0; round < 2; ++round) {
      std::vector<Ids> held = {some_ids(3, round), some_ids(3, round + 2)};
      const Tensor all = decoder.prefill(ids_of(held));
      ASSERT_EQ(all.sizes(), at::IntArrayRef({2, 3, kWidth}));
      EXPECT_EQ(logits_at(all, 1, 1),
                last_of(*cache, model, {held[1][0], held[1][1]}, 1));
      const void* buffer = nullptr;
      while (cache->lengths()[0] < kCapacity) {
        const Ids next = {static_cast<int>(held[0].size()) % kVocabulary,
                          static_cast<int>(held[0].size() * 3) % kVocabulary};
        const Tensor logits = decoder.step(ids_of({{next[0]}, {next[1]}}));
        ASSERT_EQ(logits.sizes(), at::IntArrayRef({2, 1, kWidth}));
        EXPECT_TRUE(buffer == nullptr || buffer == logits.const_data_ptr());
        buffer = logits.const_data_ptr();  // static
        for (size_t row = 0; row < 2; ++row) {
          held[row].push_back(next[row]);
          ASSERT_EQ(logits_at(logits, static_cast<int64_t>(row)),
                    last_of(*cache, model, held[row], 1));
        }
      }
    }
    EXPECT_EQ(decoder.statistics().captures, 4);
    EXPECT_EQ(decoder.statistics().eager_runs, 0);
  }
}

// One graph for all lengths gives the bits of one for each bucket.
TEST_P(GraphDecoderTest, OneWindowEqualsBuckets) {
  WindowCache one(spec_of(model, 1, kCapacity), {.windows = Windows::kOne});
  const auto buckets = make(1);
  GraphDecoder of_one(toy_graph_model(model, one), one);
  GraphDecoder of_buckets(toy_graph_model(model, *buckets), *buckets);
  for (GraphDecoder* decoder : {&of_one, &of_buckets}) {
    decoder->prefill(ids_of({some_ids(3)}));
  }
  for (int i = 0; i < 20; ++i) {
    const Tensor token = ids_of({{i % kVocabulary}});
    EXPECT_EQ(logits_at(of_one.step(token), 0),
              logits_at(of_buckets.step(token), 0));
  }
  EXPECT_EQ(of_one.statistics().captures, 1);
  EXPECT_EQ(of_buckets.statistics().captures, 4);
}

// K15, K31: a row is the row alone, whatever pads and companions it has, also
// in chunks.
TEST_P(GraphDecoderTest, K15LeftPaddedRowsEqualTheRowsAlone) {
  for (const auto chunk :
       {std::optional<int64_t>(), std::optional<int64_t>(2)}) {
    const std::vector<Ids> prompts = {some_ids(2, 1), some_ids(7, 2),
                                      some_ids(4, 3)};
    const auto cache = make(3);
    GraphDecoder decoder(toy_graph_model(model, *cache), *cache);
    std::vector<Ids> padded(3, Ids(7, 5));
    std::vector<int64_t> skip;
    for (size_t row = 0; row < 3; ++row) {
      std::copy(prompts[row].rbegin(), prompts[row].rend(),
                padded[row].rbegin());
      skip.push_back(7 - static_cast<int64_t>(prompts[row].size()));
    }
    Tensor logits = decoder.prefill(
        ids_of(padded), {.skip = skip, .last_only = true, .chunk = chunk});
    std::vector<Ids> held = prompts;
    for (int i = 0; i < 8; ++i) {
      std::vector<Ids> next;
      for (size_t row = 0; row < 3; ++row) {
        ASSERT_EQ(logits_at(logits, static_cast<int64_t>(row)),
                  last_of(*cache, model, held[row], 1));
        next.push_back({i});
        held[row].push_back(i % kVocabulary);
      }
      logits = decoder.step(ids_of(std::vector<Ids>(3, Ids{i % kVocabulary})));
    }
  }
}

TEST_P(GraphDecoderTest, ManyTokensAReplayEqualOneByOne) {
  const std::vector<Ids> prompts = {some_ids(3, 1), some_ids(3, 5)};
  const std::vector<Ids> want = greedy_alone(prompts, 18);
  for (const bool recorded : {true, false}) {
    for (const int64_t steps : {1, 4, 8}) {
      const auto cache = make(2);
      GraphDecoder decoder(toy_graph_model(model, *cache), *cache,
                           {.backend = recorded ? eager_graphs() : nullptr,
                            .steps_per_replay = steps});
      const Tensor logits =
          decoder.prefill(ids_of(prompts), {.last_only = true});
      Tensor token = logits.argmax(-1);
      std::vector<Ids> made(2);
      for (int64_t row = 0; row < 2; ++row) {
        made[row].push_back(static_cast<int>(token[row].item<int64_t>()));
      }
      while (made[0].size() < 17) {
        const DecodedTokens got = decoder.decode(token, steps);
        ASSERT_EQ(got.ids.sizes(), at::IntArrayRef({steps, 2}));
        EXPECT_EQ(got.fed, std::vector<int64_t>(2, steps));
        for (int64_t i = 0; i < steps; ++i) {
          for (int64_t row = 0; row < 2; ++row) {
            made[row].push_back(
                static_cast<int>(got.ids[i][row].item<int64_t>()));
          }
        }
        EXPECT_EQ(
            logits_at(decoder.logits(), steps - 1, 1),
            last_of(*cache, model,
                    joined(prompts[1], {made[1].begin(), made[1].end() - 1}),
                    1));
        token = got.ids.narrow(0, steps - 1, 1).t();
      }
      for (int64_t row = 0; row < 2; ++row) {
        made[row].resize(17);
        EXPECT_EQ(made[row], Ids(want[row].begin(), want[row].begin() + 17));
      }
      EXPECT_EQ(cache->lengths()[0], cache->lengths()[1]);
    }
  }
}

// A row that meets an end token takes no more; the others go on.
TEST_P(GraphDecoderTest, RowsEndAtEndTokens) {
  const std::vector<Ids> prompts = {some_ids(3, 1), some_ids(3, 5),
                                    some_ids(3, 6)};
  const std::vector<Ids> want = greedy_alone(prompts, 9);
  for (const bool recorded : {true, false}) {
    for (int end = 0; end < kWidth; ++end) {
      const auto cache = make(3);
      GraphDecoder decoder(toy_graph_model(model, *cache), *cache,
                           {.backend = recorded ? eager_graphs() : nullptr,
                            .steps_per_replay = 8,
                            .end_tokens = {end, 77}});
      decoder.prefill(ids_of(prompts), {.last_only = true});
      const DecodedTokens got =
          decoder.decode(ids_of({{want[0][0]}, {want[1][0]}, {want[2][0]}}), 8);
      for (int64_t row = 0; row < 3; ++row) {
        const auto met = std::find(want[row].begin() + 1, want[row].end(), end);
        const int64_t fed = std::min<int64_t>(8, met - want[row].begin());
        EXPECT_EQ(got.fed[row], fed);
        EXPECT_EQ(cache->lengths()[row], 3 + fed);
        for (int64_t i = 0; i < 8; ++i) {
          EXPECT_EQ(got.ids[i][row].item<int64_t>(),
                    want[row][std::min(i, fed - 1) + 1]);
        }
      }
    }
  }
}

TEST_P(GraphDecoderTest, CaptureAheadRefusesOtherWindowsAndSkipsOwnOnes) {
  const auto cache = make(1);
  GraphDecoder decoder(toy_graph_model(model, *cache), *cache);
  const int64_t two[] = {8, 4};
  decoder.capture(two);
  EXPECT_EQ(decoder.statistics().captures, 2);
  decoder.capture();
  EXPECT_EQ(decoder.statistics().captures, 4);
  EXPECT_EQ(decoder.capture(), 0);
  const int64_t other[] = {4, 5};
  EXPECT_THAT(error_of([&] { decoder.capture(other); }),
              HasSubstr("must be one of the cache's 4 buckets but got 5"));
  EXPECT_EQ(decoder.step(ids_of({{1}})).sizes(),
            at::IntArrayRef({1, 1, kWidth}));  // on an empty cache
  EXPECT_EQ(cache->lengths()[0], 1);
}

// C2, C4: before anything changes.
TEST(GraphDecoder, C2RefusesBeforeAnythingChanges) {
  const Model model = make_model(Variant::kHybrid);
  WindowCache cache(spec_of(model, 2, kCapacity));
  GraphDecoder decoder(toy_graph_model(model, cache), cache,
                       {.steps_per_replay = 4});
  const std::vector<Ids> prompts = {some_ids(kCapacity - 2),
                                    some_ids(kCapacity - 2, 1)};
  decoder.prefill(ids_of(prompts));
  const std::string before = picture(cache);
  const auto refuses = [&](const auto& call, const char* text) {
    EXPECT_THAT(error_of(call), HasSubstr(text));
    EXPECT_EQ(picture(cache), before);
  };
  refuses([&] { decoder.step(ids_of({{1}})); },
          "[GraphDecoder::step] tokens must be [2, 1] int64, one for each row, "
          "but got [1, 1] int64");
  refuses([&] { decoder.step(ids_of({{1, 2}, {3, 4}})); }, "got [2, 2] int64");
  refuses([&] { decoder.step(at::zeros({2, 1})); }, "got [2, 1] float32");
  refuses([&] { decoder.step(Tensor()); }, "got an undefined tensor");
  refuses(
      [&] {
        decoder.decode(ids_of({{1}, {2}}), 3);
      },
      "row 0 is full: position 25 > max_len 24");
  refuses(
      [&] {
        decoder.decode(ids_of({{1}, {2}}), 5);
      },
      "steps must be in [1, 4] but got 5");
  refuses([&] { decoder.prefill(ids_of({{1}})); },
          "batch must be 2, the decoder's, but got 1");
  refuses(
      [&] {
        decoder.prefill(ids_of({Ids(25, 1), Ids(25, 1)}));
      },
      "at most 24 tokens, max_len, fit a row but got 25");
  const std::vector<int64_t> skip = {0, 3};
  refuses(
      [&] {
        decoder.prefill(ids_of({{1}, {2}}), {.skip = skip});
      },
      "fewer than 1");
  refuses(
      [&] {
        decoder.prefill(ids_of({{1}, {2}}), {.chunk = 0});
      },
      "chunk must be >= 1 but got 0");
  decoder.step(ids_of({{1}, {2}}));
  decoder.step(ids_of({{1}, {2}}));
  const std::string full = picture(cache);
  EXPECT_THAT(error_of([&] {
                decoder.step(ids_of({{1}, {2}}));
              }),
              HasSubstr("row 0 is full: position 25 > max_len 24"));
  EXPECT_EQ(picture(cache), full);
  decoder.prefill(ids_of({{1}, {2}}));  // and it goes on
  decoder.step(ids_of({{1}, {2}}));
}

TEST(GraphDecoder, RefusesModelsThatDoNotFit) {
  const Model model = make_model(Variant::kAttention);
  WindowCache cache(spec_of(model, 1, kCapacity));
  EXPECT_THAT(
      error_of([&] { GraphDecoder(toy_graph_model(model, cache, 23), cache); }),
      HasSubstr("the capacity must be <= 23, the model's context, but "
                "is 24"));
  GraphModel elsewhere = toy_graph_model(model, cache);
  elsewhere.device = at::Device("cuda:0");
  EXPECT_THAT(error_of([&] { GraphDecoder(elsewhere, cache); }),
              HasSubstr("must be on the cache's device cpu but is on cuda:0"));
  EXPECT_THAT(error_of([&] { GraphDecoder(GraphModel{}, cache); }),
              HasSubstr("must have a forward"));
  EXPECT_THAT(error_of([&] {
                GraphDecoder(toy_graph_model(model, cache), cache,
                             {.steps_per_replay = 0});
              }),
              HasSubstr("steps_per_replay must be >= 1"));
}

// K24: nothing outlives its handles, and repeats do not grow.
TEST(GraphDecoder, K24MemoryGoesWithTheDecoder) {
  TestAllocator& memory = TestAllocator::install();
  const Model model = make_model(Variant::kMixed);
  const auto run = [&] {
    WindowCache cache(spec_of(model, 1, 4096));
    GraphDecoder decoder(toy_graph_model(model, cache), cache,
                         {.steps_per_replay = 4});
    decoder.prefill(ids_of({some_ids(5)}));
    decoder.step(ids_of({{1}}));
    decoder.decode(ids_of({{1}}), 4);
  };
  run();
  const int64_t before = memory.live_bytes;
  run();
  run();
  EXPECT_EQ(memory.live_bytes, before);
}

}  // namespace
}  // namespace kvcache::toy
