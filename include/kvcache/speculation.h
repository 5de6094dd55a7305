// kvcache/speculation.h - drafts that are fed at once and kept as far as they
// were right.
//
//   Speculation drafts(cache, row);   // remembers where the row is
//   ... one step of the draft tokens, committed ...
//   int64_t again = drafts.accept(n); // the first n stay
//   ... the last `again` of the n are fed once more ...
//
// Lossless on every kind: afterwards the row is as if only the n tokens had
// ever come. Keys are dropped; a recurrent state cannot be, so it goes back to
// where the drafts began and takes the accepted tokens again.
#pragma once

#include "kvcache/cache.h"

namespace kvcache {

class Speculation {
 public:
  // At the row's length now. With states: makes a restore point there, if none
  // is, until the drafts are accepted. `cache` must outlive it.
  explicit Speculation(Cache& cache, int64_t row = 0);
  // Without accept(): nothing of the drafts stays.
  ~Speculation();
  Speculation(const Speculation&) = delete;
  Speculation& operator=(const Speculation&) = delete;

  int64_t start() const noexcept { return start_; }  // length before
  // Keeps the first `tokens` that came since. Returns how many of them are to
  // be fed again: 0, or with states all of them unless nothing is dropped.
  // Throws for more than came, and if it was called before.
  int64_t accept(int64_t tokens);

 private:
  int64_t cut(int64_t length);

  Cache& cache_;
  int64_t row_;
  int64_t start_;
  bool marked_ = false;  // by us
  bool open_ = true;
};

}  // namespace kvcache
