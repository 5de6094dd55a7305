// generate_fixture.h - the loop over every cache, and what its tests share.
#pragma once

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "kvcache/model/cache_factory.h"
#include "kvcache/model/generate.h"
#include "tests/model/generate/fake_model.h"

namespace kvcache::model {

inline constexpr CacheKind kKinds[] = {CacheKind::kNone, CacheKind::kConcat,
                                       CacheKind::kPreallocated};

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    const auto* torch = dynamic_cast<const c10::Error*>(&error);
    return torch ? torch->what_without_backtrace() : error.what();
  }
  return "nothing was thrown";
}

inline std::vector<int64_t> counting(int64_t count) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) ids[static_cast<size_t>(i)] = i % 60;
  return ids;
}

class GenerateTest : public testing::TestWithParam<CacheKind> {
 protected:
  std::unique_ptr<Cache> cache_for(const LanguageModel& model) const {
    return make_cache(GetParam(), model);
  }
  bool cached() const { return GetParam() != CacheKind::kNone; }
};
}  // namespace kvcache::model
