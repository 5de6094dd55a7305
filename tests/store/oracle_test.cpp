// checkpoint_store.h against a list of everything that was ever put.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "kvcache/checkpoint_store.h"
#include "tests/support/store_texts.h"

namespace kvcache::fake {
namespace {

using ::testing::IsEmpty;

struct Known {
  Ids tokens;
  Namespace space;
  Make make;
};

// How many keys two requests share, adapters included: tokens up to the first
// one that differs or was computed with something else.
int64_t shared(const Known& known, const Ids& tokens, const Namespace& space) {
  if (known.space.tenant != space.tenant || known.space.model != space.model) {
    return 0;
  }
  const auto adapter = [](const Namespace& in, int64_t position) {
    return position >= in.active_from ? in.adapter : std::string();
  };
  int64_t n = 0;
  const auto most = std::min(known.tokens.size(), tokens.size());
  while (n < static_cast<int64_t>(most) && known.tokens[n] == tokens[n] &&
         adapter(known.space, n) == adapter(space, n)) {
    const bool begins = !adapter(known.space, n).empty();
    if (begins && known.space.active_from != space.active_from) break;
    ++n;
  }
  return n;
}

struct Oracle {
  std::vector<Known> all;

  int64_t deepest(const Ids& tokens, const Namespace& space,
                  const std::optional<std::string>& route) const {
    int64_t best = 0;
    for (const Known& known : all) {
      if (route && known.make.route != *route) continue;
      const int64_t most = std::min(shared(known, tokens, space),
                                    static_cast<int64_t>(tokens.size()) - 1);
      if (!known.make.states) best = std::max(best, most);
      for (const int64_t position : known.make.positions) {
        if (known.make.states && position <= most) {
          best = std::max(best, position);
        }
      }
    }
    return best;
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t below(int64_t n) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n));
  }
  // Few distinct tokens, so that texts share beginnings and branch anywhere.
  Ids tokens() {
    Ids tokens(static_cast<size_t>(1 + below(24)));
    for (int64_t& token : tokens) token = below(8) == 0 ? below(3) : 1;
    return tokens;
  }
  Namespace space() {
    Namespace space{.model = below(4) == 0 ? "m" : "",
                    .tenant = below(3) == 0 ? "t" : ""};
    if (below(2) == 0) {
      space.adapter = below(2) == 0 ? "red" : "blue";
      space.active_from = below(12);
    }
    return space;
  }
  std::string route() { return below(2) == 0 ? "x" : ""; }
  Make make(int64_t n, bool states) {
    Make make{.states = states, .parts = 2, .route = route(), .state_size = 1};
    for (int64_t position = 1; position < n; ++position) {
      if (below(4) == 0) make.positions.push_back(position);
    }
    make.positions.push_back(n);
    if (!states) make.positions = {n};
    return make;
  }

 private:
  std::mt19937 engine_;
};

// What the memory must be of: adapters are part of it, but only where they run.
std::string world_of(const Namespace& space, int64_t position) {
  std::string world = space.tenant + "|" + space.model;
  if (!space.adapter.empty() && position > space.active_from) {
    world += "|" + space.adapter + std::to_string(space.active_from);
  }
  return world;
}

// The world of each position in place of one for all.
StoredText text_in(const Ids& tokens, Make make, const Namespace& space) {
  StoredText text = text_of(tokens, make);
  for (int64_t part = 0; part < make.parts; ++part) {
    for (auto& block : text.parts[part].blocks) {
      auto own = std::make_shared<KvBlock>(*block);
      own->kv[0] = {own->kv[0].k.clone(), own->kv[0].v.clone()};
      for (int64_t t = 0; t < own->tokens; ++t) {
        const int64_t position = own->first + t + 1;
        make.world = world_of(space, position);
        own->kv[0].k.select(1, t).fill_(
            stands_for(tokens, position, what_of(make, part)));
      }
      block = own;
    }
    for (auto& point : text.parts[part].points) {
      make.world = world_of(space, point->position);
      point = std::make_shared<const RestorePoint>(RestorePoint{
          .position = point->position,
          .conv = {},
          .state = values(
              1, stands_for(tokens, point->position, what_of(make, part)))});
    }
  }
  return text;
}

std::string wrong_world(const Hit& hit, const Ids& tokens, Make make,
                        const Namespace& space) {
  if (hit.text == nullptr) return "";
  const StoredText expected = text_in(first(tokens, hit.position), make, space);
  for (size_t part = 0; part < expected.parts.size(); ++part) {
    int64_t end = 0;
    for (const auto& block : hit.text->parts[part].blocks) {
      for (int64_t t = 0; t < block->tokens && end < hit.position; ++t, ++end) {
        make.world = world_of(space, end + 1);
        const float k = value_of(block->kv[0].k.select(1, t));
        if (k != stands_for(tokens, end + 1,
                            what_of(make, static_cast<int64_t>(part)))) {
          return "K of token " + std::to_string(end);
        }
      }
    }
    make.world = world_of(space, hit.position);
    for (const auto& point : hit.text->parts[part].points) {
      if (point->position == hit.position &&
          value_of(point->state) !=
              stands_for(tokens, hit.position,
                         what_of(make, static_cast<int64_t>(part)))) {
        return "a state";
      }
    }
  }
  return "";
}

// 1,000 random puts and lookups: the position is the one that a search through
// a list finds, and what is restored is of those tokens, namespace and route.
TEST(StoreOracle, FindsWhatAListFinds) {
  for (const bool states : {true, false}) {
    Random random(states ? 1 : 2);
    CheckpointStore store(plenty());
    Oracle oracle;
    for (int i = 0; i < 1000; ++i) {
      SCOPED_TRACE(i);
      const Ids tokens = random.tokens();
      const Namespace space = random.space();
      if (random.below(3) == 0) {
        const Make make =
            random.make(static_cast<int64_t>(tokens.size()), states);
        store.put(request_of(tokens, make, space),
                  [&] { return text_in(tokens, make, space); });
        oracle.all.push_back({tokens, space, make});
        continue;
      }
      std::optional<std::string> route;
      if (random.below(2) == 0) route = random.route();
      const Hit hit = look(store, tokens, space, route);
      if (hit.report.reason != ReuseReason::kTooShort) {
        ASSERT_EQ(hit.position, oracle.deepest(tokens, space, route));
      }
      const Make of{
          .states = states, .parts = 2, .route = hit.report.route.value_or("")};
      ASSERT_EQ(wrong_world(hit, tokens, of, space), "");
      ASSERT_GE(hit.report.matched, hit.position);
    }
    EXPECT_THAT(store.validate(), IsEmpty());
    EXPECT_GT(store.stats().hits + store.stats().partial, 100);
  }
}

// The same with room for little: whatever went, in whatever order, a hit is of
// its own tokens, namespace and route, and the tree stays sound.
TEST(StoreOracle, EvictionsLeaveNoWrongMemory) {
  Random random(3);
  for (const bool states : {true, false}) {
    StoreOptions options = plenty();
    options.max_bytes = 3000;
    CheckpointStore store(options);
    for (int i = 0; i < 1500; ++i) {
      SCOPED_TRACE(i);
      const Ids tokens = random.tokens();
      const Namespace space = random.space();
      if (random.below(100) == 0) store.invalidate_route(random.route());
      if (random.below(100) == 0) store.invalidate_namespace(space);
      if (random.below(2) == 0) {
        const Make make =
            random.make(static_cast<int64_t>(tokens.size()), states);
        store.put(request_of(tokens, make, space),
                  [&] { return text_in(tokens, make, space); });
      } else {
        const Hit hit = look(store, tokens, space, std::nullopt);
        const Make of{.states = states,
                      .parts = 2,
                      .route = hit.report.route.value_or("")};
        ASSERT_EQ(wrong_world(hit, tokens, of, space), "");
      }
      if (i % 50 == 0) {
        ASSERT_THAT(store.validate(), IsEmpty());
      }
    }
    EXPECT_THAT(store.validate(), IsEmpty());
    EXPECT_GT(store.stats().evicted, 100);
  }
}

}  // namespace
}  // namespace kvcache::fake
