// choice_runner.h: a warm answer is the stateless one bit for bit, whatever was
// reused, guessed or evicted. Names are the lines of the behaviour that they
// pin down.
#include "kvcache/model/choice_runner.h"

#include <ATen/ops/equal.h>

#include "tests/model/generate/choice_fixture.h"

namespace kvcache::model {
namespace {

using testing::HasSubstr;
using toy::error_of;

Tokens head(const Tokens& ids, size_t count) {
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count)};
}
Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The next request of a trace: what agents send, and what breaks caches.
ChoiceRequest next_request(std::mt19937& random, std::vector<Tokens>& states) {
  const auto below = [&](size_t most) { return random() % most; };
  Tokens state = states[below(states.size())];
  switch (below(5)) {
    case 0:
      state = random_ids(random, 1 + below(38));
      break;
    case 1:  // grows at its end
      state = joined(state, random_ids(random, 1 + below(5)));
      break;
    case 2:  // an edit in its middle
      state[below(state.size())] = static_cast<int64_t>(below(8));
      break;
    case 3:
      state.resize(1 + below(state.size()));
      break;
    default:
      break;
  }
  state.resize(std::min<size_t>(state.size(), 46));
  states.push_back(state);
  ChoiceRequest request = ask(state, random_ids(random, 1 + below(16)));
  const auto n = static_cast<int64_t>(request.ids.size());
  while (below(3) == 0 && request.slots.size() < 3) {
    request.slots.push_back(n - 1 - static_cast<int64_t>(below(2)));
    request.option_counts.push_back(1 + static_cast<int64_t>(below(5)));
  }
  request.slots[0] = std::max<int64_t>(request.state_len, request.slots[0]);
  if (below(4) == 0) request.space.tenant = "other";
  if (below(6) == 0) request.route = static_cast<int64_t>(below(3));
  return request;
}

void run_trace(unsigned seed, const ToyRouted& with, ChoiceOptions options,
               size_t bytes) {
  Bench bench(std::move(options), with, bytes);
  std::mt19937 random(seed);
  std::vector<Tokens> states = {random_ids(random, 20)};
  int64_t rows = 0, plain = 0, reused = 0;
  for (int i = 0; i < 120 && !testing::Test::HasFailure(); ++i) {
    ChoiceRequest request = next_request(random, states);
    if (!with.has_router) request.route.reset();
    const ChoiceResult result = bench.answer(request);
    ++(result.reuse == ReuseClass::kNone ? plain : rows);
    const LookupReport& report = result.report;
    EXPECT_EQ(report.restored + report.computed,
              static_cast<int64_t>(request.ids.size()));
    if (report.restored > 0) {  // never what another route left
      EXPECT_EQ(*report.route,
                result.route == 0 ? "" : std::to_string(result.route));
    }
    reused += report.restored;
    EXPECT_LE(bench.store->stats().used_bytes, bytes);
  }
  const ChoiceInfo info = bench.runner.info();
  EXPECT_EQ(info.store.rows, rows);
  EXPECT_EQ(info.store.hits + info.store.partial + info.store.cold, rows);
  EXPECT_EQ(info.store.tokens_reused, reused);
  EXPECT_EQ(info.plain, plain);
  EXPECT_GT(reused, 150);
  EXPECT_THAT(info.failed, testing::IsEmpty());
}

// D1, D2, D6, D11, D12: any mixture of states, routes, tenants and padding;
// with align 1 and tail 1 chunks are shorter than the convolution.
TEST(ChoiceRunner, WarmEqualsStateless) {
  ChoiceOptions fine = small_choices();
  fine.align = fine.tail = 1;
  for (const bool hybrid : {true, false}) {
    run_trace(1, {.hybrid = hybrid}, small_choices(), 1 << 22);
    run_trace(2, {.hybrid = hybrid}, fine, 1 << 22);
    run_trace(3, {.routes = {}, .has_router = false, .hybrid = hybrid}, fine,
              1 << 22);
  }
}

// D10: the same while entries go; the bound holds.
TEST(ChoiceRunner, EvictionsChangeNoAnswer) {
  run_trace(4, {}, small_choices(), 24 << 10);
  run_trace(5, {.hybrid = false}, small_choices(), 24 << 10);
}

// D1: [0, p) is reused, [p, n) always computed; classes by p.
TEST(ChoiceRunner, ClassesOfReuse) {
  Bench bench(small_choices(), {.routes = {}, .has_router = false});
  std::mt19937 random(1);
  const Tokens state = random_ids(random, 21);  // p = 20
  EXPECT_EQ(bench.answer(ask(state, {1, 2, 3})).reuse, ReuseClass::kCold);
  const ChoiceResult hit = bench.answer(ask(state, {3, 2}));
  EXPECT_EQ(hit.reuse, ReuseClass::kHit);
  EXPECT_EQ(hit.report.restored, 20);
  EXPECT_EQ(hit.report.computed, 3);
  const ChoiceResult grown =
      bench.answer(ask(joined(head(state, 20), {5, 6, 7}), {1}));
  EXPECT_EQ(grown.reuse, ReuseClass::kPartial);
  EXPECT_EQ(grown.report.restored, 20);
  const ReuseCounts counts = bench.store->stats();
  EXPECT_EQ(counts.hits, 1);
  EXPECT_EQ(counts.partial, 1);
  EXPECT_EQ(counts.cold, 1);
  EXPECT_EQ(counts.tokens_reused, 40);
  EXPECT_EQ(counts.tokens_computed, 24 + 3 + 4);
}

// D2: strides, the tail from the unrounded length, the end, cuts of long gaps.
TEST(ChoiceRunner, ChunkEndsAreCheckpoints) {
  std::mt19937 random(1);
  const auto made = [&](ChoiceOptions options, size_t state) {
    Bench bench(std::move(options), {.routes = {}, .has_router = false});
    bench.answer(ask(random_ids(random, state), {1}));
    return bench.store->stats().ckpts_made;
  };
  ChoiceOptions options = small_choices();
  EXPECT_EQ(made(options, 21), 4);  // 8 16 18 20
  EXPECT_EQ(made(options, 20), 4);  // 8 16 18 20
  options.tail = 3;
  EXPECT_EQ(made(options, 18), 4);  // 8 14 16 18: down(18 - 3)
  options.stride = options.tail = 0;
  options.lengths = {4, 8};
  EXPECT_EQ(made(options, 20), 3);  // 8 16 20
  options.stride = 3;
  EXPECT_THAT(error_of([&] { Bench bench(options); }),
              HasSubstr("stride must be a multiple of align, 2, but got 3"));
}

// D3: each refusal has its reason, and the plain path the same answer.
TEST(ChoiceRunner, IneligibleRequestsSayWhy) {
  using enum ChoiceRefusal;
  Bench bench;
  std::mt19937 random(1);
  const auto refusal = [&](const ChoiceRequest& request) {
    EXPECT_EQ(bench.runner.eligible(request), bench.answer(request).refusal);
    return bench.runner.eligible(request);
  };
  const Tokens state = random_ids(random, 20);
  ChoiceRequest request = ask(state, {1, 2, 3});
  EXPECT_EQ(refusal(request), kNone);
  request.state_len = 0;
  EXPECT_EQ(refusal(request), kNoStateLength);
  EXPECT_EQ(refusal(ask(head(state, 3), {1})), kTooShort);
  request = ask(state, {1, 2, 3});
  request.slots = {20, 21, 22, 22};
  request.option_counts = {2, 2, 2, 2};
  EXPECT_EQ(refusal(request), kSlotCount);
  request.slots = {22, 19};
  request.option_counts = {2, 2};
  EXPECT_EQ(refusal(request), kSlotInState);
  EXPECT_EQ(refusal(ask(state, random_ids(random, 17))), kSuffixTooLong);
  EXPECT_EQ(refusal(ask(random_ids(random, 60), random_ids(random, 5))),
            kTooLong);
  request = ask(state, {1});
  request.images = true;  // nobody answers it from tokens
  EXPECT_EQ(bench.runner.eligible(request), kImages);
  EXPECT_TRUE(bench.runner.answer(request).probabilities.empty());
  bench.store->set_max_bytes(0);
  EXPECT_EQ(refusal(ask(state, {1})), kDisabled);
  EXPECT_EQ(bench.store->stats().rows, 1);
  EXPECT_EQ(to_string(kSlotInState), "an answer slot lies in the state");
}

// D4: a router that cannot be continued disables all of it.
TEST(ChoiceRunner, RoutersThatCannotBeContinued) {
  const ChoiceRequest request = ask(Tokens(12, 1), {1});
  Bench above(small_choices(), {.router = {.layer = 3}});
  EXPECT_EQ(above.runner.answer(request).refusal, ChoiceRefusal::kRouterAbove);
  Bench others(small_choices(), {.router = {.layer = 1, .normalised = false}});
  EXPECT_EQ(others.runner.answer(request).refusal,
            ChoiceRefusal::kRouterFeatures);
  EXPECT_EQ(others.model->lower_calls, 0);
}

// D5: asked only when nothing was found; false leaves no trace.
TEST(ChoiceRunner, ColdRequestsCanBeRefused) {
  ChoiceOptions options = small_choices();
  int asked = 0;
  bool ok = false;
  options.cold_ok = [&] {
    ++asked;
    return ok;
  };
  Bench bench(options, {.routes = {}, .has_router = false});
  const ChoiceRequest request = ask(Tokens(12, 1), {1, 2});
  EXPECT_EQ(bench.answer(request).refusal, ChoiceRefusal::kColdNotWanted);
  EXPECT_EQ(bench.store->stats().rows, 0);
  EXPECT_EQ(bench.runner.info().captures, 0);
  ok = true;
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kCold);
  ok = false;
  EXPECT_EQ(bench.answer(request).reuse, ReuseClass::kHit);
  EXPECT_EQ(asked, 2);
}

// D6: the first guess is no adapter, then the last route; right guesses run
// each layer once a chunk.
TEST(ChoiceRunner, GuessesOfTheRoute) {
  Bench bench;
  const Tokens state = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6};
  EXPECT_EQ(bench.runner.last_route(), 0);
  const ChoiceResult wrong = bench.answer(bench.routed(state, 2));
  EXPECT_TRUE(wrong.guessed_wrong);
  EXPECT_EQ(wrong.reuse, ReuseClass::kCold);
  EXPECT_EQ(bench.runner.last_route(), 2);
  // The wrong pass left nothing.
  EXPECT_EQ(
      bench.store->lookup({.tokens = state, .route = "", .limit = 12}).position,
      0);
  bench.model->lower_calls = bench.model->upper_calls = 0;
  const ChoiceResult right = bench.answer(bench.routed(state, 2, 1));
  EXPECT_FALSE(right.guessed_wrong);
  EXPECT_EQ(right.reuse, ReuseClass::kHit);
  EXPECT_LE(bench.model->upper_calls, 2);  // a recording and a replay
  // Another state without a checkpoint: the last route is the guess.
  const ChoiceResult other = bench.answer(
      bench.routed(random_ids(*std::make_unique<std::mt19937>(9), 10), 2));
  EXPECT_FALSE(other.guessed_wrong);
  EXPECT_EQ(other.reuse, ReuseClass::kCold);
}

// D6: both passes start from the true route's deepest checkpoint; the row is
// counted once, its class from the first lookup, its tokens from the answer.
TEST(ChoiceRunner, WrongGuessesStartFromTheTrueRoute) {
  Bench bench;
  const Tokens state = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6, 3, 0};
  bench.answer(bench.routed(state, 1));
  const StoreStats before = bench.store->stats();
  const ChoiceRequest request = bench.routed(state, 2);
  const ChoiceResult second = bench.answer(request);  // route 1 is the guess
  EXPECT_TRUE(second.guessed_wrong);
  EXPECT_EQ(second.reuse, ReuseClass::kHit);
  EXPECT_EQ(second.report.restored, 0);
  StoreStats after = bench.store->stats();
  EXPECT_EQ(after.rows, before.rows + 1);
  EXPECT_EQ(after.hits, before.hits + 1);
  EXPECT_EQ(after.mispredict, before.mispredict + 1);
  EXPECT_EQ(after.tokens_reused, before.tokens_reused);
  EXPECT_EQ(after.tokens_computed,
            before.tokens_computed + static_cast<int64_t>(request.ids.size()));
  // Route 1 once more: the guess may be either, the answer starts at its own.
  const ChoiceResult third = bench.answer(bench.routed(state, 1, 3));
  EXPECT_EQ(third.report.restored, 14);
  EXPECT_EQ(*third.report.route, "1");
  // A longer state of route 2, and route 1 goes on from the shorter one.
  const Tokens longer = joined(state, {3, 5, 1, 2});
  bench.answer(bench.routed(longer, 2));
  const ChoiceResult fourth = bench.answer(bench.routed(longer, 1));
  EXPECT_TRUE(fourth.guessed_wrong);
  EXPECT_EQ(fourth.reuse, ReuseClass::kHit);
  EXPECT_EQ(fourth.report.restored, 14);
  // What lies below the split is kept once for both routes.
  EXPECT_LT(bench.store->stats().used_bytes, 2 * before.used_bytes * 3 / 2);
}

// D6: the wrong pass touches no entry: what it started from goes first.
TEST(ChoiceRunner, WrongGuessesRefreshNothing) {
  Bench bench;
  const Tokens guessed = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6, 3, 0};
  const Tokens other = {5, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6, 3, 0};
  bench.answer(bench.routed(guessed, 1));
  bench.answer(bench.routed(other, 1));
  bench.answer(bench.routed(guessed, 2));  // guesses route 1 from `guessed`
  const auto deepest = [&](const Tokens& state) {
    return bench.store
        ->lookup({.tokens = state, .route = "1", .limit = 14, .deferred = true})
        .position;
  };
  size_t bytes = bench.store->stats().used_bytes;
  while (deepest(guessed) == 14 && deepest(other) == 14 && bytes > 100) {
    bench.store->set_max_bytes(bytes -= 100);
  }
  EXPECT_LT(deepest(guessed), 14);
  EXPECT_EQ(deepest(other), 14);
}

// D6: a route that is not loaded is a typed error, and nothing has changed.
TEST(ChoiceRunner, RoutesThatAreNotLoaded) {
  Bench bench(small_choices(), {.routes = {1}});
  const Tokens state = {1, 4, 2, 6, 0, 3, 7, 5, 2, 2, 1, 6};
  const ChoiceRequest request = bench.routed(state, 2);
  EXPECT_THROW(bench.runner.answer(request), c10::IndexError);
  EXPECT_THAT(error_of([&] { bench.runner.answer(request); }),
              HasSubstr("route 2 must be loaded but the model has [1]; load"));
  EXPECT_EQ(bench.runner.last_route(), 0);
  EXPECT_EQ(bench.store->stats().rows, 0);
  EXPECT_EQ(bench.store->stats().checkpoints, 0);
  ChoiceRequest pinned = request;
  pinned.route = 1;  // not the router's
  EXPECT_EQ(bench.answer(pinned).route, 1);
  pinned.route = 2;
  EXPECT_THROW(bench.runner.answer(pinned), c10::IndexError);
}

// D7: the sum does not depend on cuts, and padding is not in it.
TEST(ChoiceRunner, RouterFeaturesContinue) {
  const toy::Floats numbers = toy::make_model(toy::Variant::kHybrid).embedding;
  Tensor hidden = at::zeros({1, 8, toy::kWidth}, at::kFloat);
  std::copy(numbers.begin(), numbers.end(), hidden.data_ptr<float>());
  Tensor limits = at::zeros({1, 8}, at::kLong);
  for (int64_t t = 0; t < 7; ++t) limits.data_ptr<int64_t>()[t] = t + 1;
  hidden.select(1, 7).fill_(std::numeric_limits<float>::quiet_NaN());
  const Tensor whole = at::zeros({toy::kWidth}, at::kFloat);
  add_router_features(hidden, limits, 1e-6, whole);
  for (int64_t cut = 1; cut < 8; ++cut) {
    const Tensor parts = at::zeros({toy::kWidth}, at::kFloat);
    add_router_features(hidden.narrow(1, 0, cut), limits.narrow(1, 0, cut),
                        1e-6, parts);
    add_router_features(hidden.narrow(1, cut, 8 - cut),
                        limits.narrow(1, cut, 8 - cut), 1e-6, parts);
    EXPECT_TRUE(at::equal(parts, whole));
  }
  const float* sums = whole.const_data_ptr<float>();
  double squares = 0, first = 0;
  for (int64_t t = 0; t < 7; ++t) {
    squares = 0;
    for (int e = 0; e < toy::kWidth; ++e) {
      squares += std::pow(static_cast<double>(numbers[t * toy::kWidth + e]), 2);
    }
    first += numbers[t * toy::kWidth] / std::sqrt(squares / toy::kWidth + 1e-6);
  }
  EXPECT_NEAR(sums[0], first, 1e-5);  // float32 sums of seven numbers
}

// D13: slots in the order given, each over its own options.
TEST(ChoiceRunner, SlotsInTheirOrder) {
  Bench bench;
  ChoiceRequest request = ask(Tokens(8, 2), {1, 2, 3, 4});
  request.slots = {11, 9, 11};
  request.option_counts = {5, 1, 2};
  const auto probabilities = bench.answer(request).probabilities;
  ASSERT_EQ(probabilities.size(), 3U);
  EXPECT_EQ(probabilities[0].size(), 5U);
  EXPECT_EQ(probabilities[1], (std::vector<float>{1}));
  EXPECT_EQ(probabilities[2].size(), 2U);
  constexpr float kRounding = 1e-5F;  // of two divisions in float32
  EXPECT_NEAR(probabilities[2][0] / probabilities[2][1],
              probabilities[0][0] / probabilities[0][1], kRounding);
}

TEST(ChoiceRunner, WrongRequestsChangeNothing) {
  Bench bench;
  const ChoiceRequest good = ask(Tokens(8, 2), {1});
  const auto error = [&](const auto& change) {
    ChoiceRequest bad = good;
    change(bad);
    return error_of([&] { bench.runner.answer(bad); });
  };
  EXPECT_THAT(error([](auto& r) { r.slots = {9}; }),
              HasSubstr("slots must be in [0, 9) but one is 9"));
  EXPECT_THAT(error([](auto& r) { r.option_counts = {6}; }),
              HasSubstr("options must be 1 to 5, the letters, but got 6"));
  EXPECT_THAT(error([](auto& r) { r.option_counts = {}; }),
              HasSubstr("each of 1 slots must have a count"));
  EXPECT_THAT(error([](auto& r) { r.state_len = 10; }),
              HasSubstr("state_len must be in [0, 9] but got 10"));
  EXPECT_THAT(error([](auto& r) { r.ids[3] = 8; }),
              HasSubstr("ids must be in [0, 8) but one is 8"));
  EXPECT_EQ(bench.store->stats().rows, 0);
  EXPECT_EQ(bench.runner.info().plain, 0);
}

}  // namespace
}  // namespace kvcache::model
