// choice_memo.h - answers to whole requests that came before.
#pragma once

#include <list>
#include <string>
#include <unordered_map>
#include <utility>

#include "kvcache/model/choice_runner.h"

namespace kvcache::model {

// The most recent answers, by all that they depend on: whole requests are
// compared.
class ChoiceMemo {
 public:
  explicit ChoiceMemo(size_t most) : most_(most) {}

  static std::string key_of(const ChoiceRequest& request, uint64_t generation);
  const ChoiceResult* find(const std::string& key);
  void keep(const std::string& key, const ChoiceResult& result);
  void clear();
  size_t size() const noexcept { return entries_.size(); }

 private:
  using Entries = std::list<std::pair<std::string, ChoiceResult>>;
  size_t most_;
  Entries entries_;  // most recent first
  std::unordered_map<std::string, Entries::iterator> places_;
};

}  // namespace kvcache::model
