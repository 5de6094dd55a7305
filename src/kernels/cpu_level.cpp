// kernels/cpu_level.cpp - what the processor and the system support.

#include "kernels/cpu_level.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

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
                    "avx_vnni, avx512, avx512_bf16 or amx but is ",
                    wanted, "; correct it or unset it.");
}

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

// What the builtin of older compilers does not know.
Registers extended_features(unsigned leaf) {
  Registers found;
  __get_cpuid_count(7, leaf, &found.a, &found.b, &found.c, &found.d);
  return found;
}

bool has_avx_vnni() { return (extended_features(1).a & (1U << 4)) != 0; }

// Linux gives the registers of the matrix unit to processes that ask for them.
bool has_amx() {
#ifdef __linux__
  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr unsigned kAll = (1U << 22) | (1U << 24) | (1U << 25);
  constexpr int kAskForRegisters = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;             // XFEATURE_XTILEDATA
  return (extended_features(0).d & kAll) == kAll &&
         syscall(SYS_arch_prctl, kAskForRegisters, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

const char* name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPortable:
      return "portable";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvxVnni:
      return "avx_vnni";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Bf16:
      return "avx512_bf16";
    case CpuLevel::kAmx:
      return "amx";
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
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  switch (level) {
    case CpuLevel::kPortable:
      return true;
    case CpuLevel::kAvx2:
      return avx2;
    case CpuLevel::kAvxVnni:
      return avx2 && has_avx_vnni();
    case CpuLevel::kAvx512:
      return avx512;
    case CpuLevel::kAvx512Bf16:
      return bf16;
    case CpuLevel::kAmx:
      return bf16 && __builtin_cpu_supports("avx512vnni") && has_amx();
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
