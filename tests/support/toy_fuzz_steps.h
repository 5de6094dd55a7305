// support/toy_fuzz_steps.h - the fuzz's random steps: live ranges, row ranges,
// idle rows, NaN in dead tokens, throws at any layer, commits that come early.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/toy_shadow.h"

namespace kvcache::toy {

class FuzzSteps : protected FuzzState {
 protected:
  using FuzzState::FuzzState;

  struct Plan {
    StepSpec spec;
    std::vector<int64_t> skip, count;
    std::vector<int> ids;
    bool fits = true, fills = false;
  };

  Plan plan_step() {
    Plan plan;
    plan.spec.tokens = 1 + pick(chance(20) ? 9 : 4);
    auto of = static_cast<int64_t>(rows().size());
    if (chance(25)) {
      plan.spec.first_row = pick(rows().size());
      of = 1 + pick(static_cast<size_t>(of - plan.spec.first_row));
      plan.spec.rows = of;
    }
    const bool plain = chance(30);
    const bool may_overflow = chance(10);
    for (int64_t row = 0; row < of; ++row) {
      int64_t skip = 0, count = plan.spec.tokens;
      if (!plain) {
        skip = chance(50) ? 0 : pick(plan.spec.tokens + 1);
        count = chance(50) ? plan.spec.tokens - skip
                           : pick(plan.spec.tokens - skip + 1);
      }
      const int64_t room =
          setup_.capacity - rows()[plan.spec.first_row + row].length();
      if (count > room && may_overflow) {
        plan.fits = false;
      } else {
        count = std::min(count, room);
      }
      plan.skip.push_back(skip);
      plan.count.push_back(count);
      for (int64_t t = 0; t < plan.spec.tokens; ++t) {
        const bool live = t >= skip && t < skip + count;
        plan.ids.push_back(live ? static_cast<int>(pick(kVocabulary)) : kDead);
      }
    }
    return plan;
  }

  ForwardOptions options() {
    return {
        .fused = chance(30), .dtype = setup_.dtype, .conv_dtype = conv_dtype_};
  }

  void step(int number) {
    Plan plan = plan_step();
    plan.spec.skip = plan.skip;
    plan.spec.count = plan.count;
    log("step" + std::to_string(plan.spec.tokens) + (plan.fits ? "" : "!"));
    if (!plan.fits) {
      try {
        Step refused = cache().begin_step(plan.spec);
        fail("a step over the capacity was begun");
      } catch (const c10::Error&) {
      }
      return;
    }
    plan.spec.state_window = chance(25);
    Step open = cache().begin_step(plan.spec);
    ForwardOptions with = options();
    with.fill_window = chance(80);
    plan.fills = plan.spec.state_window && with.fill_window;
    for (ShadowRow& row : rows()) {
      if (plan.spec.state_window) {
        row.window.clear();
      }
    }
    if (chance(15)) {
      return abandon(open, plan, with);
    }
    if (chance(10)) {  // a failed commit can be completed
      const int64_t at = model_.first_layer + pick(model_.layers.size());
      with.hook = [&, at](int64_t layer, Stage stage) {
        if (layer == at && stage == Stage::kBeforeLayer) {
          try {
            open.commit();
            fail("a commit without all layers went through");
          } catch (const c10::Error&) {
          }
        }
      };
    }
    const Floats hidden = forward(model_, open, plan.ids, with);
    open.commit();
    compare(plan, hidden, number);
  }

  // Throws somewhere in the step; nothing of it may stay.
  void abandon(Step& open, const Plan& plan, ForwardOptions& with) {
    struct Planned {};
    log("(abandoned)");
    const int64_t at = model_.first_layer + pick(model_.layers.size() + 1);
    const auto stage = static_cast<Stage>(pick(3));
    with.hook = [at, stage](int64_t layer, Stage now) {
      if (layer == at && now == stage) {
        throw Planned{};
      }
    };
    try {
      forward(model_, open, plan.ids, with);
    } catch (const Planned&) {
    }
    const Step ended = std::move(open);
  }

  // Appends the live tokens to the shadow and compares what came out.
  void compare(const Plan& plan, const Floats& hidden, int number) {
    for (size_t row = 0; row < plan.count.size(); ++row) {
      ShadowRow& shadow = rows()[plan.spec.first_row + row];
      const int64_t before = shadow.length();
      const auto first = row * plan.spec.tokens + plan.skip[row];
      shadow.ids.insert(shadow.ids.end(), plan.ids.begin() + first,
                        plan.ids.begin() + first + plan.count[row]);
      if (plan.count[row] > 0) {
        shadow.window.clear();
      }
      for (int64_t n = 1; n <= plan.count[row] && plan.fills; ++n) {
        shadow.window.push_back(before + n);
      }
      const Floats& want = expected(shadow.ids).hidden;
      if (plan.count[row] > 0 &&
          std::memcmp(want.data() + before * kWidth,
                      hidden.data() + first * kWidth,
                      plan.count[row] * kWidth * sizeof(float)) != 0) {
        fail("verb " + std::to_string(number) + ": row " + std::to_string(row) +
             " differs from the oracle");
      }
    }
  }

  // Feeds each row what a truncation asked for, in one step.
  void replay_all(const std::vector<std::vector<int>>& dropped) {
    Plan plan;
    plan.spec.tokens = 0;
    for (const auto& ids : dropped) {
      plan.spec.tokens =
          std::max(plan.spec.tokens, static_cast<int64_t>(ids.size()));
    }
    if (plan.spec.tokens == 0) {
      return;
    }
    for (const auto& ids : dropped) {
      plan.skip.push_back(0);
      plan.count.push_back(static_cast<int64_t>(ids.size()));
      plan.ids.insert(plan.ids.end(), ids.begin(), ids.end());
      plan.ids.resize(plan.count.size() * plan.spec.tokens, kDead);
    }
    plan.spec.count = plan.count;
    log("replay");
    Step open = cache().begin_step(plan.spec);
    const Floats hidden = forward(model_, open, plan.ids, options());
    open.commit();
    compare(plan, hidden, -1);
  }
};

}  // namespace kvcache::toy
