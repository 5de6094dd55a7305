// machine_probe.cpp - what this machine gives right now: bytes and flops.
//
// usage: machine_probe [THREADS]
//
// One JSON object on one line: read bandwidth of 512 MB in three ways, and
// float32 multiply-adds from registers, both on THREADS threads. Each figure is
// the best of a few passes: what disturbs one only makes it slower. Needs
// nothing but the C++ library, so that it starts at once.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "bench/read_memory.h"

namespace {

using kvcache::bench::Read;

constexpr int64_t kBytes = int64_t{512} << 20;  // beyond every cache
constexpr int64_t kPage = 4096;
constexpr int kPasses = 5;
constexpr int64_t kRounds = 4'000'000;  // of multiply-adds: some 20 ms
constexpr int kChains = 12;  // independent sums: the latency of two units
constexpr float kFactor = 0.999F, kTerm = 0.001F;

std::atomic<int64_t> sink{0};  // what is read here cannot be left out

// Seconds that the slowest of `threads` takes for work(thread), all of them
// started at the same time.
double seconds(int threads, const std::function<void(int)>& work) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> ready{0};
  std::vector<double> taken(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      ++ready;
      while (ready < threads) {
      }
      const auto start = Clock::now();
      work(i);
      const std::chrono::duration<double> time = Clock::now() - start;
      taken[static_cast<size_t>(i)] = time.count();
    });
  }
  for (std::thread& worker : workers) worker.join();
  return *std::max_element(taken.begin(), taken.end());
}

template <Read kHow>
double gigabytes_per_second(const char* memory, int threads) {
  const int64_t share = kBytes / threads / kPage * kPage;
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double taken = seconds(threads, [&](int i) {
      sink += kvcache::bench::read_memory<kHow>(memory + i * share, share);
    });
    best = std::max(best, static_cast<double>(share * threads) / taken);
  }
  return best / 1e9;
}

#if defined(__x86_64__)
// Multiply-adds of kChains vectors, kRounds times; returns flops.
__attribute__((target("avx512f"))) double multiply_add_avx512() {
  __m512 sums[kChains] = {};
  const __m512 factor = _mm512_set1_ps(kFactor), term = _mm512_set1_ps(kTerm);
  for (int64_t i = 0; i < kRounds; ++i) {
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, factor, term);
  }
  for (const __m512& sum : sums) {
    sink += static_cast<int64_t>(_mm512_cvtss_f32(sum));
  }
  return 2.0 * 16 * kChains * static_cast<double>(kRounds);
}

__attribute__((target("avx2,fma"))) double multiply_add_avx2() {
  __m256 sums[kChains] = {};
  const __m256 factor = _mm256_set1_ps(kFactor), term = _mm256_set1_ps(kTerm);
  for (int64_t i = 0; i < kRounds; ++i) {
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, factor, term);
  }
  for (const __m256& sum : sums) {
    sink += static_cast<int64_t>(_mm256_cvtss_f32(sum));
  }
  return 2.0 * 8 * kChains * static_cast<double>(kRounds);
}
#endif

double multiply_add() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return multiply_add_avx512();
  if (__builtin_cpu_supports("fma")) return multiply_add_avx2();
#endif
  float sums[kChains] = {};
  for (int64_t i = 0; i < kRounds; ++i) {
    for (float& sum : sums) sum = sum * kFactor + kTerm;
  }
  for (const float sum : sums) sink += static_cast<int64_t>(sum);
  return 2.0 * kChains * static_cast<double>(kRounds);
}

double gigaflops_per_second(int threads) {
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::atomic<int64_t> flops{0};
    const double taken = seconds(
        threads, [&](int) { flops += static_cast<int64_t>(multiply_add()); });
    best = std::max(best, static_cast<double>(flops) / taken);
  }
  return best / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (argc > 2 || threads < 1) {
    std::fprintf(stderr, "usage: machine_probe [THREADS]\n");
    return 2;
  }
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kPage, kBytes)), &std::free);
  if (!memory) {
    std::fprintf(stderr, "machine_probe: error: no 512 MB of memory\n");
    return 1;
  }
  std::fill_n(memory.get(), kBytes, char{1});
  const std::array<double, 3> read = {
      gigabytes_per_second<Read::kPlain>(memory.get(), threads),
      gigabytes_per_second<Read::kPrefetched>(memory.get(), threads),
      gigabytes_per_second<Read::kStreaming>(memory.get(), threads)};
  std::printf(
      "{\"threads\": %d, \"read_gb_s\": %.2f, \"plain_gb_s\": %.2f, "
      "\"prefetched_gb_s\": %.2f, \"streaming_gb_s\": %.2f, "
      "\"gflop_s\": %.1f}\n",
      threads, *std::max_element(read.begin(), read.end()), read[0], read[1],
      read[2], gigaflops_per_second(threads));
}
