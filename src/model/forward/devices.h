// src/model/forward/devices.h - whether this program can use a device.
#pragma once

#include <c10/core/Device.h>

namespace kvcache::model {

// `device` with its index filled in; the CPU has none. Throws if the program
// does not link the device, or the machine has none of that index.
at::Device usable_device(at::Device device);

}  // namespace kvcache::model
