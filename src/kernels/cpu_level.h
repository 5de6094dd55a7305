// kernels/cpu_level.h - which of the compiled instruction sets to run.
#pragma once

#include <cstdint>
#include <optional>

namespace kvcache::kernels {

// From least to most. A level holds what the ones below it hold, but AVX-VNNI,
// which CPUs with AVX-512 may lack. Kernels that have no use for a level run as
// the one below it.
enum class CpuLevel : uint8_t {
  kPortable,    // what the compiler assumes anyway
  kAvx2,        // AVX2 and FMA
  kAvxVnni,     // and integer dot products
  kAvx512,      // AVX-512 F, BW, VL, DQ
  kAvx512Bf16,  // and its bfloat16 dot products
  kAmx          // its integer dot products, AMX-INT8 and AMX-BF16
};
constexpr CpuLevel kCpuLevels[] = {CpuLevel::kPortable,   CpuLevel::kAvx2,
                                   CpuLevel::kAvxVnni,    CpuLevel::kAvx512,
                                   CpuLevel::kAvx512Bf16, CpuLevel::kAmx};

// As the environment variable KVCACHE_CPU_LEVEL spells it.
const char* name(CpuLevel level);

// Whether this machine, its system included, runs `level`.
bool cpu_supports(CpuLevel level);

// The level to run: the highest supported one, or KVCACHE_CPU_LEVEL, which is
// read once. Throws if that is unknown or not supported.
CpuLevel cpu_level();

// For tests: while it lives, cpu_level() of the calling thread is `level`.
class ForcedCpuLevel {
 public:
  explicit ForcedCpuLevel(CpuLevel level);
  ~ForcedCpuLevel();
  ForcedCpuLevel(const ForcedCpuLevel&) = delete;
  ForcedCpuLevel& operator=(const ForcedCpuLevel&) = delete;

 private:
  std::optional<CpuLevel> before_;
};

}  // namespace kvcache::kernels
