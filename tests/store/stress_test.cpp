// checkpoint_store.h: threads that share one store. Built again under
// ThreadSanitizer as store_tsan_test.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kvcache/checkpoint_store.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::IsEmpty;

constexpr int kThreads = 4;
constexpr int kEach = 400;
constexpr size_t kBound = 3000;

// Of one thread, and what it holds of the store for a while.
class User {
 public:
  User(CheckpointStore& store, unsigned seed) : store_(store), random_(seed) {}

  void act() {
    const Namespace space{.tenant = random_() % 3 == 0 ? "t" : ""};
    Ids tokens(1 + random_() % 16);
    for (int64_t& token : tokens) token = random_() % 4 == 0 ? 2 : 1;
    Make make{.world = space.tenant};
    make.positions = {static_cast<int64_t>(tokens.size())};
    if (random_() % 2 == 0) make.route = "x";
    switch (random_() % 16) {
      case 0:
        store_.invalidate_route("x");
        break;
      case 1:
        EXPECT_THAT(store_.validate(), IsEmpty());
        EXPECT_FALSE(store_.dump_tree(&space).empty());
        break;
      case 2:
        store_.pin(held_, random_() % 2 == 0);
        break;
      case 3:
        store_.set_max_bytes(random_() % 8 == 0 ? kBound / 4 : kBound);
        break;
      default:
        if (random_() % 2 == 0) {
          put(store_, tokens, make, space);
        } else {
          look(tokens, make, space);
        }
    }
  }

 private:
  void look(const Ids& tokens, const Make& make, const Namespace& space) {
    LookupRequest request;
    request.tokens = tokens;
    request.space = space;
    request.route = make.route;
    held_ = store_.lookup(request);
    EXPECT_EQ(wrong_in(held_, tokens, make), "");
    const StoreStats stats = store_.stats();
    EXPECT_LE(stats.hits + stats.partial + stats.cold, stats.rows);
  }

  CheckpointStore& store_;
  std::mt19937 random_;
  Hit held_ = {};
};

// Whatever threads do at once, hits are of their tokens, namespace and route,
// the store stays sound, and events come one at a time and in order.
TEST(StoreStressTest, ThreadsShareAStore) {
  at::set_num_threads(1);  // the OpenMP runtime is not what is tested here
  std::atomic<int> inside = 0;
  uint64_t told = 0;  // by one thread at a time, or ThreadSanitizer says so
  CheckpointStore store({.max_bytes = kBound,
                         .min_prefix = 1,
                         .on_event = [&](const StoreEvent& event) {
                           EXPECT_EQ(inside.fetch_add(1), 0);
                           EXPECT_EQ(event.sequence, ++told);
                           inside.fetch_sub(1);
                         }});
  {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([&store, t] {
        User user(store, t);
        for (int i = 0; i < kEach; ++i) user.act();
      });
    }
  }
  EXPECT_THAT(store.validate(), IsEmpty());
  EXPECT_LE(store.stats().used_bytes, kBound);
  EXPECT_GT(store.stats().evicted, 0);
  EXPECT_GT(told, 0U);
  store.set_max_bytes(0);
  EXPECT_EQ(store.stats().used_bytes, 0U);
}

}  // namespace
}  // namespace kvcache::fake
