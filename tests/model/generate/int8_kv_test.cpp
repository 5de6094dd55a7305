// int8_kv_test.cpp - models over K and V in 8-bit codes: close to plain storage
// and, among themselves, the same bits whatever way the tokens came in.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <map>

#include "kvcache/model/batcher.h"
#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "kvcache/model/identity.h"
#include "kvcache/model/score.h"
#include "kvcache/model/transformer.h"
#include "kvcache/model/verify.h"

namespace kvcache::model {
namespace {

using ::testing::IsEmpty;

// Mean |difference| of a log-probability from the same dtype with plain K/V. A
// code is within 1/254 of the largest value of its head; the random weights of
// the tiny models give wide scores, which multiply that. The test prints
// what it makes.
constexpr double kMeanDifference = 0.05;

constexpr CacheKind kKinds[] = {CacheKind::kPreallocated, CacheKind::kState,
                                CacheKind::kWindow};

const char* path_of(bool hybrid) {
  return hybrid ? "tests/reference/data/qwen3_5" : "tests/reference/data/llama";
}

std::vector<int64_t> some_tokens(int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(3 + i * i * 7 % 59);
  return tokens;
}

CacheOptions int8(int64_t capacity = 100) {
  return {.capacity = capacity, .kv_format = KvFormat::kInt8};
}

struct Case {
  bool hybrid = false;
  at::ScalarType dtype = at::kFloat;
};

class Int8KvTest : public ::testing::TestWithParam<Case> {
 protected:
  Int8KvTest() {
    at::set_num_threads(1);  // tiny models: threads would only wait
    model = load_model(path_of(GetParam().hybrid), {.dtype = GetParam().dtype});
  }
  std::shared_ptr<const Transformer> model;
};

INSTANTIATE_TEST_SUITE_P(
    Models, Int8KvTest,
    ::testing::Values(Case{false, at::kFloat}, Case{false, at::kBFloat16},
                      Case{true, at::kFloat}, Case{true, at::kBFloat16}),
    [](const auto& info) {
      return std::string(info.param.hybrid ? "Hybrid" : "Llama") +
             (info.param.dtype == at::kFloat ? "Float" : "BFloat16");
    });

TEST_P(Int8KvTest, LogProbabilitiesAreCloseToPlainStorage) {
  const auto tokens = some_tokens(80);
  const auto plain_cache = make_cache(CacheKind::kPreallocated, *model);
  const auto int8_cache = make_cache(CacheKind::kPreallocated, *model, int8());
  const auto plain = score(*model, plain_cache.get(), tokens);
  const auto codes = score(*model, int8_cache.get(), tokens);
  EXPECT_NE(plain, codes);  // quantised it is
  double sum = 0, most = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double difference = std::abs(double{plain[i]} - double{codes[i]});
    sum += difference;
    most = std::max(most, difference);
  }
  const double mean = sum / static_cast<double>(plain.size());
  std::printf("mean |difference| of a log-probability %.5f, at most %.5f\n",
              mean, most);
  EXPECT_LE(mean, kMeanDifference);
}

TEST_P(Int8KvTest, KindsAndChunksGiveTheSameBits) {
  const auto tokens = some_tokens(60);
  const auto first = make_cache(CacheKind::kPreallocated, *model, int8());
  const auto wanted = score(*model, first.get(), tokens);
  for (const CacheKind kind : kKinds) {
    for (const int64_t chunk : {1, 7, 256}) {
      const auto cache = make_cache(kind, *model, int8());
      EXPECT_EQ(score(*model, cache.get(), tokens, {.chunk = chunk}), wanted)
          << to_string(kind) << " " << chunk;
    }
  }
}

TEST_P(Int8KvTest, WhatIsTakenUpIsWhatNeverLeft) {
  for (const CacheKind kind : kKinds) {
    const VerifyReport report = verify_reuse(*model, some_tokens(40),
                                             {.kind = kind,
                                              .split = 23,
                                              .new_tokens = 8,
                                              .kv_format = KvFormat::kInt8});
    EXPECT_THAT(report.first_difference, IsEmpty());
    EXPECT_EQ(report.steps, 9);  // the prompt, then each token
  }
}

TEST_P(Int8KvTest, ABatchGivesWhatEachGivesAlone) {
  std::vector<BatchRequest> requests;
  for (const int64_t count : {5, 30, 17, 9}) {
    requests.push_back(
        {.tokens = some_tokens(count),
         .options = {
             .max_new_tokens = count, .ignore_eos = true, .log_probs = 0}});
  }
  CacheOptions rows = int8();
  rows.rows = 2;
  rows.slots = true;
  Batcher batcher(model, make_cache(CacheKind::kWindow, *model, rows));
  std::map<uint64_t, size_t> of;
  for (size_t i = 0; i < requests.size(); ++i) {
    of[batcher.submit(requests[i])] = i;
  }
  batcher.run();
  const auto results = batcher.take_finished();
  EXPECT_EQ(results.size(), requests.size());
  for (const BatchResult& got : results) {
    const BatchRequest& request = requests[of.at(got.id)];
    const auto cache = make_cache(CacheKind::kPreallocated, *model, int8());
    const GenerateResult alone =
        generate(*model, cache.get(), request.tokens, request.options);
    EXPECT_EQ(got.result.tokens, alone.tokens);
    EXPECT_EQ(got.result.log_probs, alone.log_probs);
  }
}

TEST_P(Int8KvTest, SavedTextsNameTheFormat) {
  const auto plain = identity_of(path_of(GetParam().hybrid), *model);
  const auto codes =
      identity_of(path_of(GetParam().hybrid), *model, KvFormat::kInt8);
  EXPECT_NE(plain.at("dtype"), codes.at("dtype"));
  EXPECT_EQ(codes.at("dtype"), plain.at("dtype") + ", K/V in int8");
}

}  // namespace
}  // namespace kvcache::model
