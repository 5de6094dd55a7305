// kernels/cpu_level.cpp - what the processor and the system support.

#include "kernels/cpu_level.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace kvcache::kernels {
namespace {

std::optional<CpuLevel>& forced_level() {
  static thread_local std::optional<CpuLevel> level;
  return level;
}

CpuLevel highest_level() {
  CpuLevel best = CpuLevel::kPortable;
  for (const CpuLevel level : kCpuLevels) {
    if (cpu_supports(level)) best = level;
  }
  return best;
}

CpuLevel level_of_environment() {
  const char* wanted = std::getenv("KVCACHE_CPU_LEVEL");
  if (wanted == nullptr || *wanted == '\0') return highest_level();
  for (const CpuLevel level : kCpuLevels) {
    if (std::string(wanted) != name(level)) continue;
    TORCH_CHECK_VALUE(cpu_supports(level), "[cpu_level] KVCACHE_CPU_LEVEL is ",
                      wanted, " but this CPU supports ", name(highest_level()),
                      " at most; lower it or unset it.");
    return level;
  }
  TORCH_CHECK_VALUE(false,
                    "[cpu_level] KVCACHE_CPU_LEVEL must be portable, avx2, "
                    "avx512 or avx512_bf16 but is ",
                    wanted, "; correct it or unset it.");
}

}  // namespace

const char* name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPortable:
      return "portable";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

// The builtin reads XCR0 too: registers that the system does not save do not
// count as supported.
bool cpu_supports(CpuLevel level) {
#if defined(__x86_64__)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (level) {
    case CpuLevel::kPortable:
      return true;
    case CpuLevel::kAvx2:
      return avx2;
    case CpuLevel::kAvx512:
      return avx512;
    case CpuLevel::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return level == CpuLevel::kPortable;
#endif
}

CpuLevel cpu_level() {
  if (forced_level()) return *forced_level();
  static const CpuLevel level = level_of_environment();
  return level;
}

ForcedCpuLevel::ForcedCpuLevel(CpuLevel level) : before_(forced_level()) {
  TORCH_CHECK_VALUE(cpu_supports(level), "[ForcedCpuLevel] this CPU has no ",
                    name(level), "; ask cpu_supports() first.");
  forced_level() = level;
}

ForcedCpuLevel::~ForcedCpuLevel() { forced_level() = before_; }

}  // namespace kvcache::kernels
