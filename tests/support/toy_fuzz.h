// support/toy_fuzz.h - random verbs on a cache, against the oracle.
//
// Shadow rows (token ids and marks) say what the cache must hold; every step's
// hidden states, every length, reason and replay must agree bit for bit.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/toy_kinds.h"
#include "tests/support/toy_oracle.h"

namespace kvcache::toy {

struct FuzzSetup {
  const Kind* kind = nullptr;
  Variant variant = Variant::kAttention;
  int64_t rows = 1;
  at::ScalarType dtype = at::kFloat;
  unsigned seed = 0;
  int verbs = 120;
  int64_t capacity = 20;
};

// What a row must hold: its tokens, and positions > 0 that can be cut at.
struct ShadowRow {
  std::vector<int> ids;
  std::vector<int64_t> marks;
  int64_t length() const { return static_cast<int64_t>(ids.size()); }
};

struct ExpectedCut {
  int64_t length = 0;
  TruncationReason reason = TruncationReason::kExact;
};

class Fuzz {
 public:
  explicit Fuzz(const FuzzSetup& setup)
      : setup_(setup),
        model_(make_model(setup.variant, setup.seed + 1)),
        hybrid_(has_states(model_.layers)),
        random_(setup.seed) {
    CacheSpec spec{.rows = setup.rows,
                   .capacity = setup.capacity,
                   .dtype = setup.dtype,
                   .layers = model_.layers};
    if (setup.seed % 3 == 0) {
      model_.first_layer = spec.first_layer = 7;
    }
    if (setup.seed % 2 == 0) {
      spec.conv_dtype = at::kFloat;
    }
    conv_dtype_ = spec.conv_dtype.value_or(spec.dtype);
    subjects_.push_back(
        {setup.kind->make(spec),
         std::vector<ShadowRow>(static_cast<size_t>(setup.rows))});
    poison(*subjects_[0].cache);
  }

  // Empty, or what went wrong and how to see it again.
  std::string run() {
    try {
      for (int i = 0; i < setup_.verbs && error_.empty(); ++i) {
        which_ = static_cast<size_t>(pick(subjects_.size()));
        verb(i);
        if (error_.empty()) {
          check_rest();
        }
      }
    } catch (const std::exception& thrown) {
      fail(std::string("threw ") + thrown.what());
    }
    if (error_.empty()) {
      return {};
    }
    std::ostringstream text;
    text << "seed " << setup_.seed << ' ' << setup_.kind->name << ' '
         << name_of(setup_.variant) << " rows " << setup_.rows << ' '
         << setup_.dtype << ": " << error_ << "; verbs: " << log_;
    return text.str();
  }

 private:
  struct Subject {
    std::unique_ptr<Cache> cache;
    std::vector<ShadowRow> rows;
  };
  struct Saved {
    Checkpoint checkpoint;
    ShadowRow row;
  };

  int64_t pick(size_t below) { return static_cast<int64_t>(random_() % below); }
  bool chance(int percent) {
    return static_cast<int>(random_() % 100) < percent;
  }
  Cache& cache() { return *subjects_[which_].cache; }
  std::vector<ShadowRow>& rows() { return subjects_[which_].rows; }
  size_t any_row() { return static_cast<size_t>(pick(rows().size())); }
  void fail(const std::string& text) {
    if (error_.empty()) {
      error_ = text;
    }
  }
  void log(const std::string& text) { log_ += text + ' '; }
  void expect_cut(const Truncation& got, TruncationReason reason,
                  const std::vector<int64_t>& replay) {
    if (got.reason != reason || got.replay != replay) {
      fail("reason or replay differ: got reason " +
           std::to_string(static_cast<int>(got.reason)) + ", expected " +
           std::to_string(static_cast<int>(reason)));
    }
  }

  void verb(int number) {
    const int dice = static_cast<int>(pick(100));
    if (dice < 50) {
      step(number);
    } else if (dice < 60) {
      truncate();
    } else if (dice < 68) {
      mark();
    } else if (dice < 71) {
      reset();
    } else if (dice < 77) {
      reorder();
    } else if (dice < 81) {
      fork();
    } else if (dice < 86) {
      save();
    } else if (dice < 92) {
      restore();
    } else if (dice < 95) {
      through_other_kind();
    } else if (dice < 97) {
      export_import();
    } else {
      reserve();
    }
  }

  // --- steps ---

  struct Plan {
    StepSpec spec;
    std::vector<int64_t> skip, count;
    std::vector<int> ids;
    bool fits = true;
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
    Step open = cache().begin_step(plan.spec);
    ForwardOptions with = options();
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

  const OracleRow& expected(const std::vector<int>& ids) {
    auto found = known_.find(ids);
    if (found == known_.end()) {
      found =
          known_.emplace(ids, oracle(model_, ids, setup_.dtype, conv_dtype_))
              .first;
    }
    return found->second;
  }

  // --- verbs ---

  ExpectedCut cut_at(const std::vector<int64_t>& marks, int64_t target) const {
    if (!hybrid_ || target == 0) {
      return {target, TruncationReason::kExact};
    }
    int64_t best = 0;
    for (const int64_t mark : marks) {
      best = mark <= target ? std::max(best, mark) : best;
    }
    return {best, best == target ? TruncationReason::kExact
                                 : TruncationReason::kRestorePoint};
  }

  static void shrink(ShadowRow& row, int64_t length) {
    row.ids.resize(static_cast<size_t>(length));
    std::erase_if(row.marks, [&](int64_t mark) { return mark > length; });
  }

  void truncate() {
    const int way = static_cast<int>(pick(3));
    std::vector<int64_t> targets(rows().size());
    const int64_t drop = pick(6);
    int64_t same = pick(setup_.capacity + 2);
    for (size_t row = 0; row < targets.size(); ++row) {
      const int64_t length = rows()[row].length();
      targets[row] = way == 0     ? std::max<int64_t>(0, length - drop)
                     : way == 1   ? same
                     : chance(30) ? length + pick(3)
                                  : std::max<int64_t>(0, length - pick(5));
    }
    TruncationReason reason = TruncationReason::kNoChange;
    std::vector<int64_t> replay(targets.size(), 0);
    std::vector<std::vector<int>> dropped(targets.size());
    for (size_t row = 0; row < targets.size(); ++row) {
      ShadowRow& shadow = rows()[row];
      if (targets[row] >= shadow.length()) {
        continue;
      }
      const ExpectedCut cut = cut_at(shadow.marks, targets[row]);
      reason = std::max(reason, cut.reason);
      replay[row] = targets[row] - cut.length;
      dropped[row].assign(shadow.ids.begin() + cut.length,
                          shadow.ids.begin() + targets[row]);
      shrink(shadow, cut.length);
    }
    log(way == 0 ? "drop_last" : "truncate");
    const Truncation got = way == 0   ? cache().drop_last(drop)
                           : way == 1 ? cache().truncate(same)
                                      : cache().truncate(targets);
    expect_cut(got, reason, replay);
    if (chance(50)) {
      replay_all(dropped);
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

  void mark() {
    const bool all = chance(40);
    const size_t one = any_row();
    log("mark");
    if (all) {
      cache().mark();
    } else {
      cache().mark(static_cast<int64_t>(one));
    }
    for (size_t row = 0; row < rows().size(); ++row) {
      if (all || row == one) {
        add_mark(rows()[row]);
      }
    }
  }

  void add_mark(ShadowRow& row) const {
    if (hybrid_ && row.length() > 0 &&
        (row.marks.empty() || row.marks.back() != row.length())) {
      row.marks.push_back(row.length());
    }
  }

  void reset() {
    log("reset");
    if (chance(30)) {
      cache().reset();
      for (ShadowRow& row : rows()) {
        row = {};
      }
      return;
    }
    const size_t row = any_row();
    cache().reset(static_cast<int64_t>(row));
    rows()[row] = {};
  }

  void reorder() {
    std::vector<ShadowRow> next;
    if (rows().size() <= 2 && chance(25)) {
      log("repeat");
      cache().repeat_rows(2);
      for (const ShadowRow& row : rows()) {
        next.insert(next.end(), 2, row);
      }
      rows() = std::move(next);
      return;
    }
    std::vector<int64_t> order(chance(70) ? rows().size() : 1 + pick(4));
    for (int64_t& row : order) {
      row = pick(rows().size());
      next.push_back(rows()[static_cast<size_t>(row)]);
    }
    log("reorder" + std::to_string(order.size()));
    cache().reorder(order);
    rows() = std::move(next);
  }

  void fork() {  // and both go on; at most two live at a time
    log("fork");
    Subject copy{cache().fork(), rows()};
    if (subjects_.size() < 2) {
      subjects_.push_back(std::move(copy));
    } else {
      subjects_[1 - which_] = std::move(copy);
    }
  }

  Saved saved_now(size_t row) {
    Saved made{cache().checkpoint(static_cast<int64_t>(row)), rows()[row]};
    add_mark(made.row);
    return made;
  }

  void save() {
    log("checkpoint");
    const size_t row = any_row();
    if (saved_.size() < 4) {
      saved_.push_back(saved_now(row));
    } else {
      saved_[static_cast<size_t>(pick(4))] = saved_now(row);
    }
  }

  void restore_into(Cache& to, std::vector<ShadowRow>& shadows,
                    const Saved& from, size_t row) {
    const bool whole = chance(40);
    const int64_t target =
        whole ? from.row.length() : pick(from.row.length() + 1);
    const Truncation got =
        whole ? to.restore(from.checkpoint, static_cast<int64_t>(row))
              : to.restore(from.checkpoint, static_cast<int64_t>(row), target);
    const ExpectedCut cut = cut_at(from.row.marks, target);
    std::vector<int64_t> replay(shadows.size(), 0);
    replay[row] = target - cut.length;
    expect_cut(got, cut.reason, replay);
    shadows[row] = from.row;
    shrink(shadows[row], cut.length);
  }

  void restore() {
    if (saved_.empty()) {
      return save();
    }
    log("restore");
    restore_into(cache(), rows(), saved_[pick(saved_.size())], any_row());
  }

  // Row by row into a cache of another kind, which goes on as the subject, or
  // one row there and back.
  void through_other_kind() {
    const Kind& other = kinds()[static_cast<size_t>(pick(kinds().size()))];
    log("via" + other.name);
    CacheSpec spec = cache().spec();
    const size_t row = any_row();
    std::vector<ShadowRow> there(rows().size());
    std::unique_ptr<Cache> second = other.make(spec);
    restore_into(*second, there, saved_now(row), row);
    Saved back{second->checkpoint(static_cast<int64_t>(row)), there[row]};
    add_mark(back.row);
    restore_into(cache(), rows(), back, any_row());
  }

  void export_import() {
    compare_kv();
    if (hybrid_) {
      return;
    }
    log("import");
    std::vector<KvTensors> layers;
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      layers.push_back(
          cache().export_kv(model_.first_layer + static_cast<int64_t>(i)));
    }
    for (ShadowRow& row : rows()) {
      shrink(row, pick(row.ids.size() + 1));
      lengths.push_back(row.length());
    }
    if (chance(50)) {
      cache().reset();
    }
    cache().import_kv(layers, lengths);
  }

  // Every committed key and value, bit for bit.
  void compare_kv() {
    size_t index = 0;
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const auto* a = std::get_if<AttentionLayer>(&model_.layers[i]);
      if (a == nullptr) {
        continue;
      }
      const KvTensors kv =
          cache().export_kv(model_.first_layer + static_cast<int64_t>(i));
      for (const bool key : {true, false}) {
        const Elements got(key ? kv.k : kv.v);
        for (size_t row = 0; row < rows().size(); ++row) {
          const OracleRow& want = expected(rows()[row].ids);
          const Floats& list = (key ? want.keys : want.values)[index];
          const int64_t size = a->heads * a->head_dim;
          for (size_t n = 0; n < list.size(); ++n) {
            const auto p = static_cast<int64_t>(n) / size;
            const auto d = static_cast<int64_t>(n) % size;
            if (got.get({static_cast<int64_t>(row), d / a->head_dim, p,
                         d % a->head_dim}) != list[n]) {
              return fail("K or V of layer " + std::to_string(i) +
                          " differ from the oracle");
            }
          }
        }
      }
      ++index;
    }
  }

  void reserve() {
    if (PreallocatedCache* growing = preallocated(cache())) {
      log("reserve");
      growing->reserve(pick(setup_.capacity + 1));
    }
    if (chance(50)) {
      poison(cache());
    }
  }

  // --- after every verb ---

  void check_rest() {
    for (Subject& subject : subjects_) {
      Cache& held = *subject.cache;
      const std::vector<std::string> broken = held.validate();
      if (!broken.empty()) {
        return fail("validate: " + broken[0]);
      }
      std::vector<int64_t> lengths;
      int64_t tokens = 0;
      for (const ShadowRow& row : subject.rows) {
        lengths.push_back(row.length());
        tokens += row.length();
      }
      if (!std::equal(lengths.begin(), lengths.end(), held.lengths().begin(),
                      held.lengths().end())) {
        return fail("lengths differ");
      }
      check_memory(held, tokens);
      if (chance(20)) {
        poison(held);
      }
    }
    if (chance(25)) {
      compare_kv();
    }
  }

  void check_memory(const Cache& held, int64_t tokens) {
    const MemoryReport report = held.memory();
    size_t one = 0;
    for (const LayerSpec& layer : model_.layers) {
      if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
        one += static_cast<size_t>(a->heads * a->head_dim) *
               c10::elementSize(setup_.dtype);
      }
    }
    const size_t used = static_cast<size_t>(tokens) * one;
    if (report.k.used != used || report.v.used != used ||
        report.k.reserved < used || report.v.reserved != report.k.reserved) {
      return fail("memory() of K and V is wrong");
    }
    if (report.k.capacity != static_cast<size_t>(setup_.capacity) *
                                 static_cast<size_t>(held.spec().rows) * one) {
      return fail("memory() of the capacity is wrong");
    }
    if ((report.recurrent.reserved > 0) !=
            (hybrid_ && setup_.variant != Variant::kAttention) ||
        report.total().reserved < report.k.reserved * 2) {
      return fail("memory() of states is wrong");
    }
  }

  FuzzSetup setup_;
  Model model_;
  bool hybrid_;
  at::ScalarType conv_dtype_ = at::kFloat;
  std::mt19937 random_;
  std::vector<Subject> subjects_;
  size_t which_ = 0;
  std::vector<Saved> saved_;
  std::map<std::vector<int>, OracleRow> known_;
  std::string error_, log_;
};

inline std::string run_fuzz(const FuzzSetup& setup) {
  return Fuzz(setup).run();
}

}  // namespace kvcache::toy
