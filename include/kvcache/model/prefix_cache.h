// kvcache/model/prefix_cache.h - requests go on from what earlier ones left.
//
// Before a prompt is computed, the deepest saved state that its tokens begin
// with is restored; when its text is over, the text is kept for later ones. The
// tokens of an answer are those of a run without it, bit for bit on the CPU:
// where the model is row-exact a text is taken up at any token, elsewhere at
// canonical chunks, so that the rest makes the calls of a cold run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvcache/cache.h"
#include "kvcache/checkpoint_policy.h"
#include "kvcache/checkpoint_store.h"
#include "kvcache/model/checkpoint_file.h"
#include "kvcache/model/language_model.h"
#include "kvcache/model/log.h"

namespace kvcache::model {

// Texts that outlive the process.
struct PrefixFolder {
  std::filesystem::path path = {};     // made if it is not there; empty: none
  size_t max_bytes = size_t{1} << 30;  // the least recently used go first
  // What the files are of: another model's are passed over.
  CheckpointIdentity identity = {};
  LogSink log = {};  // files that cannot be used
};

struct PrefixOptions {
  int64_t block = 64;  // tokens of the blocks that texts share
  // Tokens of a prefill step; where texts are taken up if not at any token.
  int64_t chunk = 256;
  // Keep the logits after a prompt: the same prompt again needs no forward.
  bool keep_logits = true;
  // Restore points of recurrent layers within a prompt, beside its end. Moved
  // down to chunks where those are the only places.
  PlacementOptions placement = {.rule = PlacementRule::kGeneration,
                                .stride = 256,
                                .align = 1,
                                .min_prefix = 0};
  PrefixFolder folder = {};
};

// What a request shared with earlier ones.
struct Reuse {
  LookupReport report = {};
  bool from_folder = false;
  bool in_row = false;        // the row held it still: nothing was copied
  bool whole_prompt = false;  // its logits were kept: nothing was computed
};

// The prefix cache of one model. Thread-safe; the rows it fills are not.
class PrefixCache {
 public:
  // Opens the files of the folder; those that cannot be used are named in its
  // log.
  PrefixCache(std::shared_ptr<const LanguageModel> model,
              std::shared_ptr<CheckpointStore> store,
              PrefixOptions options = {});
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  CheckpointStore& store() const noexcept;
  // Texts are taken up at any token, not at chunks only.
  bool any_token() const noexcept;
  // Of so many tokens: 1, or those of a chunk.
  int64_t restore_multiple() const noexcept;
  // Writes what the store holds but no file does. Returns how many files were
  // written; throws what the disk says. Nothing without a folder.
  int64_t save();

 private:
  friend class PrefixRun;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// When a row gets what was found. A prompt whose logits are known gives its
// first token before anything is copied, if the row may wait for that.
enum class RestoreTime : uint8_t { kAtOnce, kBehindFirstToken };

// One request on its way through one row of a cache. All it is given must
// outlive it.
class PrefixRun {
 public:
  // Looks up `prompt`, and restores what it finds into the row, unless that
  // holds as much of it already. `marks`: ends of turns, for the placement.
  // Throws for a cache with rings, of which no block can be kept.
  // kBehindFirstToken: where logits() are there, arrive() restores.
  PrefixRun(PrefixCache& prefix, Cache& cache, int64_t row,
            std::span<const int64_t> prompt, const Namespace& space,
            std::span<const int64_t> marks = {},
            RestoreTime when = RestoreTime::kAtOnce);

  const Reuse& reuse() const noexcept { return reuse_; }
  // [1, 1, V] after the whole prompt, if an earlier request had the same; else
  // undefined.
  const Tensor& logits() const noexcept { return hit_.final_hidden; }
  // Tokens of the prompt that the row holds, or will behind arrive().
  int64_t held() const noexcept { return held_; }
  // Restores what waited, before the row is used. Else nothing.
  void arrive();
  // Where the prefill step from position `done` on has to end.
  int64_t step_end(int64_t done) const;
  // After a prefill step up to `done`; `logits` [1, 1, V] of its last token.
  void prefilled(int64_t done, const Tensor& logits);
  // The text is over: keeps what the row holds of `sequence`. Throws nothing:
  // what cannot be kept is not.
  void keep(std::span<const int64_t> sequence) noexcept;

 private:
  void find(std::span<const int64_t> prompt);
  void stay(int64_t held);
  int64_t kept_length() const;
  StoredText stored(int64_t length) const;

  PrefixCache::Impl& prefix_;
  Cache& cache_;
  int64_t row_;
  int64_t prompt_;  // tokens
  int64_t held_ = 0;
  bool waiting_ = false;
  Namespace space_;
  Hit hit_;
  Reuse reuse_;
  Tensor prompt_logits_;
  std::vector<int64_t> ends_;  // of steps, for restore points; ascending
};

}  // namespace kvcache::model
