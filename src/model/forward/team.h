// src/model/forward/team.h - threads that go through phases together.
//
// A parallel region for each loop of a decode step costs more than most of its
// loops. A team enters one region and meets at barriers instead.
#pragma once

#include <ATen/Parallel.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <atomic>
#include <cstdint>

namespace kvcache::model {

// What the threads of a region share.
class Barrier {
 public:
  // Returns when `size` threads have called it. Waits for a bounded time and
  // then sleeps: a thread whose partner is not running gives way to it.
  void meet(int size);

 private:
  alignas(64) std::atomic<int32_t> arrived_ = 0;
  alignas(64) std::atomic<int32_t> round_ = 0;
};

struct Member {
  Barrier* barrier = nullptr;
  int index = 0;
  int size = 1;

  void meet() const {
    if (size > 1) barrier->meet(size);
  }
  // This member's share of [0, count).
  int64_t first(int64_t count) const { return count * index / size; }
  int64_t last(int64_t count) const { return count * (index + 1) / size; }
};

// f(member) on each thread of a team of at::get_num_threads(), or on this one
// alone inside of another parallel region. f must not throw.
template <typename F>
void on_team(const F& f) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (threads == 1) return f(Member{});
#ifdef _OPENMP
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  f(Member{&barrier, omp_get_thread_num(), omp_get_num_threads()});
#else
  f(Member{});
#endif
}

}  // namespace kvcache::model
