// checkpoint_store.h: what is shared between namespaces and routes, and what
// never is.
#include <gtest/gtest.h>

#include "kvcache/checkpoint_store.h"
#include "tests/support/error_text.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

// Parts of a namespace that run together when written down are still apart.
TEST(StoreNamespace, PartsDoNotRunTogether) {
  CheckpointStore store(plenty());
  const std::string nul("a\0b", 3);
  const std::vector<Namespace> spaces = {
      {.model = "ab", .tenant = "c"},
      {.model = "b", .tenant = "ca"},
      {.model = "", .tenant = "cab"},
      {.model = "1:b", .tenant = "c"},
      {.model = "b1:", .tenant = "c"},
      {.model = nul, .tenant = "c"},
      {.model = "a", .base = "b", .tenant = "c"},
      {.model = "a", .base = "", .tenant = "cb"}};
  for (size_t i = 0; i < spaces.size(); ++i) {
    const Make make{.world = std::to_string(i)};
    EXPECT_EQ(put(store, ids(6), make, spaces[i]), PutResult::kStored);
  }
  for (size_t i = 0; i < spaces.size(); ++i) {
    const Make make{.world = std::to_string(i)};
    EXPECT_EQ(wrong_in(look(store, ids(7), spaces[i]), ids(7), make), "");
  }
  EXPECT_EQ(store.stats().groups, static_cast<int64_t>(spaces.size()));
}

// What comes before an adapter is shared with the base and other adapters, in
// both directions; what comes behind it never is.
TEST(StoreNamespace, TokensBeforeAnAdapterAreTheBases) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  const Make make{.positions = {3, 6, 9, 12}};
  put(store, text, make, {.adapter = "red", .active_from = 6});
  EXPECT_EQ(look(store, text + ids(2, 1)).position, 6);
  put(store, text, make);  // the base's 9 and 12 are others; 3 and 6 are known
  EXPECT_EQ(store.stats().checkpoints, 6);
  EXPECT_EQ(look(store, text + ids(2, 1)).position, 12);
  const Namespace blue{.adapter = "blue", .active_from = 9};
  EXPECT_EQ(look(store, text + ids(2, 1), blue).position, 9);
  // An adapter that begins behind the text has not begun.
  const Namespace later{.adapter = "blue", .active_from = 12};
  EXPECT_EQ(look(store, text + ids(2, 1), later).position, 12);
  // From the first token on, nothing is shared.
  EXPECT_EQ(look(store, text, {.adapter = "red"}).position, 0);
}

// Routes share part 0: the same states and K/V are there once.
TEST(StoreRoutes, ShareTheLowerPart) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  const Make x{.positions = {8, 12}, .parts = 2, .route = "x"};
  const Make y{.positions = {8, 12}, .parts = 2, .route = "y"};
  put(store, text, x);
  const size_t one = store.stats().used_bytes;
  put(store, text, y);
  EXPECT_EQ(store.stats().used_bytes, one + one / 2);
  const Hit any = look(store, text + ids(1, 1));
  ASSERT_TRUE(any.report.route);  // the deepest of any route says which
  EXPECT_EQ(wrong_in(any, text, *any.report.route == "x" ? x : y), "");
  const Hit hit_x = look(store, text + ids(1, 1), {}, "x");
  const Hit hit_y = look(store, text + ids(1, 1), {}, "y");
  EXPECT_EQ(wrong_in(hit_x, text, x), "");
  EXPECT_EQ(wrong_in(hit_y, text, y), "");
  EXPECT_EQ(hit_x.text->parts[0].points[0], hit_y.text->parts[0].points[0]);
  EXPECT_EQ(hit_x.text->parts[0].blocks[0], hit_y.text->parts[0].blocks[0]);
}

// A model of one part may depend on its route as a whole.
TEST(StoreRoutes, AModelOfOnePartSharesNothing) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, {.route = "x"});
  put(store, text, {.route = "y"});
  EXPECT_EQ(
      wrong_in(look(store, text + ids(1, 1), {}, "y"), text, {.route = "y"}),
      "");
}

// What decode wrote is not taken for what prefill wrote, and the reverse.
TEST(StoreRoutes, DecodedTokensAreNotShared) {
  CheckpointStore store(plenty());
  const Ids text = ids(12);
  put(store, text, {.parts = 2, .route = "x"});
  put(store, text, {.parts = 2, .route = "y", .decoded = {{6, 12}}});
  const Hit x = look(store, text + ids(1, 1), {}, "x");
  const Hit y = look(store, text + ids(1, 1), {}, "y");
  EXPECT_EQ(x.text->parts[0].blocks[0], y.text->parts[0].blocks[0]);
  EXPECT_NE(x.text->parts[0].blocks[1], y.text->parts[0].blocks[1]);
  EXPECT_EQ(y.report.decoded, 6);
}

// Tokens that any sum or hash of them would confuse: they are compared.
TEST(StoreTokens, AreCompared) {
  CheckpointStore store(plenty());
  // Equal sums and products, permutations, and the same bucket of any table
  // whose size divides 2^20.
  const std::vector<Ids> texts = {
      {1, 6, 6},         {2, 2, 9},       {6, 1, 6},       {6, 6, 1},
      {9, 2, 2},         {0, 0, 1},       {0, 1, 0},       {1 << 20, 0, 1},
      {2 << 20, 0, 1},   {3 << 20, 0, 1}, {0, 1 << 20, 1}, {0, 2 << 20, 1},
      {2147483647, 0, 0}};
  for (const Ids& text : texts) put(store, text);
  for (const Ids& text : texts) {
    const Hit hit = look(store, text + ids(1, 5));
    EXPECT_EQ(hit.position, 3);
    EXPECT_EQ(wrong_in(hit, text, {}), "");
  }
  EXPECT_EQ(look(store, {1, 6, 9, 1}).position, 0);
  EXPECT_EQ(testing::error_text([&] {
              look(store, {1, -3, 4});
            }),
            "[CheckpointStore::lookup] tokens must be in [0, 2^31) but got -3 "
            "at 1.");
  EXPECT_EQ(testing::error_text([&] {
              put(store, {int64_t{1} << 31U, 1});
            }),
            "[CheckpointStore::put] tokens must be in [0, 2^31) but got "
            "2147483648 at 0.");
}

// Case K44, its second half: a prefix of one token is found.
TEST(StoreTokens, APrefixOfOneTokenIsFound) {
  CheckpointStore store(plenty());
  put(store, {7});
  EXPECT_EQ(look(store, {7, 9}).position, 1);
}

// Where a text that is gone had branched off is still a place for a
// checkpoint: at the second sighting at the latest.
TEST(StoreTokens, ReportsWhereTextsPart) {
  const Make make{.attention = false, .state_size = 4};
  CheckpointStore store({.max_bytes = 16, .min_prefix = 1});
  const Ids system = ids(5);
  EXPECT_EQ(look(store, system + ids(4, 1)).report.divergence, std::nullopt);
  put(store, system + ids(4, 1), make);
  EXPECT_EQ(look(store, system + ids(4, 2)).report.divergence, 5);
  put(store, ids(9, 9), make);  // evicts it
  const LookupReport report = look(store, system + ids(4, 3)).report;
  EXPECT_EQ(report.matched, 0);
  EXPECT_EQ(report.divergence, 5);
}

}  // namespace
}  // namespace kvcache::fake
