// Every refusal of the cache interface, word for word; after each of them
// nothing has changed.
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/toy_steps.h"

namespace kvcache::toy {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

// Two rows of a model with layers 7 (recurrent), 8 (attention), 9 and 10.
class ErrorsTest : public testing::TestWithParam<size_t> {
 protected:
  ErrorsTest() : model(make_model(Variant::kHybrid)) {
    model.first_layer = 7;
    cache = kinds()[GetParam()].make(spec_of(model, 2, 6));
    if (PreallocatedCache* in_place = preallocated(*cache)) {
      in_place->reserve(6);  // a step that begins may grow a growing one
    }
    feed(*cache, model, {{1, 2, 3}, {4, 5}});
    cache->mark();
    held = picture(*cache);
    epoch = cache->address_epoch();
  }
  ~ErrorsTest() override {
    EXPECT_EQ(picture(*cache), held);
    EXPECT_EQ(cache->address_epoch(), epoch);
    EXPECT_EQ(cache->validate(), std::vector<std::string>{});
    const std::vector<Floats> got = feed(*cache, model, {{6}, {7}});
    EXPECT_EQ(got[0], last_of(*cache, model, {1, 2, 3, 6}, 1));
    EXPECT_EQ(got[1], last_of(*cache, model, {4, 5, 7}, 1));
  }
  template <typename Call>
  void refuses(const Call& call, const std::string& text) {
    EXPECT_EQ(error_of(call), text);
    EXPECT_EQ(cache->lengths()[0], 3);
    EXPECT_EQ(cache->lengths()[1], 2);
  }
  void refuses_step(const StepSpec& spec, const std::string& text) {
    refuses([&] { Step step = cache->begin_step(spec); }, text);
  }

  Model model;
  std::unique_ptr<Cache> cache;
  std::string held;
  uint64_t epoch = 0;
};

INSTANTIATE_TEST_SUITE_P(EveryKind, ErrorsTest,
                         testing::Range(size_t{0}, kinds().size()),
                         [](const auto& info) {
                           return kinds()[info.param].name;
                         });

TEST_P(ErrorsTest, BeginStep) {
  refuses_step({.tokens = 0},
               "[Cache::begin_step] tokens must be >= 1 but got 0; a step has "
               "at least one token.");
  refuses_step({.first_row = 2},
               "[Cache::begin_step] rows must lie in [0, 2) but got 0 from row "
               "2; fix first_row and rows.");
  refuses_step({.first_row = -1, .rows = 1},
               "[Cache::begin_step] rows must lie in [0, 2) but got 1 from row "
               "-1; fix first_row and rows.");
  refuses_step({.first_row = kLeast},
               "[Cache::begin_step] rows must lie in [0, 2) but got 0 from row "
               "-9223372036854775808; fix first_row and rows.");
  refuses_step({.first_row = 1, .rows = 2},
               "[Cache::begin_step] rows must lie in [0, 2) but got 2 from row "
               "1; fix first_row and rows.");
  refuses_step({.rows = 0},
               "[Cache::begin_step] rows must lie in [0, 2) but got 0 from row "
               "0; fix first_row and rows.");
  const std::vector<int64_t> three(3, 1);
  refuses_step({.count = three},
               "[Cache::begin_step] count must have one entry per row, 2, but "
               "got 3; leave it empty for the default.");
  refuses_step({.skip = three},
               "[Cache::begin_step] skip must have one entry per row, 2, but "
               "got 3; leave it empty for the default.");
}

TEST_P(ErrorsTest, LiveRange) {
  const auto text = [](const std::string& numbers) {
    return "[Cache::begin_step] row 1: skip + count must be within 2 tokens "
           "but got " +
           numbers + "; the live range lies inside the step.";
  };
  const auto with = [&](int64_t skip, int64_t count, const std::string& got) {
    const std::vector<int64_t> skips{0, skip}, counts{0, count};
    refuses_step({.tokens = 2, .skip = skips, .count = counts}, text(got));
  };
  with(1, 2, "1 + 2");
  with(-1, 1, "-1 + 1");
  with(0, -1, "0 + -1");
  with(kLeast, 0, "-9223372036854775808 + 0");
  with(1, kMost, "1 + 9223372036854775807");
  const std::vector<int64_t> skips{0, 3};
  refuses_step({.tokens = 2, .skip = skips}, text("3 + -1"));
}

TEST_P(ErrorsTest, Overflow) {
  refuses_step({.tokens = 4},
               "[Cache::begin_step] row 0 would need slots [3, 7) but capacity "
               "is 6; truncate() first or raise CacheSpec::capacity.");
  const std::vector<int64_t> counts{0, 5};
  refuses_step({.tokens = 5, .count = counts},
               "[Cache::begin_step] row 1 would need slots [2, 7) but capacity "
               "is 6; truncate() first or raise CacheSpec::capacity.");
  // Padding counts too: no size may wrap.
  const std::vector<int64_t> one{1, 1};
  refuses_step({.tokens = kMost, .count = one},
               "[Cache::begin_step] tokens must be <= 192153584101141162 for 2 "
               "rows but got 9223372036854775807; padding counts too.");
}

TEST_P(ErrorsTest, LayersOfAStep) {
  Step step = cache->begin_step();
  const auto k = at::zeros({2, 2, 1, 4});
  refuses([&] { step.update(6, k, k); },
          "[Step::update] layer must be in [7, 11) but got 6; this cache holds "
          "no other layers.");
  refuses([&] { step.reserve(11); },
          "[Step::reserve] layer must be in [7, 11) but got 11; this cache "
          "holds no other layers.");
  refuses([&] { step.update(7, k, k); },
          "[Step::update] layer 7 must be an attention layer but is a "
          "recurrent one; only attention layers keep K and V.");
  refuses([&] { step.reserve(7); },
          "[Step::reserve] layer 7 must be an attention layer but is a "
          "recurrent one; only attention layers keep K and V.");
  refuses([&] { step.state(8); },
          "[Step::state] layer 8 must be a recurrent layer but is an attention "
          "one; only recurrent layers carry a state.");
  refuses([&] { step.extend_conv(8, k); },
          "[Step::extend_conv] layer 8 must be a recurrent layer but is an "
          "attention one; only recurrent layers carry a state.");
  step.update(8, k, k);
  refuses([&] { step.update(8, k, k); },
          "[Step::reserve] layer 8 must be written once a step but is written "
          "again; commit() ends a step.");
  refuses([&] { step.reserve(8); },
          "[Step::reserve] layer 8 must be written once a step but is written "
          "again; commit() ends a step.");
  step.state(7);
  refuses([&] { step.state(7); },
          "[Step::state] layer 7 must be asked for once a step but is asked "
          "for again; keep the reference.");
  const auto x = at::zeros({2, kChannels, 1});
  step.extend_conv(7, x);
  refuses([&] { step.extend_conv(7, x); },
          "[Step::extend_conv] layer 7 must be extended once a step but is "
          "extended again; keep the result.");
  refuses([&] { step.commit(); },
          "[Step::commit] every layer must be written but layer 9 was left "
          "out; write it, or drop the step.");
}

TEST_P(ErrorsTest, TensorsOfAStep) {
  Step step = cache->begin_step({.tokens = 3});
  const auto good = at::zeros({2, 2, 3, 4});
  const auto shape_error = [&](const std::string& name,
                               const std::string& got) {
    return "[Step::update] layer 8: " + name +
           " must be [2, 2, 3, 4] float32 on cpu but got " + got +
           "; pass the step's keys and values.";
  };
  const auto bad = [&](const Tensor& t, const std::string& got) {
    refuses([&] { step.update(8, t, good); }, shape_error("k", got));
    refuses([&] { step.update(8, good, t); }, shape_error("v", got));
  };
  bad(at::zeros({1, 2, 3, 4}), "[1, 2, 3, 4] float32 on cpu");
  bad(at::zeros({2, 1, 3, 4}), "[2, 1, 3, 4] float32 on cpu");
  bad(at::zeros({2, 2, 1, 4}), "[2, 2, 1, 4] float32 on cpu");
  bad(at::zeros({2, 2, 3, 8}), "[2, 2, 3, 8] float32 on cpu");
  bad(at::zeros({2, 6, 4}), "[2, 6, 4] float32 on cpu");
  bad(at::zeros({2, 2, 3, 4}, at::TensorOptions(at::kMeta)),
      "[2, 2, 3, 4] float32 on meta");
  bad(Tensor(), "an undefined tensor");
  const auto half = at::zeros({2, 2, 3, 4}, at::kBFloat16);
  refuses([&] { step.update(8, half, good); },
          "[Step::update] layer 8: cache holds float32, got bfloat16 in k; "
          "convert it or set CacheSpec::dtype.");
  refuses([&] { step.update(8, good, half); },
          "[Step::update] layer 8: cache holds float32, got bfloat16 in v; "
          "convert it or set CacheSpec::dtype.");
  refuses(
      [&] {
        step.extend_conv(7, at::zeros({2, kChannels, 2}));
      },
      "[Step::extend_conv] layer 7: x must be [2, 8, 3] float32 on cpu but "
      "got [2, 8, 2] float32 on cpu; pass the step's convolution inputs.");
  refuses(
      [&] {
        step.extend_conv(7, at::zeros({2, kChannels, 3}, at::kHalf));
      },
      "[Step::extend_conv] layer 7: x must be [2, 8, 3] float32 on cpu but got "
      "[2, 8, 3] float16 on cpu; pass the step's convolution inputs.");
}

// A write that throws leaves its layer out: a commit cannot pass over it.
TEST_P(ErrorsTest, AWriteThatThrowsLeavesTheLayerOut) {
  Step step = cache->begin_step();
  const auto good = at::zeros({2, 2, 1, 4});
  EXPECT_NE(error_of([&] { step.update(8, good.to_sparse(), good); }), "");
  refuses([&] { step.commit(); },
          "[Step::commit] every layer must be written but layer 7 was left "
          "out; write it, or drop the step.");
  step.state(7);
  refuses([&] { step.commit(); },
          "[Step::commit] every layer must be written but layer 8 was left "
          "out; write it, or drop the step.");
}

TEST_P(ErrorsTest, VerbsInAStep) {
  const Checkpoint saved = cache->checkpoint(0);
  Step step = cache->begin_step({.tokens = 2});
  const std::vector<int64_t> two{0, 1};
  const auto busy = [&](const std::string& verb, const auto& call) {
    refuses(call, "[Cache::" + verb +
                      "] no step may be open but one of 2 tokens is; commit() "
                      "or destroy it first.");
  };
  busy("begin_step", [&] { Step second = cache->begin_step(); });
  busy("truncate", [&] { cache->truncate(1); });
  busy("truncate", [&] { cache->truncate(two); });
  busy("drop_last", [&] { cache->drop_last(1); });
  busy("mark", [&] { cache->mark(); });
  busy("mark", [&] { cache->mark(0); });
  busy("reset", [&] { cache->reset(); });
  busy("reset", [&] { cache->reset(0); });
  busy("reorder", [&] { cache->reorder(two); });
  busy("repeat_rows", [&] { cache->repeat_rows(2); });
  busy("fork", [&] { cache->fork(); });
  busy("checkpoint", [&] { cache->checkpoint(0); });
  busy("restore", [&] { cache->restore(saved, 0); });
  busy("export_kv", [&] { cache->export_kv(8); });
  busy("import_kv", [&] { cache->import_kv({}, two); });
  if (PreallocatedCache* in_place = preallocated(*cache)) {
    busy("reserve", [&] { in_place->reserve(6); });
  }
}

TEST_P(ErrorsTest, ArgumentsOfVerbs) {
  refuses([&] { cache->fits(-1); },
          "[Cache::fits] tokens must be >= 0 but got -1; ask for the tokens of "
          "a step.");
  refuses([&] { cache->truncate(std::vector<int64_t>{1}); },
          "[Cache::truncate] lengths must have one entry per row, 2, but got "
          "1; pass a length for every row.");
  refuses(
      [&] {
        cache->truncate(std::vector<int64_t>{0, -1});
      },
      "[Cache::truncate] the length of row 1 must be >= 0 but got -1; use "
      "drop_last() to count from the end.");
  refuses([&] { cache->truncate(-3); },
          "[Cache::truncate] the length of row 0 must be >= 0 but got -3; use "
          "drop_last() to count from the end.");
  refuses([&] { cache->drop_last(-1); },
          "[Cache::drop_last] tokens must be >= 0 but got -1; use truncate() "
          "to give a length.");
  refuses([&] { cache->reorder({}); },
          "[Cache::reorder] rows must name at least one row but got none; "
          "reset() empties a cache.");
  refuses(
      [&] {
        cache->reorder(std::vector<int64_t>{0, 2});
      },
      "[Cache::reorder] row must be in [0, 2) but got 2; use a row of this "
      "cache.");
  refuses([&] { cache->repeat_rows(0); },
          "[Cache::repeat_rows] times must be in [1, 8388608] but got 0; every "
          "row is "
          "kept at least once.");
  const auto no_row = [&](const std::string& verb, const auto& call) {
    for (const int64_t row : {int64_t{-1}, int64_t{2}, kMost, kLeast}) {
      refuses([&] { call(row); },
              "[Cache::" + verb + "] row must be in [0, 2) but got " +
                  std::to_string(row) + "; use a row of this cache.");
    }
  };
  const Checkpoint saved = cache->checkpoint(0);
  no_row("mark", [&](int64_t row) { cache->mark(row); });
  no_row("reset", [&](int64_t row) { cache->reset(row); });
  no_row("checkpoint", [&](int64_t row) { cache->checkpoint(row); });
  no_row("restore", [&](int64_t row) { cache->restore(saved, row); });
  no_row("reorder",
         [&](int64_t row) { cache->reorder(std::vector<int64_t>{row}); });
  refuses([&] { cache->export_kv(7); },
          "[Cache::export_kv] layer 7 must be an attention layer but is a "
          "recurrent one; only attention layers keep K and V.");
  refuses([&] { cache->export_kv(11); },
          "[Cache::export_kv] layer must be in [7, 11) but got 11; this cache "
          "holds no other layers.");
  refuses(
      [&] {
        cache->import_kv({}, std::vector<int64_t>{0, 0});
      },
      "[Cache::import_kv] only attention layers can be imported but this "
      "cache has 2 recurrent ones; use restore().");
  if (PreallocatedCache* in_place = preallocated(*cache)) {
    refuses([&] { in_place->reserve(7); },
            "[PreallocatedCache::reserve] tokens must be in [0, 6] but got 7; "
            "raise CacheSpec::capacity.");
    refuses([&] { in_place->reserve(-1); },
            "[PreallocatedCache::reserve] tokens must be in [0, 6] but got -1; "
            "raise CacheSpec::capacity.");
  }
}

TEST_P(ErrorsTest, ClosedSteps) {
  const std::string text =
      "[Step] the step must be open but it was committed or moved from; call "
      "Cache::begin_step() for a new one.";
  Step step = cache->begin_step();
  const Step moved = std::move(step);
  const auto k = at::zeros({2, 2, 1, 4});
  refuses([&] { step.rows(); }, text);
  refuses([&] { step.tokens(); }, text);
  refuses([&] { step.positions(); }, text);
  refuses([&] { step.limits(); }, text);
  refuses([&] { step.live(0, 0); }, text);
  refuses([&] { step.update(8, k, k); }, text);
  refuses([&] { step.reserve(8); }, text);
  refuses([&] { step.state(7); }, text);
  refuses([&] { step.extend_conv(7, k); }, text);
  refuses([&] { step.commit(); }, text);
}

}  // namespace
}  // namespace kvcache::toy
