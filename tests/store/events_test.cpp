// checkpoint_store.h and store_events.h: statistics, events, the dump, and what
// is made invalid.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

#include "kvcache/checkpoint_store.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// --- statistics

// Behaviour D1 and D15: hits, partial, cold; tokens reused and computed.
TEST(StoreStats, ClassesAndTokensOfRows) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  const Namespace space{.model = "m", .tenant = "t"};
  look(store, ids(9), space);
  put(store, ids(8), {.positions = {4, 8}}, space);
  look(store, ids(9), space);                        // all that may be: 8
  look(store, first(ids(9), 6) + ids(4, 1), space);  // 4 of 9
  look(store, ids(9));                               // another namespace
  for (const ReuseCounts& counts :
       {static_cast<ReuseCounts>(store.stats(space)),
        static_cast<ReuseCounts>(store.stats())}) {
    const bool all = counts.rows == 4;
    EXPECT_EQ(counts.rows, all ? 4 : 3);
    EXPECT_EQ(counts.hits, 1);
    EXPECT_EQ(counts.partial, 1);
    EXPECT_EQ(counts.cold, all ? 2 : 1);
    EXPECT_EQ(counts.tokens_reused, 12);
    EXPECT_EQ(counts.tokens_computed, (all ? 18 : 9) + 1 + 6);
    EXPECT_EQ(counts.ckpts_made, 2);
  }
  EXPECT_EQ(store.stats().checkpoints, 2);
  EXPECT_EQ(store.stats().groups, 1);
  EXPECT_EQ(store.stats(space).checkpoints, 2);
  store.clear();
  EXPECT_EQ(store.stats().rows, 4);  // statistics stay
  EXPECT_EQ(store.stats().checkpoints, 0);
}

// Behaviour D6: a row whose route was guessed wrongly is counted once; its
// class from the first lookup, its tokens from the pass that answered.
TEST(StoreStats, AMispredictedRowIsCountedOnce) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  put(store, ids(8), {.positions = {8}, .parts = 2, .route = "x"});
  put(store, ids(8), {.positions = {3}, .parts = 2, .route = "y"});
  const Ids row = ids(9);
  const Hit guess = look(store, row, {}, {}, true);
  EXPECT_EQ(guess.report.route, "x");
  const Hit answered = look(store, row, {}, "y", true);
  EXPECT_EQ(answered.position, 3);
  EXPECT_EQ(store.stats().rows, 0);
  store.settle(guess, answered);
  const StoreStats stats = store.stats();
  EXPECT_EQ(stats.rows, 1);
  EXPECT_EQ(stats.hits, 1);
  EXPECT_EQ(stats.mispredict, 1);
  EXPECT_EQ(stats.tokens_reused, 3);
  EXPECT_EQ(stats.tokens_computed, 6);
}

// Namespaces that only asked do not pile up.
TEST(StoreStats, EmptyNamespacesAreBounded) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  const Namespace kept{.tenant = "kept"};
  put(store, ids(4), {}, kept);
  for (int i = 0; i < 3000; ++i) {
    look(store, ids(4), {.tenant = std::to_string(i)});
  }
  EXPECT_EQ(store.stats({.tenant = "0"}).rows, 0);
  EXPECT_EQ(store.stats({.tenant = "2999"}).rows, 1);
  EXPECT_EQ(store.stats(kept).ckpts_made, 1);
  EXPECT_EQ(look(store, ids(5), kept).position, 4);
}

// --- invalidation

// What is made invalid is gone; what is not stays.
TEST(StoreInvalidate, ByRouteNamespaceAndGeneration) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  const Namespace tenant{.tenant = "t"};
  const Namespace red{.adapter = "red", .active_from = 2};
  put(store, ids(4, 0), {.positions = {2, 4}, .route = "x"});
  put(store, ids(4, 1), {.route = "y"});
  put(store, ids(4, 2), {}, tenant);
  put(store, ids(4, 3), {.positions = {2, 4}}, red);
  const Ids newer = ids(4, 4);
  PutRequest request = request_of(newer, {});
  request.generation = 2;
  store.put(request, [&] { return text_of(newer, {}); });
  EXPECT_EQ(store.invalidate_route("x"), 2);
  EXPECT_EQ(look(store, ids(5, 0)).position, 0);
  EXPECT_EQ(look(store, ids(5, 0)).report.reason, ReuseReason::kEvicted);
  EXPECT_EQ(look(store, ids(5, 1)).position, 4);
  EXPECT_EQ(store.invalidate_route("unknown"), 0);
  EXPECT_EQ(store.invalidate_namespace({.adapter = "red"}), 2);
  EXPECT_EQ(look(store, ids(5, 3), red).position, 0);
  EXPECT_EQ(look(store, ids(5, 1)).position, 4);
  EXPECT_EQ(store.invalidate_namespace(tenant), 1);
  EXPECT_EQ(look(store, ids(5, 2), tenant).position, 0);
  EXPECT_EQ(store.invalidate_namespace({.tenant = "unknown"}), 0);
  EXPECT_EQ(store.invalidate_generations_before(2), 1);  // route y's
  EXPECT_EQ(store.stats().checkpoints, 1);
  EXPECT_EQ(store.stats().invalidated, 6);
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_THAT(store.validate(), IsEmpty());
}

// A put that began before everything was made invalid does not come after it.
TEST(StoreInvalidate, APutThatIsMakingIsOvertaken) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  const Ids tokens = ids(4);
  for (const bool clear : {true, false}) {
    EXPECT_EQ(store.put(request_of(tokens, {}),
                        [&] {
                          if (clear) {
                            store.clear();
                          } else {
                            store.invalidate_generations_before(1);
                          }
                          return text_of(tokens, {});
                        }),
              PutResult::kOvertaken);
    EXPECT_EQ(store.stats().used_bytes, 0U);
    EXPECT_EQ(look(store, ids(5)).position, 0);
  }
}

// Two puts of one text at once: one stays.
TEST(StoreInvalidate, TheSecondOfTwoPutsRefreshes) {
  CheckpointStore store({.max_bytes = kPlenty, .min_prefix = 1});
  const Ids tokens = ids(4);
  EXPECT_EQ(store.put(request_of(tokens, {}),
                      [&] {
                        EXPECT_EQ(put(store, tokens), PutResult::kStored);
                        return text_of(tokens, {});
                      }),
            PutResult::kRefreshed);
  EXPECT_EQ(store.stats().checkpoints, 1);
  EXPECT_EQ(store.stats().used_bytes, 4 * 16 + 16U);
}

// --- events

// Who listens knows at any time which blocks can be reused, by their hashes.
class Listener {
 public:
  void operator()(const StoreEvent& event) {
    EXPECT_EQ(event.sequence, ++sequence_);
    switch (event.type) {
      case StoreEventType::kBlockStored:
        stored(event);
        break;
      case StoreEventType::kBlockRemoved:
        for (const uint64_t hash : event.block_hashes) {
          EXPECT_EQ(blocks_.erase(hash), 1U);
        }
        break;
      case StoreEventType::kAllBlocksCleared:
        blocks_.clear();
        checkpoints_ = 0;
        break;
      case StoreEventType::kCheckpointStored:
        ++checkpoints_;
        break;
      case StoreEventType::kCheckpointRemoved:
        --checkpoints_;
        break;
    }
  }
  int64_t tokens() const {
    int64_t sum = 0;
    for (const auto& [hash, tokens] : blocks_) sum += tokens;
    return sum;
  }
  int64_t checkpoints() const { return checkpoints_; }

 private:
  void stored(const StoreEvent& event) {
    EXPECT_EQ(
        event.token_ids.size(),
        event.block_hashes.size() * static_cast<size_t>(event.block_size));
    if (event.parent_block_hash) {
      EXPECT_EQ(blocks_.count(*event.parent_block_hash), 1U);
    }
    for (const uint64_t hash : event.block_hashes) {
      EXPECT_TRUE(blocks_.emplace(hash, event.block_size).second);
    }
  }

  std::map<uint64_t, int64_t> blocks_;
  int64_t checkpoints_ = 0;
  uint64_t sequence_ = 0;
};

// Random puts under a tight bound: what was told is what is there.
TEST(StoreEvents, TellWhatIsThere) {
  Listener listener;
  CheckpointStore store(
      {.max_bytes = 2000,
       .min_prefix = 1,
       .on_event = [&](const StoreEvent& event) { listener(event); }});
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    Ids tokens(4 + random() % 20);
    for (int64_t& token : tokens) token = random() % 6 == 0 ? 2 : 1;
    const auto n = static_cast<int64_t>(tokens.size());
    put(store, tokens, {.positions = {n - 3, n}});
    const StoreStats stats = store.stats();
    ASSERT_EQ(listener.checkpoints(), stats.checkpoints);
    ASSERT_EQ(16 * (listener.tokens() + listener.checkpoints()),
              static_cast<int64_t>(stats.used_bytes));
  }
  EXPECT_GT(store.stats().evicted, 100);
  store.clear();
  EXPECT_EQ(listener.tokens(), 0);
}

// A sink may use the store; it hears of that when its turn comes.
TEST(StoreEvents, ASinkMayUseTheStore) {
  std::vector<StoreEventType> seen;
  bool inside = false;
  CheckpointStore* used = nullptr;
  CheckpointStore store({.max_bytes = kPlenty,
                         .min_prefix = 1,
                         .on_event = [&](const StoreEvent& event) {
                           EXPECT_FALSE(std::exchange(inside, true));
                           seen.push_back(event.type);
                           if (seen.size() == 1) used->clear();
                           inside = false;
                         }});
  used = &store;
  put(store, ids(4));
  EXPECT_THAT(seen, ElementsAre(StoreEventType::kBlockStored,
                                StoreEventType::kCheckpointStored,
                                StoreEventType::kAllBlocksCleared));
}

// The names of vLLM's events, one line each.
TEST(StoreEvents, AsJsonLines) {
  std::vector<std::string> lines;
  CheckpointStore store(
      {.max_bytes = kPlenty,
       .min_prefix = 1,
       .on_event =
           [&](const StoreEvent& event) { lines.push_back(to_json(event)); },
       .clock =
           [] {
             return std::chrono::steady_clock::time_point(
                 std::chrono::milliseconds(1500));
           }});
  put(store, {1, 2, 3, 4, 5}, {.route = "a\"b\n"});
  store.clear();
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_THAT(lines[0], HasSubstr(R"({"type":"BlockStored","seq":1,"ts":1.5,)"
                                  R"("block_hashes":[)"));
  EXPECT_THAT(lines[0],
              HasSubstr(R"(],"parent_block_hash":null,"token_ids":[1,2,3,4],)"
                        R"("block_size":4,"lora_name":"a\"b\u000a",)"
                        R"("medium":"cpu","group_idx":0})"));
  EXPECT_THAT(lines[1], Not(HasSubstr("\"parent_block_hash\":null")));
  EXPECT_THAT(lines[1], HasSubstr(R"("token_ids":[5],"block_size":1)"));
  EXPECT_EQ(lines[2],
            R"({"type":"CheckpointStored","seq":3,"ts":1.5,"position":5,)"
            R"("bytes":16,"lora_name":"a\"b\u000a"})");
  EXPECT_EQ(lines[3], R"({"type":"AllBlocksCleared","seq":4,"ts":1.5})");
}

// --- the dump

// Counts, bytes and ages of all; names and token ids of the viewer's own.
TEST(StoreDump, NeverShowsTokensOfAnotherNamespace) {
  auto now = std::chrono::steady_clock::time_point{};
  CheckpointStore store(
      {.max_bytes = 1 << 20, .min_prefix = 1, .clock = [&now] { return now; }});
  const Namespace own{.model = "mine", .tenant = "salt-a"};
  const Namespace other{.model = "theirs", .tenant = "salt-b"};
  put(store, {11, 12, 13, 14, 15, 16, 17, 18, 19}, {.positions = {4, 9}}, own);
  put(store, {11, 12, 13, 77}, {.route = "road"}, own);
  put(store, {555, 556, 557}, {.route = "secret"}, other);
  now += std::chrono::milliseconds(2500);
  const std::string dump = store.dump_tree(&own);
  EXPECT_THAT(dump, HasSubstr("3 texts, 4 checkpoints, 0.3 KiB of 1.0 MiB"));
  EXPECT_THAT(dump, HasSubstr("(yours): model \"mine\""));
  EXPECT_THAT(dump, HasSubstr("  tokens [0, 9), 2 texts: 11 12 13 14 15 16 17 "
                              "18 ...\n"));
  EXPECT_THAT(dump, HasSubstr("    tokens [3, 4), 1 text: 77\n"));
  EXPECT_THAT(dump, HasSubstr("checkpoint at 9, 0.0 KiB, used 1 times, last "
                              "2.5 s ago"));
  EXPECT_THAT(dump, HasSubstr("route road"));
  EXPECT_THAT(dump, HasSubstr("tokens [0, 3), 1 text\n"));
  for (const std::string& dumped : {dump, store.dump_tree()}) {
    for (const char* hidden : {"555", "557", "salt", "theirs", "secret"}) {
      EXPECT_THAT(dumped, Not(HasSubstr(hidden)));
    }
  }
  EXPECT_THAT(store.dump_tree(), Not(HasSubstr("11 12")));
}

}  // namespace
}  // namespace kvcache::fake
