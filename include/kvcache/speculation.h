// kvcache/speculation.h - drafts that are fed at once and kept as far as they
// were right.
//
//   Speculation drafts(cache, row);   // remembers where the row is
//   ... one step of the draft tokens, committed; it may be opened with
//       StepSpec::state_window = drafts.window(tokens) ...
//   int64_t again = drafts.accept(n); // the first n stay
//   ... the last `again` of the n are fed once more ...
//
// Lossless on every kind: afterwards the row is as if only the n tokens had
// ever come. Keys are dropped. A recurrent state cannot be: either the step
// kept the states after each of its tokens, and the row takes those of the
// n-th, or the row goes back to where the drafts began and takes the n tokens
// again.
#pragma once

#include "kvcache/cache.h"

namespace kvcache {

struct SpeculationOptions {
  // A step keeps its states if they take no more bytes than this; else drafts
  // that are dropped cost a replay. Keeping writes them once, a replay reads
  // all weights once more: the default is about half of what the smallest
  // hybrid in use reads (0.8B in 4 bits). 0: never.
  size_t window_bytes = size_t{256} << 20;
};

class Speculation {
 public:
  // At the row's length now. With states: makes a restore point there, if none
  // is, until the drafts are accepted. `cache` must outlive it.
  explicit Speculation(Cache& cache, int64_t row = 0,
                       const SpeculationOptions& options = {});
  // Without accept(): nothing of the drafts stays.
  ~Speculation();
  Speculation(const Speculation&) = delete;
  Speculation& operator=(const Speculation&) = delete;

  int64_t start() const noexcept { return start_; }  // length before
  // Whether a step of so many tokens should keep its states: there are some,
  // and those of this row fit. A step over more rows keeps as many of each.
  bool window(int64_t tokens) const noexcept;
  // Keeps the first `tokens` that came since. Returns how many tokens before
  // the new end are to be fed again: 0, or, with states that the step did not
  // keep, all of these `tokens` unless nothing is dropped. More of the text
  // only where a StateCache of a single restore point marked another place
  // meanwhile. Throws for more than came, and if it was called before.
  int64_t accept(int64_t tokens);

 private:
  int64_t cut(int64_t length);

  Cache& cache_;
  int64_t row_;
  SpeculationOptions options_;
  int64_t start_;
  bool marked_ = false;  // by us
  bool open_ = true;
};

}  // namespace kvcache
