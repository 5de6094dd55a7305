// src/model/forward/team.cpp - a barrier that spins for a while.
#include "src/model/forward/team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcache::model {
namespace {

// Some 20 us: longer than the phases of a step differ between threads.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void Barrier::meet(int size) {
  const int32_t round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
    return;
  }
  for (int i = 0; i < kSpins; ++i) {
    if (round_.load(std::memory_order_acquire) != round) return;
    pause();
  }
  round_.wait(round, std::memory_order_acquire);
}

}  // namespace kvcache::model
