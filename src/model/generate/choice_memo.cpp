// choice_memo.cpp - a bounded map of requests to answers.
#include "choice_memo.h"

namespace kvcache::model {
namespace {

void append(std::string& key, int64_t number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof(number));
}
void append(std::string& key, const std::string& text) {
  append(key, static_cast<int64_t>(text.size()));
  key += text;
}
void append(std::string& key, const std::vector<int64_t>& numbers) {
  append(key, static_cast<int64_t>(numbers.size()));
  for (const int64_t number : numbers) append(key, number);
}

}  // namespace

std::string ChoiceMemo::key_of(const ChoiceRequest& request,
                               uint64_t generation) {
  const Namespace& space = request.space;
  std::string key;
  for (const std::string* part :
       {&space.model, &space.base, &space.adapter, &space.tenant}) {
    append(key, *part);
  }
  append(key, space.active_from);
  append(key, static_cast<int64_t>(generation));
  append(key, request.ids);
  append(key, request.slots);
  append(key, request.option_counts);
  append(key, request.route ? 1 : 0);
  append(key, request.route.value_or(0));
  return key;
}

const ChoiceResult* ChoiceMemo::find(const std::string& key) {
  const auto place = places_.find(key);
  if (place == places_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, place->second);
  return &place->second->second;
}

void ChoiceMemo::keep(const std::string& key, const ChoiceResult& result) {
  if (most_ == 0 || find(key) != nullptr) return;
  if (entries_.size() == most_) {
    places_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(key, result);
  places_.emplace(key, entries_.begin());
}

void ChoiceMemo::clear() {
  places_.clear();
  entries_.clear();
}

}  // namespace kvcache::model
