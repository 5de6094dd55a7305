// batcher_test.cpp - requests through the rows of one cache, each as if alone.

#include "kvcache/model/batcher.h"

#include "kvcache/preallocated_cache.h"
#include "tests/model/generate/batch_fixture.h"

namespace kvcache::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int64_t kContext = 64;

class BatcherTest : public testing::TestWithParam<CacheKind> {
 protected:
  std::shared_ptr<FakeModel> model =
      FakeModel::hashed(64, kContext, {int64_t{57}});

  std::unique_ptr<Cache> slots(int64_t rows,
                               std::optional<int64_t> capacity = {}) const {
    return make_cache(GetParam(), *model,
                      {.rows = rows, .capacity = capacity, .slots = true});
  }
  GenerateResult alone(const BatchRequest& request) const {
    return model::alone(*model, GetParam(), request);
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, BatcherTest, testing::ValuesIn(kBatchKinds),
                         name_of_kind);

TEST_P(BatcherTest, TwoHundredRequestsAreAsIfAlone) {
  RandomRequests random(7);
  std::vector<BatchRequest> requests;
  for (int i = 0; i < 200; ++i) requests.push_back(random.next());
  Batcher batcher(model, slots(4), batching(GetParam()));
  for (const BatchRequest& request : requests) batcher.submit(request);
  EXPECT_EQ(batcher.stats().queued, 200);
  batcher.run();
  const auto results = by_id(batcher.take_finished());
  ASSERT_THAT(results, SizeIs(200));
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    const BatchResult& got = results.at(i + 1);
    ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
    expect_same(got.result, alone(requests[i]));
    EXPECT_EQ(got.result.seed, requests[i].options.sampling.seed);
  }
  const BatchStats stats = batcher.stats();
  EXPECT_EQ(stats.finished, 200);
  EXPECT_EQ(stats.queued + stats.occupied_rows + stats.failed, 0);
  EXPECT_EQ(stats.most_occupied, 4);
  EXPECT_GT(stats.mean_occupied(), 1);
  EXPECT_THAT(batcher.cache().validate(), IsEmpty());
}

// Submissions, cancellations and refusals between steps, in a random order.
TEST_P(BatcherTest, WhateverComesBetweenChangesNothing) {
  RandomRequests random(11);
  Batcher batcher(model, slots(4), batching(GetParam()));
  std::map<uint64_t, BatchRequest> submitted;
  std::map<uint64_t, bool> cancelled;  // whether cancel() said so
  for (int i = 0; i < 200; ++i) {
    const bool good = random.chance(85);
    BatchRequest request = good ? random.next() : random.bad();
    const uint64_t id = batcher.submit(request);
    submitted.emplace(id, std::move(request));
    if (random.chance(20)) {
      const auto victim =
          static_cast<uint64_t>(random.number(1, static_cast<int64_t>(id)));
      cancelled[victim] = batcher.cancel(victim) || cancelled[victim];
    }
    for (int64_t steps = random.number(0, 6); steps > 0; --steps) {
      batcher.step();
    }
  }
  batcher.run();
  const auto results = by_id(batcher.take_finished());
  ASSERT_EQ(results.size(), submitted.size());
  int64_t refused = 0, cut = 0;
  for (const auto& [id, request] : submitted) {
    SCOPED_TRACE(id);
    const BatchResult& got = results.at(id);
    if (got.status == BatchStatus::kRefused) {
      ++refused;
      EXPECT_NE(error_of([&] { alone(request); }), "nothing was thrown");
      continue;
    }
    ASSERT_EQ(got.status, BatchStatus::kFinished);
    const auto wanted = alone(request);
    if (got.result.finish_reason == FinishReason::kCancelled) {
      ++cut;
      EXPECT_TRUE(cancelled[id]);
      expect_start_of(got.result, wanted);
    } else {
      expect_same(got.result, wanted);
    }
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(cut, 10);
  EXPECT_EQ(batcher.stats().refused, refused);
  EXPECT_EQ(batcher.stats().cancelled, cut);
}

TEST_P(BatcherTest, RowsAreGivenOutInTheOrderOfSubmission) {
  Batcher batcher(model, slots(1), batching(GetParam()));
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 5; ++i) {
    batcher.submit({.tokens = counting(5 - i),
                    .options = {.max_new_tokens = 2},
                    .hooks = {.on_prefill = [&order, i](int64_t, int64_t) {
                      order.push_back(i);
                    }}});
  }
  batcher.run();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4));
  std::vector<uint64_t> ids;
  for (const BatchResult& result : batcher.take_finished()) {
    ids.push_back(result.id);
  }
  EXPECT_THAT(ids, ElementsAre(1, 2, 3, 4, 5));
}

// p: a chunk of the long prompt, d: a token of the running request.
TEST_P(BatcherTest, NeitherPromptsNorTextsAreStarved) {
  Batcher batcher(model, slots(2), batching(GetParam()));
  std::string order;
  batcher.submit(
      {.tokens = counting(2),
       .options = {.max_new_tokens = 20, .ignore_eos = true},
       .hooks = {.on_token = [&](const GeneratedToken&) { order += 'd'; }}});
  batcher.step();
  EXPECT_EQ(order, "d");  // the prefill gives the first token
  batcher.submit(
      {.tokens = counting(30),
       .options = {.max_new_tokens = 1, .chunk = 5},
       .hooks = {.on_prefill = [&](int64_t, int64_t) { order += 'p'; }}});
  batcher.run();
  EXPECT_EQ(order, "ddpdpdpdpdpdp" + std::string(20 - 7, 'd'));
}

// A stream of short requests beside a long text.
TEST_P(BatcherTest, AStreamOfPromptsLeavesRunningRowsTheirTurn) {
  Batcher batcher(model, slots(2), batching(GetParam()));
  std::string order;
  batcher.submit(
      {.tokens = counting(2),
       .options = {.max_new_tokens = 12, .ignore_eos = true},
       .hooks = {.on_token = [&](const GeneratedToken&) { order += 'd'; }}});
  for (int i = 0; i < 8; ++i) {
    batcher.submit(
        {.tokens = counting(3),
         .options = {.max_new_tokens = 1},
         .hooks = {.on_prefill = [&](int64_t, int64_t) { order += 'p'; }}});
  }
  batcher.run();
  EXPECT_EQ(order, "ddpdpdpdpdpdpdpdpddd");
}

TEST_P(BatcherTest, StreamsTextAndTokensAsGenerateDoes) {
  RandomRequests random(3);
  Batcher batcher(model, slots(3), batching(GetParam()));
  std::vector<BatchRequest> requests;
  std::vector<std::string> texts(20), pieces(20);
  std::vector<std::vector<int64_t>> tokens(20);
  for (size_t i = 0; i < texts.size(); ++i) {
    BatchRequest request = random.next();
    requests.push_back(request);
    request.hooks.on_text = [&, i](std::string_view text) { texts[i] += text; };
    request.hooks.on_token = [&, i](const GeneratedToken& token) {
      tokens[i].push_back(token.id);
      pieces[i] += token.text;
    };
    batcher.submit(std::move(request));
  }
  batcher.run();
  for (const auto& [id, got] : by_id(batcher.take_finished())) {
    SCOPED_TRACE(id);
    EXPECT_EQ(texts[id - 1], got.result.text);
    EXPECT_THAT(got.result.text, testing::StartsWith(pieces[id - 1]));
    EXPECT_EQ(tokens[id - 1], got.result.tokens);
    EXPECT_EQ(got.result.text, alone(requests[id - 1]).text);
  }
}

// Cancelled while it waits, in its prompt, in its text, by id or by its token.
TEST_P(BatcherTest, CancelsAtEveryStage) {
  Batcher batcher(model, slots(2), batching(GetParam()));
  std::stop_source source;
  const GenerateOptions options = {
      .max_new_tokens = 30, .ignore_eos = true, .chunk = 4};
  const uint64_t text = batcher.submit({counting(3), options, {}});
  const uint64_t prompt = batcher.submit({counting(20), options, {}});
  const uint64_t waits = batcher.submit({counting(5), options, {}});
  const uint64_t token =
      batcher.submit({counting(6), options, {.stop = source.get_token()}});
  const uint64_t stays = batcher.submit({counting(7), options, {}});
  for (int i = 0; i < 5; ++i) batcher.step();
  EXPECT_TRUE(batcher.cancel(text));
  EXPECT_TRUE(batcher.cancel(prompt));
  EXPECT_TRUE(batcher.cancel(waits));
  EXPECT_TRUE(batcher.cancel(waits));
  EXPECT_FALSE(batcher.cancel(99));
  EXPECT_FALSE(batcher.cancel(0));
  source.request_stop();
  batcher.run();
  EXPECT_FALSE(batcher.cancel(text));
  const auto results = by_id(batcher.take_finished());
  for (const uint64_t id : {text, prompt, waits, token}) {
    EXPECT_EQ(results.at(id).status, BatchStatus::kFinished);
    EXPECT_EQ(results.at(id).result.finish_reason, FinishReason::kCancelled);
  }
  EXPECT_THAT(results.at(text).result.tokens, SizeIs(3));
  EXPECT_EQ(results.at(prompt).result.cache_length, 8);
  EXPECT_THAT(results.at(prompt).result.tokens, IsEmpty());
  EXPECT_THAT(results.at(waits).result.tokens, IsEmpty());
  expect_same(results.at(stays).result, alone({counting(7), options, {}}));
  EXPECT_EQ(batcher.stats().cancelled, 4);
}

// K103, each with the reason as a type.
TEST_P(BatcherTest, RefusesWithTheReasonAndTheNumbers) {
  Batcher batcher(model, slots(2, 32), batching(GetParam()));
  const auto refused = [&](const BatchRequest& request, RefusalReason reason,
                           const std::string& text) {
    const auto refusal = batcher.refusal(request);
    ASSERT_TRUE(refusal) << text;
    const uint64_t id = batcher.submit(request);
    const auto results = batcher.take_finished();  // at once
    ASSERT_THAT(results, SizeIs(1)) << text;
    EXPECT_EQ(results[0].id, id);
    EXPECT_EQ(results[0].status, BatchStatus::kRefused);
    EXPECT_EQ(results[0].refusal, reason) << text;
    EXPECT_EQ(refusal->reason, reason);
    EXPECT_EQ(results[0].error, refusal->text);
    EXPECT_THAT(results[0].error, HasSubstr(text));
  };
  const bool bounded = GetParam() != CacheKind::kConcat;
  refused({counting(65), {}, {}}, RefusalReason::kTooLong,
          bounded ? "prompt of 65 tokens is longer than the cache's capacity "
                    "of 32 tokens"
                  : "prompt of 65 tokens is longer than the context of 64");
  refused({counting(30), {.max_new_tokens = 60}, {}}, RefusalReason::kTooLong,
          bounded ? "prompt of 30 tokens and 60 new ones exceed the cache's "
                    "capacity of 32 tokens; ask for at most 3 new ones."
                  : "ask for at most 34 new ones.");
  refused({{}, {}, {}}, RefusalReason::kBadPrompt,
          "the prompt must not be empty");
  refused({{1, 64}, {}, {}}, RefusalReason::kBadPrompt,
          "token ids must be in [0, 64) but id 1 is 64");
  refused({{1, -1}, {}, {}}, RefusalReason::kBadPrompt, "id 1 is -1");
  refused({counting(2), {.max_new_tokens = 0}, {}}, RefusalReason::kBadOptions,
          "max_new_tokens must be at least 1 but got 0");
  refused({counting(2), {.sampling = {.temperature = -1}}, {}},
          RefusalReason::kBadOptions, "temperature must be");
  refused({counting(2), {.stop = {"x"}}, {}}, RefusalReason::kBadOptions,
          "stop strings need a tokenizer");
  refused({counting(2), {.stop_tokens = {64}}, {}}, RefusalReason::kBadOptions,
          "id 0 is 64");
  refused({counting(2), {.context = 65}, {}}, RefusalReason::kBadOptions,
          "between 1 and 64 tokens");
  refused({counting(2), {.chunk = 0}, {}}, RefusalReason::kBadOptions,
          "the chunk must be at least 1");
  refused({counting(2), {.log_probs = -1}, {}}, RefusalReason::kBadOptions,
          "log_probs must be at least 0 but got -1");
  EXPECT_EQ(model->steps, 0);
  EXPECT_FALSE(batcher.step());
  EXPECT_EQ(batcher.stats().refused, 12);
  EXPECT_FALSE(batcher.refusal({counting(2), {}, {}}));
}

TEST_P(BatcherTest, AFullQueueRefusesAndTheOthersGoOn) {
  Batcher batcher(model, slots(1), {.max_queued = 2});
  const BatchRequest request = {counting(4), {.max_new_tokens = 3}, {}};
  batcher.submit(request);
  batcher.step();  // in a row now, so two more may wait
  for (int i = 0; i < 4; ++i) batcher.submit(request);
  batcher.run();
  const auto results = by_id(batcher.take_finished());
  for (const uint64_t id : {1, 2, 3}) {
    expect_same(results.at(id).result, alone(request));
  }
  for (const uint64_t id : {4, 5}) {
    EXPECT_EQ(results.at(id).refusal, RefusalReason::kQueueFull);
    EXPECT_EQ(results.at(id).error,
              "[Batcher::submit] at most 2 requests may wait but 2 do; submit "
              "it again later.");
  }
}

// K25: a row is empty before the next prompt, and nothing of the last one
// shows.
TEST_P(BatcherTest, ARowThatIsUsedAgainIsFresh) {
  Batcher batcher(model, slots(2), batching(GetParam()));
  for (int i = 0; i < 2; ++i) {
    batcher.submit({counting(20 + i), {.max_new_tokens = 5}, {}});
  }
  batcher.run();
  EXPECT_THAT(batcher.cache().lengths(), ElementsAre(0, 0));
  const BatchRequest third = {{63, 62, 61}, {.max_new_tokens = 9}, {}};
  BatchRequest watched = third;
  std::vector<int64_t> before;
  watched.hooks.on_prefill = [&](int64_t done, int64_t) {
    before.push_back(batcher.cache().lengths()[0] - done);
  };
  batcher.submit(watched);
  batcher.run();
  EXPECT_THAT(before, ElementsAre(0));
  const auto results = by_id(batcher.take_finished());
  expect_same(results.at(3).result, alone(third));
}

// K32: each slot alone, the first and the last among them.
TEST_P(BatcherTest, EverySlotCanBeTheOnlyOne) {
  const BatchRequest request = {counting(6), {.max_new_tokens = 24}, {}};
  const auto wanted = alone(request);
  for (uint64_t only = 1; only <= 4; ++only) {
    Batcher batcher(model, slots(4), batching(GetParam()));
    for (int i = 0; i < 4; ++i) batcher.submit(request);
    while (batcher.stats().occupied_rows < 4) batcher.step();
    for (uint64_t id = 1; id <= 4; ++id) {
      if (id != only) batcher.cancel(id);
    }
    batcher.run();
    expect_same(by_id(batcher.take_finished()).at(only).result, wanted);
  }
}

TEST_P(BatcherTest, ResultsMayGoToACallback) {
  std::vector<uint64_t> ids;
  Batcher* self = nullptr;
  Batcher batcher(model, slots(2), {.on_finished = [&](BatchResult result) {
                    ids.push_back(result.id);
                    // From a callback, more may be asked for.
                    if (ids.size() == 2) {
                      self->submit({counting(3), {.max_new_tokens = 1}, {}});
                    }
                  }});
  self = &batcher;
  batcher.submit({counting(3), {.max_new_tokens = 1}, {}});
  batcher.submit({{}, {}, {}});
  EXPECT_THAT(ids, IsEmpty());  // they come from the thread that steps
  batcher.run();
  EXPECT_THAT(ids, testing::UnorderedElementsAre(1, 2, 3));
  EXPECT_THAT(batcher.take_finished(), IsEmpty());
}

TEST_P(BatcherTest, MemoryIsFlat) {
  RandomRequests random(5);
  Batcher batcher(model, slots(4), batching(GetParam()));
  std::vector<size_t> reserved;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 20; ++i) batcher.submit(random.next());
    batcher.run();
    EXPECT_THAT(batcher.take_finished(), SizeIs(20));
    reserved.push_back(batcher.cache().memory().total().reserved);
  }
  if (GetParam() != CacheKind::kConcat) {
    EXPECT_THAT(reserved, testing::Each(reserved[0]));
  } else {
    EXPECT_THAT(batcher.cache().memory().total().used, 0);
  }
}

TEST_P(BatcherTest, RefusesACacheThatItCannotUse) {
  auto used = make_cache(GetParam(), *model, {.rows = 2});
  Step step = used->begin_step({.tokens = 1});
  model->forward(at::zeros({2, 1}, at::kLong), step, {});
  step.commit();
  EXPECT_EQ(error_of([&] { Batcher(model, std::move(used)); }),
            "[Batcher::Batcher] the cache must be empty but row 0 holds 1 "
            "tokens; reset() it.");
  EXPECT_EQ(error_of([&] { Batcher(model, nullptr); }),
            "[Batcher::Batcher] the cache must not be null; generate() works "
            "without one.");
  EXPECT_EQ(error_of([&] { Batcher(nullptr, slots(1)); }),
            "[Batcher::Batcher] the model must not be null.");
  EXPECT_THAT(error_of([&] { Batcher(model, slots(1), {.max_queued = 0}); }),
              HasSubstr("max_queued must be at least 1 but got 0"));
  const auto other = FakeModel::hashed(8, 8);
  auto spec = other->cache_spec(1, 8);
  spec.layers.pop_back();
  EXPECT_THAT(error_of([&] {
                Batcher(model, std::make_unique<PreallocatedCache>(spec));
              }),
              HasSubstr("[FakeModel::check_cache]"));
}

TEST(BatcherTextTest, ReasonsHaveNames) {
  EXPECT_EQ(to_string(RefusalReason::kBadOptions), "bad options");
  EXPECT_EQ(to_string(RefusalReason::kBadPrompt), "bad prompt");
  EXPECT_EQ(to_string(RefusalReason::kTooLong), "too long");
  EXPECT_EQ(to_string(RefusalReason::kQueueFull), "queue full");
}

}  // namespace
}  // namespace kvcache::model
