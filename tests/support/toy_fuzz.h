// support/toy_fuzz.h - random verbs on a cache, against the oracle.
//
// Every step's hidden states, every length, reason and replay must agree, bit
// for bit.
#pragma once

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/toy_fuzz_steps.h"

namespace kvcache::toy {

class Fuzz : private FuzzSteps {
 public:
  explicit Fuzz(const FuzzSetup& setup) : FuzzSteps(setup) {}

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
  struct Saved {
    Checkpoint checkpoint;
    ShadowRow row;
  };

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
      const ExpectedCut cut = cut_at(shadow, targets[row]);
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
    const bool fixed = setup_.kind->fixed_rows;
    if (!fixed && rows().size() <= 2 && chance(25)) {
      log("repeat");
      cache().repeat_rows(2);
      for (const ShadowRow& row : rows()) {
        next.insert(next.end(), 2, row);
      }
      rows() = std::move(next);
      return;
    }
    std::vector<int64_t> order(fixed || chance(70) ? rows().size()
                                                   : 1 + pick(4));
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
    for (ShadowRow& row : copy.rows) {
      row.window.clear();
    }
    if (subjects_.size() < 2) {
      subjects_.push_back(std::move(copy));
    } else {
      subjects_[1 - which_] = std::move(copy);
    }
  }

  Saved saved_now(size_t row) {
    Saved made{cache().checkpoint(static_cast<int64_t>(row)), rows()[row]};
    add_mark(made.row);
    made.row.window.clear();
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
    const ExpectedCut cut = cut_at(from.row, target);
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

  // One row into a new cache of another kind, and from there into any row here.
  void through_other_kind() {
    const Kind& other = kinds()[static_cast<size_t>(pick(kinds().size()))];
    if (other.format != setup_.kind->format) {
      return;  // refused
    }
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
    if (hybrid_ || setup_.kind->format != KvFormat::kPlain) {
      return;  // what is quantised twice has other scales
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

  void reserve() {
    if (PreallocatedCache* growing = preallocated(cache())) {
      log("reserve");
      growing->reserve(pick(setup_.capacity + 1));
    }
    if (chance(50)) {
      poison(cache());
    }
  }

  std::vector<Saved> saved_;
};

inline std::string run_fuzz(const FuzzSetup& setup) {
  return Fuzz(setup).run();
}

}  // namespace kvcache::toy
