// kvcache/model/stop_strings.h - ends a streamed text before a stop string.
//
// Text that may be the start of a stop string is held back until it is certain
// that it is none, so nothing of one is ever shown. The stop string that
// starts earliest ends the text; of several that start at the same place, the
// one that is complete first, so a longer one never delays a shorter prefix.

#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvcache::model {

// One generation's text. Not thread-safe.
//
// Errors: an empty stop string throws; text after the stop is ignored.
// Cost: linear in the text, for each stop string.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);

  // Takes the next piece of text; returns what may be shown now.
  std::string push(std::string_view text);
  // The text is over: returns what was held back. Nothing after a stop.
  std::string finish();

  // The stop string that ended the text.
  const std::optional<std::string>& matched() const noexcept {
    return matched_;
  }
  bool stopped() const noexcept { return matched_.has_value(); }

 private:
  // A stop string and how much of it the end of the text matches
  // (Knuth-Morris-Pratt).
  struct Matcher {
    std::string text = {};
    std::vector<size_t> border = {};  // longest proper border of each prefix
    size_t state = 0;                 // matched bytes
  };

  // A complete stop string that an earlier one, still growing, may beat.
  struct Found {
    size_t start = 0;  // in held_
    size_t matcher = 0;
  };

  void advance(char byte, size_t end);
  size_t pending_start(size_t end) const;
  std::string settle();

  std::vector<Matcher> matchers_;
  std::string held_;  // text not yet shown
  std::optional<Found> found_;
  std::optional<std::string> matched_;
};

}  // namespace kvcache::model
