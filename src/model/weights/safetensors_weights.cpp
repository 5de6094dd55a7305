// safetensors_weights.cpp - a Hugging Face folder under canonical names.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "kvcache/model/safetensors.h"
#include "src/model/weights/safetensors_types.h"
#include "src/model/weights/strict_json.h"
#include "src/model/weights/tensor_names.h"
#include "src/model/weights/weight_files.h"

namespace kvcache::model {
namespace {

std::string file_type_name(c10::ScalarType dtype) {
  for (const auto& [name, type] : kSafetensorsTypes)
    if (type == dtype) return std::string(name);
  return c10::toString(dtype);
}

// The shape under the canonical name; a shape that the way of storing does not
// allow stays, for the check of all tensors to report.
std::vector<int64_t> wanted_shape(std::vector<int64_t> shape, Stored stored) {
  if (stored == Stored::kTransposed) std::reverse(shape.begin(), shape.end());
  if (stored == Stored::kChannels && shape.size() == 3 && shape[1] == 1)
    shape.erase(shape.begin() + 1);
  return shape;
}

class SafetensorsWeights : public WeightSource {
 public:
  SafetensorsWeights(const std::filesystem::path& folder,
                     const ModelConfig& config, const OpenOptions& options)
      : files_(folder), architecture_(config.architecture) {
    std::map<std::string_view, size_t> left_out;
    for (const std::string& name : files_.names()) {
      const std::string_view part = other_part(architecture_, name);
      if (!part.empty()) ++left_out[part];
      add_tensor(name);
    }
    if (!options.log || left_out.empty()) return;
    std::string line;
    for (const auto& [part, count] : left_out)
      line += (line.empty() ? "" : ", ") + std::to_string(count) + " of " +
              std::string(part) + "*";
    options.log(LogLevel::kInfo,
                config.source +
                    ": left out are tensors that text does not need: " + line +
                    ".");
  }

  std::string name_in_file(std::string_view name) const override {
    return hugging_face_name(architecture_, name);
  }

  void release_pages() const noexcept override { files_.release_pages(); }

 private:
  // A name that does not belong to the family is kept as it is, so that the
  // check of all tensors reports it.
  void add_tensor(const std::string& name) {
    const SafetensorsEntry& entry = *files_.find(name);
    const CanonicalName canonical =
        canonical_name(architecture_, name).value_or(CanonicalName{name});
    if (canonical.name.empty()) return;
    WeightInfo info;
    info.name = canonical.name;
    info.name_in_file = name;
    info.shape = wanted_shape(entry.shape, canonical.stored);
    info.dtype = entry.dtype;
    info.type_name = file_type_name(entry.dtype);
    TORCH_CHECK(c10::isFloatingType(entry.dtype), "[open_model] ",
                files_.file_of(name).string(), ": tensor ", in_quotes(name),
                " is ", info.type_name,
                ", but weights must be floating-point; use the plain model.");
    add(std::move(info));
  }

  Stored stored(const WeightInfo& info) const {
    const auto name = canonical_name(architecture_, info.name_in_file);
    return name ? name->stored : Stored::kAsItIs;
  }

  // In canonical layout; on the mapping where the values are the file's.
  at::Tensor view(const WeightInfo& info) const {
    const at::Tensor tensor = files_.view(info.name_in_file);
    switch (stored(info)) {
      case Stored::kTransposed:
        return tensor.t();
      case Stored::kChannels:
        return tensor.squeeze(1);
      case Stored::kLogDecay:
        return tensor.to(at::kFloat).exp().neg();
      case Stored::kAsItIs:
        break;
    }
    return tensor;
  }

  at::Tensor do_read(const WeightInfo& info,
                     c10::ScalarType dtype) const override {
    return view(info).to(dtype).contiguous();
  }

  void do_read_rows(const WeightInfo& info, int64_t first, int64_t count,
                    float* out) const override {
    at::from_blob(out, {count, info.shape[1]}, at::kFloat)
        .copy_(view(info).narrow(0, first, count));
  }

  SafetensorsFolder files_;
  const std::string architecture_;
};

}  // namespace

std::unique_ptr<WeightSource> open_safetensors(
    const std::filesystem::path& folder, const ModelConfig& config,
    const OpenOptions& options) {
  return std::make_unique<SafetensorsWeights>(folder, config, options);
}

}  // namespace kvcache::model
