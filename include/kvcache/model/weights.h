// kvcache/model/weights.h - a model on disk: its configuration and tensors.
//
// Tensors have one set of names and one layout whatever the file is. Names are
// GGUF's (token_embd.weight, blk.3.attn_q.weight, ...), matrices are
// [out, in], heads of q and k are in half rotation order. Value heads of linear
// attention stand beside the key head that they read, the convolution is
// [channels, taps] with the newest tap last, and blk.0.ssm_a is -exp(A_log).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcache/model/config.h"
#include "kvcache/model/gguf.h"
#include "kvcache/model/log.h"

namespace kvcache::model {

// One tensor of a model.
struct WeightInfo {
  std::string name;            // "blk.0.attn_q.weight"
  std::string name_in_file;    // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [out, in], [rows, width] or [values]
  c10::ScalarType dtype = c10::ScalarType::Float;  // Float if quantised
  std::string type_name;  // as the file says it: "BF16", "q4_1"
  bool quantised = false;
};

// How a file stores 32 values of a row: GGUF's blocks of that size that keep
// their values when weights stay packed. kNone: in any other way.
enum class BlockType : uint8_t { kNone, kQ4_0, kQ4_1, kQ5_0, kQ8_0 };
int64_t block_bytes(BlockType type);  // 0 for kNone

// The tensors of one model, mapped and read on demand. Thread-safe.
//
// Errors: an unknown name, a row out of range and a dtype other than float32,
// bfloat16 and float16 throw.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  const std::vector<WeightInfo>& tensors() const noexcept { return tensors_; }
  bool contains(std::string_view name) const noexcept;
  const WeightInfo& info(std::string_view name) const;
  const std::vector<int64_t>& shape(std::string_view name) const;
  c10::ScalarType dtype(std::string_view name) const;

  // The whole tensor, contiguous, on the CPU. May lie on the mapped file (which
  // then lives as long as the tensor): do not write to it.
  at::Tensor read(std::string_view name, c10::ScalarType dtype) const;

  // Rows [first, first + count) of a matrix straight from the file, as float32
  // into `out`, [count, in]. The embedding of a token is one row.
  void read_rows(std::string_view name, int64_t first, int64_t count,
                 float* out) const;
  // The same into `out`, [count, in], contiguous float32, bfloat16 or float16.
  void read_rows(std::string_view name, int64_t first, int64_t count,
                 at::Tensor& out) const;

  // How rows of a matrix are stored; kNone if a row is not as in the file.
  BlockType block_type(std::string_view name) const;
  // Rows [first, first + count) of a matrix of blocks, as they are stored, into
  // `out`, [count, in / 32 blocks].
  void read_blocks(std::string_view name, int64_t first, int64_t count,
                   std::byte* out) const;

  // What the file calls tensor `name`, be it there or not.
  virtual std::string name_in_file(std::string_view name) const;

  // Forgets a tensor that the model does not need.
  void leave_out(std::string_view name);

  // Gives the mapped pages back; later reads bring them in again.
  virtual void release_pages() const noexcept = 0;

 protected:
  WeightSource() = default;
  // Throws if two tensors of the file have one name here.
  void add(WeightInfo info);

 private:
  // Called with checked arguments.
  virtual at::Tensor do_read(const WeightInfo& info,
                             c10::ScalarType dtype) const = 0;
  virtual void do_read_rows(const WeightInfo& info, int64_t first,
                            int64_t count, float* out) const = 0;
  virtual BlockType do_block_type(const WeightInfo& info) const;
  virtual void do_read_blocks(const WeightInfo& info, int64_t first,
                              int64_t count, std::byte* out) const;

  const WeightInfo& rows_of(std::string_view name, int64_t first,
                            int64_t count) const;

  std::vector<WeightInfo> tensors_;
  std::unordered_map<std::string, size_t> index_;  // into tensors_
};

// One tensor that a configuration asks for.
struct ExpectedTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Every tensor that a model of `config` consists of. The head (output.weight)
// is among them only if it is not tied.
std::vector<ExpectedTensor> expected_tensors(const ModelConfig& config);

// Throws if `source` lacks a tensor of `config`, has one too many, or one of
// another shape; names them all up to a few, with both shapes.
void check_tensors(const ModelConfig& config, const WeightSource& source);

enum class FileKind { kSafetensors, kGguf };

// A model, opened: checked, nothing read but the headers.
struct OpenedModel {
  std::filesystem::path path;
  FileKind kind = FileKind::kSafetensors;
  ModelConfig config;
  std::unique_ptr<WeightSource> weights;
  std::shared_ptr<const GgufFile> gguf;  // its metadata; null for a folder
  bool quantised = false;                // any tensor is
  // What most values are stored in; Float if that is a quantised type.
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// Opens a folder with config.json and safetensors, or a .gguf file. Every
// tensor is accounted for: a missing, unexpected or misshapen one throws.
//
// The head of a tied model is the embedding. If such a model brings a head too,
// an equal one is left out, and a different one is used, with a warning.
OpenedModel open_model(const std::filesystem::path& path,
                       const OpenOptions& options = {});

}  // namespace kvcache::model
