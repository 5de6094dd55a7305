// config_bounds.h - the most that a configuration may ask
// for.
//
// Far above any model; below, products of any two sizes fit in 64 bits. The
// readers check what they compute with, ModelConfig::validate() all of it.

#pragma once

#include <cstdint>

namespace kvcache::model {

inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxHeads = 65536;
inline constexpr int64_t kMaxSize = int64_t{1} << 24;
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 28;
// Of linear attention, whose state is key times value values a head: a file of
// a few bytes must not ask for gigabytes.
inline constexpr int64_t kMaxLinearHeadDim = 1024;
inline constexpr int64_t kMinConvKernel = 2;
inline constexpr int64_t kMaxConvKernel = 16;
inline constexpr int64_t kMaxContext = int64_t{1} << 40;  // tokens

}  // namespace kvcache::model
