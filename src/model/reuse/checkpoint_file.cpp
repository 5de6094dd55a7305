// checkpoint_file.cpp - saved texts: sections, digests, identity.
#include "kvcache/model/checkpoint_file.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kvcache/model/safetensors.h"
#include "src/kv_format.h"
#include "src/model/reuse/saved_layout.h"
#include "src/model/weights/digest.h"
#include "src/model/weights/strict_json.h"

namespace kvcache::model {
namespace {

constexpr const char* kLayout = "kvcache.layout";
constexpr const char* kIdentity = "kvcache.identity";
constexpr const char* kDigest = "kvcache.digest";  // of the two before
constexpr const char* kTokens = "tokens";

std::string tensor_digest(const Tensor& dense) {
  return digest_of(dense.const_data_ptr(), dense.nbytes());
}

std::string layout_digest(const std::string& layout,
                          const std::string& identity) {
  const std::string both =
      std::to_string(layout.size()) + ':' + layout + identity;
  return digest_of(both);
}

// All values of a block in one row: as they lie, if they lie so.
Tensor flat_block(const std::shared_ptr<const KvBlock>& block) {
  std::vector<Tensor> parts;
  for (const KvTensors& pair : block->kv) {
    parts.push_back(pair.k);
    parts.push_back(pair.v);
  }
  if (parts.empty()) return {};
  const auto* next = static_cast<const char*>(parts[0].const_data_ptr());
  bool together = parts[0].is_cpu();
  int64_t values = 0;
  for (const Tensor& part : parts) {
    together =
        together && part.is_contiguous() && part.const_data_ptr() == next;
    next += part.nbytes();
    values += part.numel();
  }
  if (together) {
    return at::from_blob(
        const_cast<void*>(parts[0].const_data_ptr()), {values},
        [block](void*) {}, parts[0].options());
  }
  for (Tensor& part : parts) part = part.cpu().reshape(-1);
  return at::cat(parts);
}

// Views of K and V of each layer on the values of a block, of which the first
// `tokens` are wanted.
std::shared_ptr<const KvBlock> block_on(const Tensor& flat,
                                        const std::vector<AttentionLayer>& of,
                                        KvFormat format, int64_t first,
                                        int64_t stored, int64_t tokens) {
  auto block = std::make_shared<KvBlock>();
  block->first = first;
  block->tokens = tokens;
  int64_t offset = 0;
  for (const AttentionLayer& layer : of) {
    KvTensors pair;
    for (Tensor* to : {&pair.k, &pair.v}) {
      const int64_t size = record_size(format, layer.head_dim);
      const int64_t count = layer.heads * stored * size;
      *to = flat.narrow(0, offset, count)
                .view({layer.heads, stored, size})
                .narrow(1, 0, tokens);
      offset += count;
    }
    block->kv.push_back(std::move(pair));
  }
  return block;
}

using Sections = std::vector<std::pair<std::string, Tensor>>;

void add_part(const Checkpoint& from, size_t index, Sections& to) {
  for (size_t i = 0; i < from.blocks.size(); ++i) {
    const Tensor flat = flat_block(from.blocks[i]);
    if (flat.defined()) to.emplace_back(block_name(index, i), flat);
  }
  for (const auto& point : from.points) {
    const std::pair<const char*, const Tensor&> halves[] = {
        {"conv", point->conv}, {"state", point->state}};
    for (const auto& [what, tensor] : halves) {
      if (!tensor.defined()) continue;
      to.emplace_back(point_name(index, point->position, what),
                      tensor.cpu().contiguous().view(-1));
    }
  }
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const SavedText& text,
                     const CheckpointIdentity& identity) {
  TORCH_CHECK_VALUE(!text.tokens.empty() && !text.parts.empty(),
                    "[save_checkpoint] a text and its parts must be given but "
                    "there are ",
                    text.tokens.size(), " tokens and ", text.parts.size(),
                    " parts.");
  const c10::InferenceMode guard;
  SavedLayout layout = SavedLayout::of(text);
  Sections sections;
  sections.emplace_back(kTokens, at::tensor(text.tokens, at::kLong));
  for (size_t i = 0; i < text.parts.size(); ++i) {
    add_part(text.parts[i], i, sections);
  }
  for (const auto& [position, logits] : text.logits) {
    sections.emplace_back(logits_name(position), logits.cpu().contiguous());
  }
  for (const auto& [name, tensor] : sections) {
    layout.digests[name] = tensor_digest(tensor);
  }
  const std::string layout_json = layout.to_json();
  const std::string identity_json = nlohmann::json(identity).dump();
  write_safetensors(path, sections,
                    {{kLayout, layout_json},
                     {kIdentity, identity_json},
                     {kDigest, layout_digest(layout_json, identity_json)}});
}

struct CheckpointFile::Impl {
  explicit Impl(const std::filesystem::path& path);

  std::string name() const { return file.path().string(); }
  // The section, if it is what was written: `values` of `dtype`.
  Tensor section(const std::string& name, int64_t values,
                 std::optional<at::ScalarType> dtype) const;
  Checkpoint read_part(size_t index, int64_t length) const;
  // Positions at which every part has a restore point.
  std::vector<int64_t> points() const;
  bool stateful() const;

  SafetensorsFile file;
  SavedLayout layout;
  CheckpointIdentity identity;
  Tensor tokens;  // int64
};

CheckpointFile::Impl::Impl(const std::filesystem::path& path) : file(path) {
  const auto text = [&](const char* key) {
    const auto found = file.metadata().find(key);
    TORCH_CHECK_VALUE(found != file.metadata().end(), "[CheckpointFile] ",
                      name(), " must be a saved text but has no ", key,
                      "; it was written by something else.");
    return found->second;
  };
  const std::string layout_json = text(kLayout),
                    identity_json = text(kIdentity);
  TORCH_CHECK_VALUE(layout_digest(layout_json, identity_json) == text(kDigest),
                    "[CheckpointFile] ", name(),
                    ": the layout is not what was written; save the text "
                    "again.");
  layout = SavedLayout::from_json(layout_json, name());
  const nlohmann::json fields = parse_strict_json(identity_json, name());
  TORCH_CHECK_VALUE(fields.is_object(), "[CheckpointFile] ", name(),
                    ": the identity must be an object.");
  for (const auto& [field, value] : fields.items()) {
    identity[field] = value.is_string() ? value.get<std::string>() : "";
  }
  tokens = section(kTokens, layout.tokens, at::kLong);
}

Tensor CheckpointFile::Impl::section(
    const std::string& section, int64_t values,
    std::optional<at::ScalarType> dtype) const {
  const SafetensorsEntry* entry = file.find(section);
  const bool shaped =
      entry != nullptr && entry->shape == std::vector<int64_t>{values} &&
      (dtype ? entry->dtype == *dtype : c10::isFloatingType(entry->dtype));
  TORCH_CHECK_VALUE(shaped, "[CheckpointFile] ", name(), ": section ", section,
                    " must have ", values, " values but ",
                    entry == nullptr ? "is missing" : "has others",
                    "; save the text again.");
  const Tensor view = file.view(section);
  const auto digest = layout.digests.find(section);
  TORCH_CHECK_VALUE(
      digest != layout.digests.end() && digest->second == tensor_digest(view),
      "[CheckpointFile] ", name(), ": section ", section,
      " is not what was written; save the text again.");
  return view;
}

Checkpoint CheckpointFile::Impl::read_part(size_t index, int64_t length) const {
  const SavedPart& part = layout.parts[index];
  Checkpoint to{.length = length,
                .first_layer = part.first_layer,
                .layers = part.layers,
                .dtype = part.dtype,
                .format = part.format};
  const std::vector<AttentionLayer> attention = part.attention();
  int64_t first = 0;
  for (size_t i = 0; i < part.blocks.size() && first < length; ++i) {
    const int64_t stored = part.blocks[i];
    int64_t values = 0;
    TORCH_CHECK_VALUE(
        !__builtin_mul_overflow(part.token_values(), stored, &values),
        "[CheckpointFile] ", name(), ": a block must be smaller.");
    const Tensor flat = attention.empty()
                            ? Tensor()
                            : section(block_name(index, i), values,
                                      record_dtype(part.format, part.dtype));
    to.blocks.push_back(block_on(flat, attention, part.format, first, stored,
                                 std::min(stored, length - first)));
    first += stored;
  }
  for (const int64_t position : part.points) {
    if (position > length) break;
    auto point = std::make_shared<RestorePoint>();
    point->position = position;
    if (part.conv_width > 0) {
      point->conv = section(point_name(index, position, "conv"),
                            part.conv_width, std::nullopt)
                        .unsqueeze(0);
    }
    if (part.state_width > 0) {
      point->state = section(point_name(index, position, "state"),
                             part.state_width, at::kFloat)
                         .unsqueeze(0);
    }
    to.points.push_back(std::move(point));
  }
  return to;
}

bool CheckpointFile::Impl::stateful() const {
  return std::any_of(layout.parts.begin(), layout.parts.end(),
                     [](const SavedPart& part) {
                       return part.conv_width > 0 || part.state_width > 0;
                     });
}

std::vector<int64_t> CheckpointFile::Impl::points() const {
  std::vector<int64_t> common;
  bool first = true;
  for (const SavedPart& part : layout.parts) {
    if (part.conv_width == 0 && part.state_width == 0) continue;
    if (first) common = part.points;
    std::erase_if(common, [&](int64_t position) {
      return !std::binary_search(part.points.begin(), part.points.end(),
                                 position);
    });
    first = false;
  }
  return common;
}

CheckpointFile::CheckpointFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {}
CheckpointFile::~CheckpointFile() = default;
CheckpointFile::CheckpointFile(CheckpointFile&&) noexcept = default;
CheckpointFile& CheckpointFile::operator=(CheckpointFile&&) noexcept = default;

const CheckpointIdentity& CheckpointFile::identity() const noexcept {
  return impl_->identity;
}

void CheckpointFile::check_identity(const CheckpointIdentity& expected) const {
  for (const auto& [field, value] : expected) {
    const auto found = impl_->identity.find(field);
    const bool same = found != impl_->identity.end() && found->second == value;
    TORCH_CHECK_VALUE(
        same, "[CheckpointFile::check_identity] ", impl_->name(), ": ", field,
        " must be ", in_quotes(value), " but is ",
        found == impl_->identity.end() ? "missing" : in_quotes(found->second),
        "; it was saved for another one.");
  }
}

std::span<const int64_t> CheckpointFile::tokens() const noexcept {
  return {impl_->tokens.const_data_ptr<int64_t>(),
          static_cast<size_t>(impl_->layout.tokens)};
}

std::vector<int64_t> CheckpointFile::restore_points() const {
  return impl_->points();
}

bool CheckpointFile::has_logits(int64_t position) const noexcept {
  return std::binary_search(impl_->layout.logits.begin(),
                            impl_->layout.logits.end(), position);
}

size_t CheckpointFile::bytes() const noexcept {
  std::error_code error;
  const auto size = std::filesystem::file_size(impl_->file.path(), error);
  return error ? 0 : static_cast<size_t>(size);
}

const std::filesystem::path& CheckpointFile::path() const noexcept {
  return impl_->file.path();
}

SavedText CheckpointFile::read(int64_t length) const {
  TORCH_CHECK_VALUE(length >= 0 && length <= impl_->layout.tokens,
                    "[CheckpointFile::read] length must be in [0, ",
                    impl_->layout.tokens, "] but got ", length,
                    "; a saved text has only its own tokens.");
  if (impl_->stateful()) {
    const std::vector<int64_t> points = impl_->points();
    const auto behind = std::upper_bound(points.begin(), points.end(), length);
    length = behind == points.begin() ? 0 : *(behind - 1);
  }
  SavedText text;
  text.tokens.assign(tokens().begin(), tokens().begin() + length);
  for (size_t i = 0; i < impl_->layout.parts.size(); ++i) {
    text.parts.push_back(impl_->read_part(i, length));
  }
  for (const int64_t position : impl_->layout.logits) {
    if (position > length) break;
    const std::string name = logits_name(position);
    const SafetensorsEntry* entry = impl_->file.find(name);
    const int64_t width =
        entry != nullptr && entry->shape.size() == 1 ? entry->shape[0] : 0;
    text.logits.emplace_back(position, impl_->section(name, width, at::kFloat));
  }
  for (const auto& [first, last] : impl_->layout.decoded) {
    if (first < length) {
      text.decoded.emplace_back(first, std::min(last, length));
    }
  }
  return text;
}

}  // namespace kvcache::model
