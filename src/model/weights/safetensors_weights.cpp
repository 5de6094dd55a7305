// safetensors_weights.cpp - a Hugging Face folder under
// canonical names.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>

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

class SafetensorsWeights : public WeightSource {
 public:
  SafetensorsWeights(const std::filesystem::path& folder,
                     const ModelConfig& config)
      : files_(folder), architecture_(config.architecture) {
    for (const std::string& name : files_.names()) add_tensor(name);
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
    info.shape = entry.shape;
    if (canonical.transposed)
      std::reverse(info.shape.begin(), info.shape.end());
    info.dtype = entry.dtype;
    info.type_name = file_type_name(entry.dtype);
    TORCH_CHECK(c10::isFloatingType(entry.dtype), "[open_model] ",
                files_.file_of(name).string(), ": tensor ", in_quotes(name),
                " is ", info.type_name,
                ", but weights must be floating-point; use the plain model.");
    add(std::move(info));
  }

  // In canonical layout, on the mapping.
  at::Tensor view(const WeightInfo& info) const {
    const at::Tensor tensor = files_.view(info.name_in_file);
    const auto name = canonical_name(architecture_, info.name_in_file);
    return name && name->transposed ? tensor.t() : tensor;
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
    const std::filesystem::path& folder, const ModelConfig& config) {
  return std::make_unique<SafetensorsWeights>(folder, config);
}

}  // namespace kvcache::model
