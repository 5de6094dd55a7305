// saved_texts.h - a folder of saved texts: what is in it, what has to go.
#pragma once

#include <mutex>

#include "kvcache/model/prefix_cache.h"

namespace kvcache::model {

// Thread-safe. Other processes may use the same folder: files come and go
// whole.
class SavedTexts {
 public:
  explicit SavedTexts(PrefixFolder folder);

  // A text that shares more than `more_than` of `tokens`, in a place to restore
  // at (a multiple of `multiple`): before the last token, or behind it if the
  // logits are there.
  struct Found {
    std::shared_ptr<const StoredText> text;
    int64_t position = 0;
    int64_t matched = 0;
    Tensor logits;  // after the position; undefined: not kept
  };
  std::optional<Found> find(std::span<const int64_t> tokens,
                            const Namespace& space, int64_t multiple,
                            int64_t more_than);
  // A text that is in the store and in no file.
  void note(std::span<const int64_t> tokens, const Namespace& space);
  // Writes the noted ones that the store still holds.
  int64_t save(CheckpointStore& store);

 private:
  struct Entry {
    CheckpointFile file;
    std::string space;  // digest
  };
  struct Noted {
    std::vector<int64_t> tokens;
    Namespace space;
  };
  void make_folder() const;
  void scan();
  const Entry* best_for(std::span<const int64_t> tokens, const Namespace& space,
                        int64_t multiple, Found& found) const;
  static void take(const Entry& entry, int64_t multiple, Found& found);
  // False: it is larger than the folder may be.
  bool write(const Noted& noted, const StoredText& text);
  void drop_superseded(const CheckpointFile& by, const std::string& space);
  void make_room(size_t bytes);
  void report(const std::string& line) const;

  const PrefixFolder folder_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<Noted> noted_;
};

}  // namespace kvcache::model
