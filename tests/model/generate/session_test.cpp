// session_test.cpp - behaviour of the smallest front end: prefill, decode,
// crop and recompute, storage.

#include "kvcache/model/session.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "tests/model/generate/fake_model.h"
#include "tests/support/error_text.h"

namespace kvcache::model {
namespace {

using kvcache::testing::error_text;
using ::testing::HasSubstr;

// [rows, tokens] of different ids.
Tensor ids(int64_t rows, int64_t tokens, int64_t first = 0) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < rows * tokens; ++i) {
    values.push_back((first + i * 7) % 64);
  }
  return at::tensor(values, at::kLong).view({rows, tokens});
}

class SessionTest : public ::testing::TestWithParam<CacheKind> {
 protected:
  std::shared_ptr<FakeModel> model = FakeModel::hashed(64, 16);
  CacheSession session{model, {.kind = GetParam(), .chunk = 5}};

  Tensor oracle(const Tensor& all) const { return model->forward(all, {}); }
};

INSTANTIATE_TEST_SUITE_P(Kinds, SessionTest,
                         ::testing::Values(CacheKind::kConcat,
                                           CacheKind::kPreallocated),
                         [](const auto& info) {
                           return std::string(to_string(info.param));
                         });

TEST_P(SessionTest, PrefillAndDecodeEqualTheWholeText) {
  const Tensor all = ids(3, 10);
  const Tensor logits = session.prefill(all.narrow(1, 0, 7));
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{3, 1, 64}));
  EXPECT_TRUE(at::equal(logits, oracle(all.narrow(1, 0, 7))));
  EXPECT_EQ(session.length(), 7);
  EXPECT_EQ(session.rows(), 3);
  for (int64_t t = 7; t < 10; ++t) {
    EXPECT_TRUE(at::equal(session.decode(all.narrow(1, t, 1)),
                          oracle(all.narrow(1, 0, t + 1))));
  }
  EXPECT_EQ(session.length(), 10);
}

TEST_P(SessionTest, PrefillStartsAnewWithAnyRowCount) {
  session.prefill(ids(1, 16));
  for (const int64_t rows : {1, 4, 2}) {
    const Tensor other = ids(rows, 5, 3);
    EXPECT_TRUE(at::equal(session.prefill(other), oracle(other)));
    EXPECT_EQ(session.length(), 5);
    EXPECT_EQ(session.rows(), rows);
  }
}

TEST_P(SessionTest, BadArgumentsKeepTheSession) {
  const Tensor all = ids(2, 8);
  session.prefill(all.narrow(1, 0, 7));
  const auto refused = [&](const Tensor& bad) {
    const auto text = error_text([&] { session.prefill(bad); });
    EXPECT_EQ(session.length(), 7);
    return text;
  };
  EXPECT_EQ(refused(ids(1, 17)),
            "[CacheSession::prefill] ids must be a non-empty [B, T] with T up "
            "to the context of 16 tokens but got [1, 17].");
  EXPECT_THAT(refused(ids(2, 0)), HasSubstr("got [2, 0]"));
  EXPECT_THAT(refused(ids(1, 4).view({4})), HasSubstr("got [4]"));
  EXPECT_THAT(refused(ids(1, 4).to(at::kFloat)),
              HasSubstr("ids must be int64 on the CPU"));
  EXPECT_THAT(refused(ids(1, 4).add(60)), HasSubstr("must be in [0, 64)"));
  model->fail_after = model->steps + 1;  // in the second chunk
  EXPECT_THAT(refused(ids(1, 9)), HasSubstr("told to"));
  model->fail_after = -1;
  EXPECT_TRUE(at::equal(session.decode(all.narrow(1, 7, 1)), oracle(all)));
}

TEST_P(SessionTest, DecodeTakesOneTokenOfEachRow) {
  EXPECT_EQ(error_text([&] { session.decode(ids(1, 1)); }),
            "[CacheSession::decode] the session is empty; call prefill() "
            "before decode().");
  session.prefill(ids(2, 3));
  const auto steps = model->steps.load();
  EXPECT_EQ(error_text([&] { session.decode(ids(1, 1)); }),
            "[CacheSession::decode] ids must be [2, 1], one new token of each "
            "row, but got [1, 1].");
  EXPECT_THAT(error_text([&] { session.decode(ids(2, 2)); }),
              HasSubstr("but got [2, 2]"));
  EXPECT_THAT(error_text([&] { session.decode(ids(2, 1).view({2})); }),
              HasSubstr("but got [2]"));
  EXPECT_EQ(model->steps, steps);  // refused before anything ran
  EXPECT_EQ(session.length(), 3);
}

TEST_P(SessionTest, AFullContextNamesTheRemedy) {
  const Tensor all = ids(1, 17);
  session.prefill(all.narrow(1, 0, 16));
  EXPECT_EQ(error_text([&] { session.decode(all.narrow(1, 16, 1)); }),
            "[CacheSession::decode] the context of 16 tokens is full; prefill "
            "the cropped window instead, as recompute_window() does.");
  EXPECT_EQ(session.length(), 16);
  // The remedy equals the stateless forward on that window.
  const Tensor window = all.narrow(1, 1, 16);
  EXPECT_TRUE(at::equal(session.recompute_window(all), oracle(window)));
  EXPECT_EQ(session.length(), 16);
  EXPECT_THAT(error_text([&] { session.decode(ids(1, 1)); }),
              HasSubstr("context of 16 tokens is full"));
  // Keeping less leaves room.
  EXPECT_TRUE(
      at::equal(session.recompute_window(all, 8), oracle(all.narrow(1, 9, 8))));
  EXPECT_EQ(session.length(), 8);
  session.decode(ids(1, 1));
  EXPECT_EQ(session.length(), 9);
  // A text that is shorter than the window is kept whole.
  session.recompute_window(ids(2, 3));
  EXPECT_EQ(session.length(), 3);
  for (const int64_t keep : {0, -1, 17}) {
    EXPECT_THAT(error_text([&] { session.recompute_window(all, keep); }),
                HasSubstr("keep must be between 1 and the context of 16 tokens "
                          "but got " +
                          std::to_string(keep)));
  }
  EXPECT_EQ(session.length(), 3);
}

TEST_P(SessionTest, StorageReport) {
  const StorageReport empty = session.storage();
  EXPECT_EQ(empty.positions, 0);
  EXPECT_EQ(empty.logical_bytes, 0U);
  EXPECT_EQ(empty.storage_bytes, 0U);
  EXPECT_EQ(empty.dtype, std::nullopt);
  EXPECT_FALSE(empty.allocation.empty());

  session.prefill(ids(2, 3));
  session.decode(ids(2, 1));
  const StorageReport report = session.storage();
  // 2 layers of K and V, 2 rows, 1 head of 4 float32.
  const size_t token_bytes = 2 * 2 * 2 * 4 * sizeof(float);
  EXPECT_EQ(report.positions, 4);
  EXPECT_EQ(report.logical_bytes, 4 * token_bytes);
  EXPECT_EQ(report.storage_bytes,
            (GetParam() == CacheKind::kConcat ? 4 : 16) * token_bytes);
  EXPECT_EQ(report.dtype, at::kFloat);
  EXPECT_EQ(report.allocation, empty.allocation);
  EXPECT_THAT(report.allocation,
              HasSubstr(GetParam() == CacheKind::kConcat
                            ? "concatenation; no unused capacity"
                            : "allocated up front"));
}

TEST(SessionOptionsTest, ChecksModelAndOptionsAtConstruction) {
  const auto model = FakeModel::hashed(64, 16);
  EXPECT_THAT(error_text([] { CacheSession session(nullptr); }),
              HasSubstr("the model must not be null"));
  EXPECT_THAT(error_text([&] {
                CacheSession session(model, {.kind = CacheKind::kNone});
              }),
              HasSubstr("a session needs a cache but the kind is none"));
  EXPECT_THAT(error_text([&] { CacheSession session(model, {.context = 17}); }),
              HasSubstr("the context must be between 1 and 16 tokens"));
  CacheSession small(model, {.context = 4});
  EXPECT_THAT(error_text([&] { small.prefill(ids(1, 5)); }),
              HasSubstr("context of 4 tokens but got [1, 5]"));
}

}  // namespace
}  // namespace kvcache::model
