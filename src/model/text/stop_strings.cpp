// stop_strings.cpp - ends a streamed text before a stop string.

#include "kvcache/model/stop_strings.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace kvcache::model {
namespace {

std::vector<size_t> borders(const std::string& text) {
  std::vector<size_t> border(text.size() + 1, 0);
  size_t state = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    while (state > 0 && text[i] != text[state]) state = border[state];
    if (text[i] == text[state]) ++state;
    border[i + 1] = state;
  }
  return border;
}

}  // namespace

StopStrings::StopStrings(std::vector<std::string> stops) {
  for (std::string& stop : stops) {
    TORCH_CHECK_VALUE(!stop.empty(),
                      "[StopStrings] a stop string must not be empty; leave it "
                      "out.");
    Matcher matcher{.border = borders(stop)};
    matcher.text = std::move(stop);
    matchers_.push_back(std::move(matcher));
  }
}

// Takes one more byte of the text; `end` is the length of held_ with it.
void StopStrings::advance(char byte, size_t end) {
  for (size_t i = 0; i < matchers_.size(); ++i) {
    Matcher& matcher = matchers_[i];
    // A matcher that is complete stays so: its next match starts later.
    if (matcher.state == matcher.text.size()) continue;
    while (matcher.state > 0 && byte != matcher.text[matcher.state]) {
      matcher.state = matcher.border[matcher.state];
    }
    if (byte != matcher.text[matcher.state]) continue;
    if (++matcher.state < matcher.text.size()) continue;
    const Found found{.start = end - matcher.state, .matcher = i};
    if (!found_ || found.start < found_->start) found_ = found;
  }
}

// The earliest place in held_ where a stop string may still be starting.
size_t StopStrings::pending_start(size_t end) const {
  size_t longest = 0;
  for (const Matcher& matcher : matchers_) {
    if (matcher.state == matcher.text.size()) continue;
    longest = std::max(longest, matcher.state);
  }
  return end - longest;
}

// The text ends before what was found.
std::string StopStrings::settle() {
  matched_ = matchers_[found_->matcher].text;
  held_.resize(found_->start);
  return std::exchange(held_, {});
}

std::string StopStrings::push(std::string_view text) {
  if (stopped()) return {};
  for (const char byte : text) {
    held_ += byte;
    advance(byte, held_.size());
    if (found_ && pending_start(held_.size()) >= found_->start) {
      return settle();
    }
  }
  const size_t shown = found_ ? 0 : pending_start(held_.size());
  std::string out = held_.substr(0, shown);
  held_.erase(0, shown);
  return out;
}

std::string StopStrings::finish() {
  if (stopped()) return {};
  if (found_) return settle();
  return std::exchange(held_, {});
}

}  // namespace kvcache::model
