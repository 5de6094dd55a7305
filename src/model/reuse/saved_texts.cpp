// saved_texts.cpp - a folder of saved texts: what is in it, what has to go.
#include "src/model/reuse/saved_texts.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "src/model/reuse/saved_layout.h"
#include "src/model/weights/digest.h"

namespace kvcache::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSpace = "namespace";
constexpr const char* kEnding = ".kvtext.safetensors";

// Unambiguous: each part with its length.
std::string key_of(const Namespace& space) {
  std::string key;
  for (const std::string& part :
       {space.model, space.base, space.adapter,
        std::to_string(space.active_from), space.tenant}) {
    key += std::to_string(part.size()) + ':' + part;
  }
  return key;
}

// Names no tenant.
std::string space_digest(const Namespace& space) {
  return digest_of(key_of(space));
}

int64_t shared_tokens(std::span<const int64_t> a, std::span<const int64_t> b) {
  const size_t most = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(most);
  return std::mismatch(a.begin(), end, b.begin()).first - a.begin();
}

// The deepest place of `file` to restore at, at or before `limit`.
int64_t place_in(const CheckpointFile& file, int64_t limit, int64_t multiple) {
  const std::vector<int64_t> points = file.restore_points();
  if (points.empty()) return limit - limit % multiple;
  int64_t place = 0;
  for (const int64_t point : points) {
    if (point <= limit && point % multiple == 0) place = point;
  }
  return place;
}

StoredText stored_from(SavedText saved, int64_t multiple) {
  StoredText text{.parts = std::move(saved.parts),
                  .decoded = std::move(saved.decoded),
                  .restore_multiple = multiple};
  for (auto& [position, logits] : saved.logits) {
    text.extras.push_back(
        {.position = position,
         .features = {},
         .final_hidden = logits.view({1, 1, logits.numel()})});
  }
  return text;
}

SavedText saved_from(const StoredText& text, std::span<const int64_t> tokens) {
  SavedText saved{.tokens = {tokens.begin(), tokens.end()},
                  .parts = text.parts,
                  .decoded = text.decoded};
  for (const PointExtras& extra : text.extras) {
    if (extra.final_hidden.defined()) {
      saved.logits.emplace_back(extra.position, extra.final_hidden.flatten());
    }
  }
  return saved;
}

// Of a process that was killed while it wrote; nobody writes for an hour.
bool is_left_over(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  if (name.find(std::string(kEnding) + ".tmp-") == name.npos) return false;
  std::error_code error;
  const auto time = entry.last_write_time(error);
  return !error &&
         fs::file_time_type::clock::now() - time > std::chrono::hours(1);
}

// At most what the file of `saved` takes: its values, and a header with two
// lines on each section and the layout in quotes.
size_t file_bytes(const SavedText& saved, const CheckpointIdentity& identity) {
  constexpr size_t kLines = 256;  // names, a shape, two offsets, a digest
  const std::string layout = SavedLayout::of(saved).to_json();
  size_t sections = 2 + saved.logits.size();  // tokens, the digest of all
  size_t bytes = saved.tokens.size() * sizeof(int64_t) + 2 * layout.size();
  for (const Checkpoint& part : saved.parts) {
    bytes += part.bytes();
    sections += part.blocks.size() + 2 * part.points.size();
  }
  for (const auto& [position, logits] : saved.logits) bytes += logits.nbytes();
  for (const auto& [field, value] : identity) {
    bytes += 2 * (field.size() + value.size());
  }
  return bytes + (sections + identity.size()) * kLines;
}

}  // namespace

SavedTexts::SavedTexts(PrefixFolder folder) : folder_(std::move(folder)) {
  make_folder();
  scan();
}

// There, whoever removed it meanwhile.
void SavedTexts::make_folder() const {
  std::error_code error;
  fs::create_directories(folder_.path, error);
  TORCH_CHECK_VALUE(
      !error && fs::is_directory(folder_.path, error), "[PrefixCache] ",
      folder_.path.string(), " must be a folder to keep texts in but got: ",
      error ? error.message() : "it is a file", "; name one that can be made.");
}

void SavedTexts::report(const std::string& line) const {
  if (folder_.log) folder_.log(LogLevel::kWarning, line);
}

void SavedTexts::scan() {
  for (const auto& entry : fs::directory_iterator(folder_.path)) {
    const fs::path& path = entry.path();
    if (!path.filename().string().ends_with(kEnding)) continue;
    try {
      CheckpointFile file(path);
      file.check_identity(folder_.identity);
      const auto space = file.identity().find(kSpace);
      if (space == file.identity().end()) continue;
      std::string of = space->second;
      entries_.push_back({std::move(file), std::move(of)});
    } catch (const c10::Error& error) {
      report(error.what_without_backtrace());
    }
  }
}

std::optional<SavedTexts::Found> SavedTexts::find(
    std::span<const int64_t> tokens, const Namespace& space, int64_t multiple,
    int64_t more_than) {
  const std::scoped_lock lock(mutex_);
  while (true) {  // each turn ends, or drops a damaged file
    Found found;
    found.position = more_than;
    const Entry* const best = best_for(tokens, space, multiple, found);
    if (best == nullptr) return std::nullopt;
    try {
      take(*best, multiple, found);
      return found;
    } catch (const c10::Error& error) {
      report(error.what_without_backtrace());
      std::erase_if(entries_, [&](const Entry& e) { return &e == best; });
    }
  }
}

// The file with the deepest place behind found.position, which moves there.
const SavedTexts::Entry* SavedTexts::best_for(std::span<const int64_t> tokens,
                                              const Namespace& space,
                                              int64_t multiple,
                                              Found& found) const {
  const auto size = static_cast<int64_t>(tokens.size());
  const std::string of = space_digest(space);
  const Entry* best = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.space != of) continue;
    const int64_t matched = shared_tokens(entry.file.tokens(), tokens);
    const int64_t limit = entry.file.has_logits(size) ? size : size - 1;
    const int64_t place =
        place_in(entry.file, std::min(matched, limit), multiple);
    if (place > found.position) {
      best = &entry;
      found.position = place;
      found.matched = matched;
    }
  }
  return best;
}

void SavedTexts::take(const Entry& entry, int64_t multiple, Found& found) {
  auto text = std::make_shared<StoredText>(
      stored_from(entry.file.read(found.position), multiple));
  for (const PointExtras& extra : text->extras) {
    if (extra.position == found.position) found.logits = extra.final_hidden;
  }
  found.text = std::move(text);
  std::error_code ignored;  // the order of age is a hint
  fs::last_write_time(entry.file.path(), fs::file_time_type::clock::now(),
                      ignored);
}

void SavedTexts::note(std::span<const int64_t> tokens, const Namespace& space) {
  const std::scoped_lock lock(mutex_);
  // A text that went on stands for its beginning.
  std::erase_if(noted_, [&](const Noted& noted) {
    return noted.space == space && noted.tokens.size() <= tokens.size() &&
           std::equal(noted.tokens.begin(), noted.tokens.end(), tokens.begin());
  });
  noted_.push_back({{tokens.begin(), tokens.end()}, space});
}

int64_t SavedTexts::save(CheckpointStore& store) {
  const std::scoped_lock lock(mutex_);
  int64_t written = 0;
  while (!noted_.empty()) {
    const Noted noted = std::move(noted_.back());
    noted_.pop_back();
    const auto length = static_cast<int64_t>(noted.tokens.size());
    const Hit hit = store.lookup({.tokens = noted.tokens,
                                  .space = noted.space,
                                  .limit = length,
                                  .deferred = true});
    if (!hit.text || hit.position != length) continue;
    if (hit.text->parts[0].length != length) continue;
    if (write(noted, *hit.text)) ++written;
  }
  return written;
}

bool SavedTexts::write(const Noted& noted, const StoredText& text) {
  const std::string space = space_digest(noted.space);
  CheckpointIdentity identity = folder_.identity;
  identity[kSpace] = space;
  if (!noted.space.adapter.empty()) {
    identity["adapter"] = noted.space.adapter + " from " +
                          std::to_string(noted.space.active_from);
  }
  const SavedText saved = saved_from(text, noted.tokens);
  const size_t bytes = file_bytes(saved, identity);
  if (bytes > folder_.max_bytes) {
    report("a text of " + std::to_string(bytes) +
           " bytes is not saved: " + folder_.path.string() + " may have " +
           std::to_string(folder_.max_bytes));
    return false;
  }
  make_folder();
  make_room(bytes);
  const std::string tokens =
      digest_of(noted.tokens.data(), noted.tokens.size() * sizeof(int64_t));
  std::string of = space;
  for (const auto& [field, value] : folder_.identity) of += field + '=' + value;
  const fs::path path =
      folder_.path / (digest_of(of).substr(0, 8) + "-" + tokens + kEnding);
  save_checkpoint(path, saved, identity);
  try {
    CheckpointFile file(path);
    drop_superseded(file, space);
    entries_.push_back({std::move(file), space});
  } catch (const c10::Error& error) {  // another process made room at once
    report(error.what_without_backtrace());
  }
  return true;
}

// Texts that `by` begins with, where it can be restored wherever they can.
void SavedTexts::drop_superseded(const CheckpointFile& by,
                                 const std::string& space) {
  const std::vector<int64_t> places = by.restore_points();
  std::erase_if(entries_, [&](const Entry& entry) {
    const std::span<const int64_t> tokens = entry.file.tokens();
    const std::vector<int64_t> own = entry.file.restore_points();
    if (entry.space != space ||
        shared_tokens(tokens, by.tokens()) <
            static_cast<int64_t>(tokens.size()) ||
        !std::includes(places.begin(), places.end(), own.begin(), own.end())) {
      return false;
    }
    std::error_code ignored;
    if (entry.file.path() != by.path()) fs::remove(entry.file.path(), ignored);
    return true;
  });
}

// Files of other models count, and go, as well.
void SavedTexts::make_room(size_t bytes) {
  struct Aged {
    fs::file_time_type time;
    fs::path path;
    size_t bytes;
  };
  std::vector<Aged> files;
  size_t used = bytes;
  for (const auto& entry : fs::directory_iterator(folder_.path)) {
    std::error_code error;  // one that went meanwhile
    if (is_left_over(entry)) fs::remove(entry.path(), error);
    if (!entry.path().filename().string().ends_with(kEnding)) continue;
    const auto size = entry.file_size(error);
    const auto time = entry.last_write_time(error);
    if (error) continue;
    files.push_back({time, entry.path(), static_cast<size_t>(size)});
    used += files.back().bytes;
  }
  std::sort(files.begin(), files.end(),
            [](const Aged& a, const Aged& b) { return a.time < b.time; });
  for (const Aged& oldest : files) {
    if (used <= folder_.max_bytes) return;
    std::error_code ignored;
    fs::remove(oldest.path, ignored);
    used -= oldest.bytes;
    std::erase_if(entries_, [&](const Entry& entry) {
      return entry.file.path() == oldest.path;
    });
  }
}

}  // namespace kvcache::model
