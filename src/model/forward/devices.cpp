// src/model/forward/devices.cpp - whether this program can use a device.
#include "src/model/forward/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace kvcache::model {

at::Device usable_device(at::Device device) {
  if (device.is_cpu()) return at::kCPU;
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::impl::hasDeviceGuardImpl(device.type()), "[Transformer] device ",
      device, " must be linked into this program but is not",
      device.is_cuda() ? "; configure with -DKVCACHE_CUDA=ON, link "
                         "kvcache::cuda, or use the CPU."
                       : "; use the CPU.");
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  const int count = guard->deviceCount();
  TORCH_CHECK_VALUE(device.index() < count && count > 0,
                    "[Transformer] there must be a device ", device,
                    " but this machine has ", count, " of them",
                    count == 0 ? "; use the CPU." : "; count from 0.");
  return device.has_index() ? device : guard->getDevice();
}

}  // namespace kvcache::model
