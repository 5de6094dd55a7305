// src/model/forward/forward_options.h - what a caller may ask of a forward.
#pragma once

#include "kvcache/model/config.h"
#include "kvcache/model/language_model.h"

namespace kvcache::model {

// `options` of a forward over `ids` [B, T], checked: last_layer is filled in,
// return_hidden is set if layers follow, tensors are on `device`. Values that
// lie on another device than the CPU are not read.
// `adapters`: how many there are.
ForwardOptions checked_options(const ForwardOptions& options, const Tensor& ids,
                               const ModelConfig& config, at::Device device,
                               int64_t adapters);

}  // namespace kvcache::model
