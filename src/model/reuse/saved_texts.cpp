// saved_texts.cpp - a folder of saved texts: what is in it, what has to go.
#include "src/model/reuse/saved_texts.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

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

}  // namespace

SavedTexts::SavedTexts(PrefixFolder folder) : folder_(std::move(folder)) {
  fs::create_directories(folder_.path);
  scan();
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
  const auto size = static_cast<int64_t>(tokens.size());
  const std::string of = space_digest(space);
  const Entry* best = nullptr;
  Found found;
  found.position = more_than;
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
  if (best == nullptr) return std::nullopt;
  try {
    auto text = std::make_shared<StoredText>(
        stored_from(best->file.read(found.position), multiple));
    for (const PointExtras& extra : text->extras) {
      if (extra.position == found.position) found.logits = extra.final_hidden;
    }
    found.text = std::move(text);
    std::error_code ignored;  // the order of age is a hint
    fs::last_write_time(best->file.path(), fs::file_time_type::clock::now(),
                        ignored);
    return found;
  } catch (const c10::Error& error) {
    report(error.what_without_backtrace());
    std::erase_if(entries_, [&](const Entry& e) { return &e == best; });
    return std::nullopt;
  }
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
    write(noted, *hit.text);
    ++written;
  }
  return written;
}

void SavedTexts::write(const Noted& noted, const StoredText& text) {
  const std::string space = space_digest(noted.space);
  CheckpointIdentity identity = folder_.identity;
  identity[kSpace] = space;
  if (!noted.space.adapter.empty()) {
    identity["adapter"] = noted.space.adapter + " from " +
                          std::to_string(noted.space.active_from);
  }
  size_t bytes = 0;
  for (const Checkpoint& part : text.parts) bytes += part.bytes();
  if (bytes > folder_.max_bytes) {
    report("a text of " + std::to_string(bytes) +
           " bytes is not saved: " + folder_.path.string() + " may have " +
           std::to_string(folder_.max_bytes));
    return;
  }
  make_room(bytes);
  const std::string tokens =
      digest_of(noted.tokens.data(), noted.tokens.size() * sizeof(int64_t));
  std::string of = space;
  for (const auto& [field, value] : folder_.identity) of += field + '=' + value;
  const fs::path path =
      folder_.path / (digest_of(of).substr(0, 8) + "-" + tokens + kEnding);
  save_checkpoint(path, saved_from(text, noted.tokens), identity);
  CheckpointFile file(path);
  drop_superseded(file, space);
  entries_.push_back({std::move(file), space});
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
    if (!entry.path().filename().string().ends_with(kEnding)) continue;
    std::error_code error;  // one that went meanwhile
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
