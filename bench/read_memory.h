// read_memory.h - the three ways to read memory whose best one is the bound.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcache::bench {

enum class Read { kPlain, kPrefetched, kStreaming };

inline constexpr int64_t kAhead = 8192;  // bytes, of a prefetch

#if defined(__x86_64__)
template <Read kHow>
__attribute__((target("avx512f"))) int64_t read_avx512(const char* p,
                                                       int64_t bytes) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int64_t j = 0; j < 4; ++j) {
      const char* at = p + i + j * 64;
      if (kHow == Read::kPrefetched) __builtin_prefetch(at + kAhead);
      sums[j] = _mm512_add_epi64(
          sums[j], kHow == Read::kStreaming
                       ? _mm512_stream_load_si512(const_cast<char*>(at))
                       : _mm512_load_si512(at));
    }
  }
  // _mm512_reduce_add_epi64() draws a false warning of GCC 12.
  int64_t total = 0;
  for (const __m512i& sum : sums) {
    alignas(64) int64_t lanes[8];
    _mm512_store_si512(lanes, sum);
    for (const int64_t lane : lanes) total += lane;
  }
  return total;
}

template <Read kHow>
__attribute__((target("avx2"))) int64_t read_avx2(const char* p,
                                                  int64_t bytes) {
  __m256i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 128) {
    for (int64_t j = 0; j < 4; ++j) {
      const char* at = p + i + j * 32;
      if (kHow == Read::kPrefetched && j % 2 == 0) {
        __builtin_prefetch(at + kAhead);
      }
      const auto* wide = reinterpret_cast<const __m256i*>(at);
      sums[j] = _mm256_add_epi64(sums[j], kHow == Read::kStreaming
                                              ? _mm256_stream_load_si256(wide)
                                              : _mm256_load_si256(wide));
    }
  }
  int64_t total = 0;
  for (const __m256i& sum : sums) {
    alignas(32) int64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    for (const int64_t lane : lanes) total += lane;
  }
  return total;
}
#endif

// The sum of `bytes` at `p` as 8-byte words; both are multiples of 256.
template <Read kHow>
int64_t read_memory(const char* p, int64_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512<kHow>(p, bytes);
  if (__builtin_cpu_supports("avx2")) return read_avx2<kHow>(p, bytes);
#endif
  int64_t sum = 0;
  for (int64_t i = 0; i < bytes; i += 64) {
    if (kHow == Read::kPrefetched) __builtin_prefetch(p + i + kAhead);
    for (int64_t j = 0; j < 64; j += 8) {
      sum += *reinterpret_cast<const int64_t*>(p + i + j);
    }
  }
  return sum;
}

}  // namespace kvcache::bench
