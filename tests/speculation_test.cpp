// speculation.h: whatever share of drafts is right, a row is as if nothing else
// had come.
#include "kvcache/speculation.h"

#include <gtest/gtest.h>

#include "tests/support/error_text.h"
#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

using kvcache::testing::error_text;

// K49: drafts of 4 at length 6, 0 to 4 of them right, on every kind, with and
// without states, with and without a mark of the caller's there: equal tokens
// and states, and no point stays that was not there before.
TEST(Speculation, K49EveryShareOnEveryKind) {
  const Ids ids = some_ids(6), drafts = {1, 2, 3, 4};
  for (const Variant variant : kVariants) {
    const Model model = make_model(variant);
    for (const Kind& kind : kinds()) {
      for (int64_t right = 0; right <= 4; ++right) {
        const std::unique_ptr<Cache> cache = kind.make(spec_of(model, 2, 14));
        feed_all(*cache, model, ids);
        if (right % 2 == 0) cache->mark();
        const auto points = cache->restore_points(1);
        Speculation speculation(*cache, 1);
        EXPECT_EQ(speculation.start(), 6);
        feed_row(*cache, model, 1, drafts);
        const int64_t again = speculation.accept(right);
        EXPECT_EQ(again, !has_states(model.layers) || right == 4 ? 0 : right);
        const Ids kept(drafts.begin(), drafts.begin() + right);
        if (again > 0) feed_row(*cache, model, 1, kept);
        EXPECT_EQ(cache->restore_points(1), points);
        EXPECT_EQ(cache->validate(), std::vector<std::string>{});
        const std::vector<Floats> got = feed(*cache, model, {{5}, {6, 7}});
        EXPECT_EQ(got[0], last_of(*cache, model, joined(ids, {5}), 1));
        EXPECT_EQ(got[1],
                  last_of(*cache, model, joined(joined(ids, kept), {6, 7}), 2))
            << kind.name << ' ' << name_of(variant) << ' ' << right;
      }
    }
  }
}

// One that is forgotten takes its drafts with it.
TEST(Speculation, WithoutAcceptNothingStays) {
  const Model model = make_model(Variant::kHybrid);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  feed_all(*cache, model, some_ids(3));
  {
    const Speculation speculation(*cache);
    feed_all(*cache, model, {1, 2});
  }
  EXPECT_EQ(cache->lengths()[0], 3);
  EXPECT_TRUE(cache->restore_points(0).empty());
  EXPECT_EQ(feed(*cache, model, {{4}})[0],
            last_of(*cache, model, joined(some_ids(3), {4}), 1));
}

TEST(Speculation, Errors) {
  const Model model = make_model(Variant::kAttention);
  const auto cache = make_preallocated(spec_of(model, 1, 14), {});
  Speculation speculation(*cache);
  feed_all(*cache, model, {1, 2});
  EXPECT_EQ(error_text([&] { speculation.accept(3); }),
            "[Speculation::accept] between 0 and 2 tokens came since it began "
            "but got 3; commit the step of the drafts first.");
  speculation.accept(1);
  EXPECT_EQ(error_text([&] { speculation.accept(0); }),
            "[Speculation::accept] drafts are accepted once; begin another "
            "Speculation.");
}

}  // namespace
}  // namespace kvcache::toy
