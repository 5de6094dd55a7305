// cuda/device.h - whether a CUDA device can run our kernels.

#pragma once

#include <optional>
#include <string>

namespace kvcache::cuda {

// Why CUDA device `index` cannot be used, in one line, or nothing if it can: it
// is found, and it runs code of the architecture compiled for.
std::optional<std::string> unusable_reason(int index);

}  // namespace kvcache::cuda
