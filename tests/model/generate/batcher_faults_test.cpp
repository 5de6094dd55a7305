// batcher_faults_test.cpp - one request's fault never touches another.

#include <new>

#include "tests/model/generate/batch_fixture.h"

namespace kvcache::model {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Le;
using testing::SizeIs;

constexpr int64_t kVocabulary = 64;
constexpr int64_t kBad = 63;  // what a faulty request has in its prompt

class BatcherFaultsTest : public testing::TestWithParam<CacheKind> {
 protected:
  // Logits of a request with kBad in it come from `faulty`, once it holds
  // `tokens`.
  std::shared_ptr<FakeModel> model_with(
      int64_t tokens, const std::function<std::vector<float>()>& faulty) {
    return std::make_shared<FakeModel>(
        kVocabulary, 64, [=](FakeModel::History history) {
          const bool bad =
              std::find(history.begin(), history.end(), kBad) != history.end();
          auto row = FakeModel::mixed(kVocabulary, history);
          row[kBad] = -100;  // nobody samples it
          return bad && static_cast<int64_t>(history.size()) >= tokens
                     ? faulty()
                     : row;
        });
  }
  std::unique_ptr<Cache> slots(const LanguageModel& model, int64_t rows) const {
    return make_cache(GetParam(), model, {.rows = rows, .slots = true});
  }
  static BatchRequest good(int64_t i) {
    return {.tokens = counting(3 + i),
            .options = {.max_new_tokens = 6 + i, .chunk = 2}};
  }
  static BatchRequest bad() {
    return {.tokens = {4, kBad, 5},
            .options = {.max_new_tokens = 20, .chunk = 2}};
  }

  // Good requests with a bad one among them, then one more in every row.
  std::map<uint64_t, BatchResult> run_among(
      const std::shared_ptr<FakeModel>& model, BatchRequest odd,
      int64_t goods = 7) {
    Batcher batcher(model, slots(*model, 4));
    for (int64_t i = 0; i < goods; ++i) {
      if (i == 2) odd_ = batcher.submit(odd);
      batcher.submit(good(i));
    }
    batcher.run();
    stats_ = batcher.stats();
    EXPECT_THAT(batcher.cache().validate(), IsEmpty());
    EXPECT_EQ(stats_.failed, 1);
    return by_id(batcher.take_finished());
  }
  void expect_others_as_if_alone(
      const FakeModel& model, const std::map<uint64_t, BatchResult>& results) {
    int64_t i = 0;
    for (const auto& [id, got] : results) {
      if (id == odd_) continue;
      SCOPED_TRACE(id);
      ASSERT_EQ(got.status, BatchStatus::kFinished) << got.error;
      expect_same(got.result, alone(model, GetParam(), good(i)));
      ++i;
    }
  }

  uint64_t odd_ = 0;
  BatchStats stats_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, BatcherFaultsTest,
                         testing::ValuesIn(kBatchKinds), name_of_kind);

// The shared forward throws, and does not say for which row.
TEST_P(BatcherFaultsTest, AForwardThatThrowsEndsTheRowThatIsToBlame) {
  const auto model = model_with(6, []() -> std::vector<float> {
    throw std::runtime_error("no such expert");
  });
  const auto results = run_among(model, bad());
  const BatchResult& failed = results.at(odd_);
  EXPECT_EQ(failed.status, BatchStatus::kFailed);
  EXPECT_EQ(failed.error, "no such expert");
  EXPECT_THROW(std::rethrow_exception(failed.exception), std::runtime_error);
  EXPECT_THAT(failed.result.tokens, SizeIs(3));  // what there was before
  EXPECT_EQ(failed.result.cache_length, 5);
  EXPECT_EQ(stats_.redone_steps, 1);
  expect_others_as_if_alone(*model, results);
}

TEST_P(BatcherFaultsTest, APrefillThatThrowsEndsItsRequest) {
  const auto model =
      model_with(3, []() -> std::vector<float> { throw std::bad_alloc(); });
  const auto results = run_among(model, bad());
  EXPECT_EQ(results.at(odd_).status, BatchStatus::kFailed);
  EXPECT_THAT(results.at(odd_).result.tokens, IsEmpty());
  EXPECT_EQ(results.at(odd_).result.cache_length, 2);  // the first chunk
  EXPECT_EQ(stats_.redone_steps, 0);
  expect_others_as_if_alone(*model, results);
}

TEST_P(BatcherFaultsTest, LogitsThatAreNotFiniteEndTheirRequest) {
  const auto model = model_with(5, [] {
    std::vector<float> row(kVocabulary, 1);
    row[9] = std::numeric_limits<float>::quiet_NaN();
    return row;
  });
  const auto results = run_among(model, bad());
  EXPECT_EQ(results.at(odd_).status, BatchStatus::kFailed);
  EXPECT_THAT(results.at(odd_).error,
              HasSubstr("got nan for token 9 (non-finite logits)"));
  EXPECT_THAT(results.at(odd_).result.tokens, SizeIs(2));
  EXPECT_EQ(stats_.redone_steps, 0);
  expect_others_as_if_alone(*model, results);
}

// A step that fails once, as an allocation may, is nobody's fault.
TEST_P(BatcherFaultsTest, AFaultThatDoesNotComeAgainEndsNobody) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  Batcher batcher(model, slots(*model, 3));
  std::vector<BatchRequest> requests;
  for (int64_t i = 0; i < 3; ++i) {
    requests.push_back(good(i));
    requests.back().options.max_new_tokens = 20;
    batcher.submit(requests.back());
  }
  while (batcher.stats().decode_tokens < 20) batcher.step();  // all decode
  EXPECT_EQ(batcher.stats().redone_steps, 0);
  model->fail_once_at = model->steps + 1;
  batcher.run();
  EXPECT_EQ(batcher.stats().redone_steps, 1);
  const auto results = by_id(batcher.take_finished());
  for (size_t i = 0; i < requests.size(); ++i) {
    expect_same(results.at(i + 1).result,
                alone(*model, GetParam(), requests[i]));
  }
}

TEST_P(BatcherFaultsTest, AForwardThatAlwaysThrowsEndsAll) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  Batcher batcher(model, slots(*model, 2));
  for (int64_t i = 0; i < 5; ++i) batcher.submit(good(i));
  for (int i = 0; i < 8; ++i) batcher.step();
  model->fail_after = model->steps.load();
  batcher.run();
  for (const BatchResult& result : batcher.take_finished()) {
    EXPECT_EQ(result.status, BatchStatus::kFailed);
    EXPECT_EQ(result.error, "[FakeModel] told to.");
  }
  EXPECT_EQ(batcher.stats().failed, 5);
  // And goes on when it works again.
  model->fail_after = -1;
  batcher.submit(good(0));
  batcher.run();
  expect_same(batcher.take_finished().at(0).result,
              alone(*model, GetParam(), good(0)));
}

TEST_P(BatcherFaultsTest, AHookThatThrowsEndsItsRequest) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  const auto tokenizer = [] {
    std::vector<std::string> words(kVocabulary, "ab");
    words[0] = "c";
    return std::make_shared<FakeTokenizer>(words);
  }();
  const auto full = [](auto&&...) { throw std::runtime_error("full disk"); };
  for (const auto& hooks :
       {GenerateHooks{.on_text = full}, GenerateHooks{.on_token = full},
        GenerateHooks{.on_prefill = full}}) {
    BatchRequest odd = bad();
    odd.options.tokenizer = tokenizer;
    odd.hooks = hooks;
    const auto results = run_among(model, odd);
    EXPECT_EQ(results.at(odd_).status, BatchStatus::kFailed);
    EXPECT_EQ(results.at(odd_).error, "full disk");
    EXPECT_THAT(results.at(odd_).result.tokens, SizeIs(Le(1U)));
    expect_others_as_if_alone(*model, results);
  }
}

// Text that was held back is handed out when all else is done.
TEST_P(BatcherFaultsTest, AHookThatThrowsAtTheVeryEndIsAFailureToo) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  BatchRequest odd = bad();
  odd.options.max_new_tokens = 1;
  odd.options.tokenizer = std::make_shared<FakeTokenizer>(
      std::vector<std::string>(kVocabulary, "\xF0"));  // half a character
  odd.hooks.on_text = [](std::string_view text) {
    if (text.find("\xEF\xBF\xBD") != text.npos) throw 7;
  };
  const auto results = run_among(model, odd);
  EXPECT_EQ(results.at(odd_).status, BatchStatus::kFailed);
  EXPECT_THAT(results.at(odd_).error, HasSubstr("no std::exception"));
  expect_others_as_if_alone(*model, results);
}

TEST_P(BatcherFaultsTest, AHookCannotStep) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  Batcher batcher(model, slots(*model, 2));
  batcher.submit(
      {.tokens = counting(3),
       .hooks = {.on_token = [&](const GeneratedToken&) { batcher.run(); }}});
  batcher.submit(good(0));
  batcher.run();
  const auto results = by_id(batcher.take_finished());
  EXPECT_THAT(results.at(1).error, HasSubstr("one thread steps at a time"));
  expect_same(results.at(2).result, alone(*model, GetParam(), good(0)));
}

// Requests that come and go from within a hook.
TEST_P(BatcherFaultsTest, AHookMaySubmitAndCancel) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  Batcher batcher(model, slots(*model, 2));
  int tokens = 0;
  uint64_t other = 0;
  batcher.submit({.tokens = counting(3),
                  .options = {.max_new_tokens = 8},
                  .hooks = {.on_token = [&](const GeneratedToken&) {
                    ++tokens;
                    if (tokens == 2) other = batcher.submit(good(3));
                    if (tokens == 6) {
                      EXPECT_TRUE(batcher.cancel(other));
                    }
                    if (tokens == 7) batcher.cancel(1);
                  }}});
  batcher.run();
  const auto results = by_id(batcher.take_finished());
  EXPECT_THAT(results.at(1).result.tokens, SizeIs(7));
  for (const uint64_t id : {uint64_t{1}, other}) {
    EXPECT_EQ(results.at(id).result.finish_reason, FinishReason::kCancelled);
  }
}

TEST_P(BatcherFaultsTest, ACallbackThatThrowsLosesItsResultOnly) {
  const auto model = FakeModel::hashed(kVocabulary, 64);
  std::vector<uint64_t> ids;
  Batcher batcher(model, slots(*model, 2),
                  {.on_finished = [&](const BatchResult& result) {
                    ids.push_back(result.id);
                    if (ids.size() == 1) throw std::runtime_error("no socket");
                  }});
  for (int64_t i = 0; i < 4; ++i) batcher.submit(good(i));
  EXPECT_EQ(error_of([&] { batcher.run(); }), "no socket");
  batcher.run();
  EXPECT_THAT(ids, testing::UnorderedElementsAre(1, 2, 3, 4));
}

}  // namespace
}  // namespace kvcache::model
