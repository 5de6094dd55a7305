// weight_files.h - the two kinds of files behind WeightSource.

#pragma once

#include <filesystem>
#include <memory>

#include "kvcache/model/weights.h"

namespace kvcache::model {

// Of a ggml_type.
BlockType block_type_of(int type);

// Both tell the log what they leave out.
std::unique_ptr<WeightSource> open_safetensors(
    const std::filesystem::path& folder, const ModelConfig& config,
    const OpenOptions& options);

std::unique_ptr<WeightSource> open_gguf(std::shared_ptr<const GgufFile> file,
                                        const ModelConfig& config,
                                        const OpenOptions& options);

}  // namespace kvcache::model
