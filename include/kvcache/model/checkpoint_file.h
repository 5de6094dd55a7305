// kvcache/model/checkpoint_file.h - a text and what a model remembers of it, in
// a file.
//
// A safetensors file with a digest for each section (the layout, the tokens,
// each block of keys and values, each state): a flipped byte is refused by the
// name of its section, another model's file by the name of the field that
// differs. Reading maps the file and looks at the sections it needs only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/types.h"

namespace kvcache::model {

// What a file must be of to be of use: model, weights, tokenizer, ... by name.
using CheckpointIdentity = std::map<std::string, std::string>;

// A text, and a row of a model after it.
struct SavedText {
  std::vector<int64_t> tokens = {};
  // One per part of the model, in blocks, all of tokens.size() tokens.
  std::vector<Checkpoint> parts = {};
  // Logits [V] after so many tokens: the first of a continuation, without any
  // work. Ascending.
  std::vector<std::pair<int64_t, Tensor>> logits = {};
  // Ranges of positions that decode steps wrote; the others prefill did.
  std::vector<std::pair<int64_t, int64_t>> decoded = {};
};

// Writes `text` to `path`: whole or not at all, and on disk when it returns.
// Errors: parts that are no checkpoints of `tokens` in blocks; what the disk
// says. An existing file is replaced.
void save_checkpoint(const std::filesystem::path& path, const SavedText& text,
                     const CheckpointIdentity& identity);

// A saved text. The file is untrusted: every number is checked before use.
// Thread-safe. A file that is replaced meanwhile stays as it was.
class CheckpointFile {
 public:
  // Checks the layout and the tokens, and reads nothing else.
  explicit CheckpointFile(const std::filesystem::path& path);
  ~CheckpointFile();
  CheckpointFile(CheckpointFile&&) noexcept;
  CheckpointFile& operator=(CheckpointFile&&) noexcept;

  const CheckpointIdentity& identity() const noexcept;
  // Throws, naming the first field that differs, unless all of `expected` is
  // there and the same.
  void check_identity(const CheckpointIdentity& expected) const;
  std::span<const int64_t> tokens() const noexcept;
  // Positions that read() can stop at, ascending; empty: any.
  std::vector<int64_t> restore_points() const;
  // Whether the logits after so many tokens are there.
  bool has_logits(int64_t position) const noexcept;
  size_t bytes() const noexcept;  // of the file
  const std::filesystem::path& path() const noexcept;

  // What the text shares with one that goes on differently after `length`
  // tokens: K and V of it, and the states up to the newest restore point there.
  // On the mapping, which lives as long as the tensors do. Throws, naming the
  // section, if what it reads is not what was written.
  SavedText read(int64_t length) const;
  SavedText read() const { return read(static_cast<int64_t>(tokens().size())); }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvcache::model
