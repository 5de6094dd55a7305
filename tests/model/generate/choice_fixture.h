// choice_fixture.h - small options, random requests and the answers that they
// must have.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "kvcache/model/choice_runner.h"
#include "tests/model/generate/toy_routed_model.h"
#include "tests/support/toy_steps.h"

namespace kvcache::model {

using Tokens = std::vector<int64_t>;

inline ChoiceOptions small_choices() {
  return {.letters = {0, 1, 2, 3, 4},
          .lengths = {4, 8, 16},
          .spans = {16, 32, 64},
          .min_prefix = 4,
          .max_slots = 3,
          .stride = 8,
          .tail = 2,
          .align = 2,
          .block = 4,
          .memo_entries = 0};
}

inline Tokens random_ids(std::mt19937& random, size_t count) {
  Tokens ids;
  while (ids.size() < count) {
    ids.push_back(static_cast<int64_t>(random() % toy::kVocabulary));
  }
  return ids;
}

inline ChoiceRequest ask(const Tokens& state, const Tokens& suffix) {
  ChoiceRequest request{.ids = state,
                        .state_len = static_cast<int64_t>(state.size())};
  request.ids.insert(request.ids.end(), suffix.begin(), suffix.end());
  request.slots = {static_cast<int64_t>(request.ids.size()) - 1};
  request.option_counts = {4};
  return request;
}

struct Bench {
  explicit Bench(ChoiceOptions with = small_choices(),
                 const ToyRouted& toy_with = {}, size_t bytes = 1 << 22)
      : options(std::move(with)),
        model(std::make_shared<ToyRoutedModel>(toy_with)),
        store(std::make_shared<CheckpointStore>(
            StoreOptions{.max_bytes = bytes, .min_prefix = 1})),
        runner(model, store, options) {}

  ToyRoutedModel::Answer expected(const ChoiceRequest& request) const {
    return model->stateless(request.ids, request.slots, request.option_counts,
                            options.letters, request.route);
  }
  // The answer, which must be the stateless one bit for bit.
  ChoiceResult answer(const ChoiceRequest& request) {
    const ChoiceResult result = runner.answer(request);
    const auto want = expected(request);
    EXPECT_EQ(result.route, want.route);
    EXPECT_EQ(result.probabilities, want.probabilities);
    EXPECT_EQ(store->validate(), std::vector<std::string>{});
    return result;
  }
  int64_t route_of(const ChoiceRequest& request) const {
    return expected(request).route;
  }
  // A request on `state` that the router sends to `route`.
  ChoiceRequest routed(const Tokens& state, int64_t route, unsigned seed = 0) {
    std::mt19937 random(seed);
    for (int i = 0; i < 200; ++i) {
      const auto request = ask(state, random_ids(random, 1 + random() % 12));
      if (route_of(request) == route) return request;
    }
    ADD_FAILURE() << "no suffix for route " << route;
    return ask(state, {1, 2, 3});
  }
  ChoiceOptions options;
  std::shared_ptr<ToyRoutedModel> model;
  std::shared_ptr<CheckpointStore> store;
  ChoiceRunner runner;
};

}  // namespace kvcache::model
