// kvcache/model/identity.h - what makes two runs of a model interchangeable.
#pragma once

#include <filesystem>

#include "kvcache/model/checkpoint_file.h"
#include "kvcache/model/transformer.h"

namespace kvcache::model {

// Fields "model", "weights", "tokenizer", "dtype" and "arithmetic". Equal ones
// give equal bits; what differs is named by its field. `path` is what the model
// was loaded from. Weights are told apart by their sizes and samples of their
// bytes, 4 KiB in each of 256 places of a file, not by all of them: that takes
// milliseconds, and notices any training. "dtype" names the format of K and V
// unless it is plain.
CheckpointIdentity identity_of(const std::filesystem::path& path,
                               const Transformer& model,
                               KvFormat kv_format = KvFormat::kPlain);

}  // namespace kvcache::model
