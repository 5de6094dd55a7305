// support/toy_shadow.h - what a cache must hold in the fuzz: shadow rows of
// token ids and marks, and the checks against them after every verb.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/support/toy_forward.h"
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

// What a row must hold: its tokens, and positions > 0 that can be cut at: marks
// and, until its next change, those inside of a state window.
struct ShadowRow {
  std::vector<int> ids;
  std::vector<int64_t> marks, window = {};
  int64_t length() const { return static_cast<int64_t>(ids.size()); }
};

struct ExpectedCut {
  int64_t length = 0;
  TruncationReason reason = TruncationReason::kExact;
};

class FuzzState {
 protected:
  explicit FuzzState(const FuzzSetup& setup)
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

  struct Subject {
    std::unique_ptr<Cache> cache;
    std::vector<ShadowRow> rows;
    std::vector<const void*> held = {};  // addresses, as of `epoch`
    uint64_t epoch = 0;
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

  const OracleRow& expected(const std::vector<int>& ids) {
    auto found = known_.find(ids);
    if (found == known_.end()) {
      found = known_
                  .emplace(ids, oracle(model_, ids, setup_.dtype, conv_dtype_,
                                       setup_.kind->format))
                  .first;
    }
    return found->second;
  }

  ExpectedCut cut_at(const ShadowRow& row, int64_t target) const {
    if (!hybrid_ || target == 0) {
      return {target, TruncationReason::kExact};
    }
    int64_t best = 0;
    for (auto points : {&ShadowRow::marks, &ShadowRow::window}) {
      for (const int64_t point : row.*points) {
        best = point <= target ? std::max(best, point) : best;
      }
    }
    return {best, best == target ? TruncationReason::kExact
                                 : TruncationReason::kRestorePoint};
  }

  static void shrink(ShadowRow& row, int64_t length) {
    row.ids.resize(static_cast<size_t>(length));
    for (auto part : {&ShadowRow::marks, &ShadowRow::window}) {
      std::erase_if(row.*part, [&](int64_t mark) { return mark > length; });
    }
  }

  void add_mark(ShadowRow& row) const {
    if (hybrid_ && row.length() > 0 &&
        (row.marks.empty() || row.marks.back() != row.length())) {
      row.marks.push_back(row.length());
    }
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
                         d % a->head_dim}) != rounded(list[n], setup_.dtype)) {
              return fail("K or V of layer " + std::to_string(i) +
                          " differ from the oracle");
            }
          }
        }
      }
      ++index;
    }
  }

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
      check_epoch(subject);
      if (chance(20)) {
        poison(held);
      }
    }
    if (chance(25)) {
      compare_kv();
    }
  }

  // The epoch changes if and only if an address has.
  void check_epoch(Subject& subject) {
    std::vector<const void*> now = addresses(*subject.cache);
    const uint64_t epoch = subject.cache->address_epoch();
    const bool known = !now.empty() && now[0] != nullptr &&
                       !subject.held.empty() && subject.held[0] != nullptr;
    if (known && (now == subject.held) != (epoch == subject.epoch)) {
      fail("the epoch does not follow the addresses");
    }
    subject.held = std::move(now);
    subject.epoch = epoch;
  }

  void check_memory(const Cache& held, int64_t tokens) {
    const MemoryReport report = held.memory();
    size_t one = 0, scales = 0;
    for (const LayerSpec& layer : model_.layers) {
      if (const auto* a = std::get_if<AttentionLayer>(&layer)) {
        one += static_cast<size_t>(a->heads) *
               setup_.kind->head_bytes(a->head_dim, setup_.dtype);
        scales += static_cast<size_t>(2 * a->heads) * sizeof(float);
      }
    }
    if (setup_.kind->format == KvFormat::kPlain) {
      scales = 0;
    }
    if (report.scales.used != static_cast<size_t>(tokens) * scales) {
      return fail("memory() of scales is wrong");
    }
    const size_t used = static_cast<size_t>(tokens) * one;
    if (report.k.used != used || report.v.used != used ||
        report.k.reserved < used || report.v.reserved != report.k.reserved) {
      return fail("memory() of K and V is wrong");
    }
    const int64_t cells = setup_.capacity + setup_.kind->spare;
    if (report.k.capacity !=
        static_cast<size_t>(cells * held.spec().rows) * one) {
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
  std::map<std::vector<int>, OracleRow> known_;
  std::string error_, log_;
};

}  // namespace kvcache::toy
