// identity.cpp - what makes two runs of a model interchangeable.
#include "kvcache/model/identity.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <vector>

#include "kvcache/model/mapped_file.h"
#include "src/kernels/cpu_level.h"
#include "src/kv_format.h"
#include "src/model/weights/digest.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPlaces = 256;
constexpr size_t kSample = 4096;  // bytes

// Its size, and what stands in some places of it.
std::string fingerprint(const fs::path& path) {
  const MappedFile file(path);
  const std::span<const std::byte> bytes = file.bytes();
  std::string sample = std::to_string(bytes.size());
  const size_t step = std::max(kSample, bytes.size() / kPlaces);
  for (size_t at = 0; at < bytes.size(); at += step) {
    const size_t count = std::min(kSample, bytes.size() - at);
    sample.append(reinterpret_cast<const char*>(bytes.data()) + at, count);
  }
  return digest_of(sample);
}

// Of all files of a folder whose names end with one of `endings`, by name.
std::string fingerprint(const fs::path& folder,
                        const std::vector<std::string>& endings) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool wanted = std::any_of(
        endings.begin(), endings.end(),
        [&](const std::string& ending) { return name.ends_with(ending); });
    if (wanted && entry.is_regular_file() && entry.file_size() > 0) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  std::string all;
  for (const fs::path& file : files) {
    all += file.filename().string() + '=' + fingerprint(file) + ';';
  }
  return digest_of(all);
}

// What decides the bits of K and V beside weights and tokens.
std::string arithmetic_of(const Transformer& model) {
  if (model.forward_kind() != ForwardKind::kPackedCpu) {
    return c10::str("operators, ", model.device());
  }
  const char* level = kernels::name(kernels::cpu_level());
  switch (model.packing()) {
    case WeightPacking::kNone:
      break;
    case WeightPacking::kAuto:
    case WeightPacking::kQ8:
      return c10::str("quantised, 8 bits where not kept, ", level);
    case WeightPacking::kQ4:
      return c10::str("quantised, 4 bits where not kept, ", level);
  }
  return c10::str("packed, ", level);
}

}  // namespace

CheckpointIdentity identity_of(const fs::path& path, const Transformer& model,
                               KvFormat kv_format) {
  const ModelConfig& config = model.config();
  const bool folder = fs::is_directory(path);
  CheckpointIdentity identity;
  identity["model"] =
      c10::str(config.architecture, " ", config.layers, "x", config.hidden_size,
               ", vocabulary ", config.vocab_size);
  identity["weights"] = folder
                            ? fingerprint(path, {".safetensors", "config.json"})
                            : fingerprint(path);
  identity["tokenizer"] =
      folder ? fingerprint(path, {"tokenizer.json", "tokenizer.model"})
             : identity["weights"];
  identity["dtype"] = c10::str(model.dtype());
  if (kv_format != KvFormat::kPlain) {
    identity["dtype"] += std::string(", K/V in ") + format_text(kv_format);
  }
  identity["arithmetic"] = arithmetic_of(model);
  return identity;
}

}  // namespace kvcache::model
