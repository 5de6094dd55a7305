// pre_tokenizer.cpp - cuts text into the words that byte pairs merge within.

#include "pre_tokenizer.h"

#include "utf8.h"

namespace kvcache::model {
namespace {

// Joins the pieces of one split as `behavior` says; appends to `out`.
void merge_pieces(const std::vector<Range>& pieces, SplitBehavior behavior,
                  std::vector<Range>& out) {
  const size_t first = out.size();
  bool previous_matched = false;
  for (const Range& piece : pieces) {
    const bool has_previous = out.size() > first;
    bool join = false;
    switch (behavior) {
      case SplitBehavior::kIsolated:
        break;
      case SplitBehavior::kRemoved:
        if (piece.matched) continue;
        break;
      case SplitBehavior::kMergedWithPrevious:
        join = has_previous && piece.matched && !previous_matched;
        break;
      case SplitBehavior::kMergedWithNext:
        join = has_previous && !piece.matched && previous_matched;
        break;
      case SplitBehavior::kContiguous:
        join = has_previous && piece.matched == previous_matched;
        break;
    }
    if (join) {
      out.back().end = piece.end;
    } else {
      out.push_back(piece);
    }
    previous_matched = piece.matched;
  }
}

void apply(const SplitStep& step, std::string_view text,
           const std::vector<Range>& in, std::vector<Range>& out) {
  std::vector<Range> pieces;
  for (const Range& range : in) {
    pieces.clear();
    step.pattern.split(text.substr(range.begin, range.end - range.begin),
                       range.begin, pieces);
    if (step.invert) {
      for (Range& piece : pieces) piece.matched = !piece.matched;
    }
    merge_pieces(pieces, step.behavior, out);
  }
}

}  // namespace

// `prefix`: the text begins here, so its first piece may get a space as well.
void PreTokenizer::cut_valid(
    std::string_view text, bool prefix,
    const std::function<void(std::string_view)>& word) const {
  std::vector<Range> ranges = {{0, text.size(), false}};
  for (const SplitStep& step : steps) {
    std::vector<Range> next;
    apply(step, text, ranges, next);
    ranges.swap(next);
  }
  std::string spaced;
  std::vector<Range> cuts;
  for (const Range& range : ranges) {
    std::string_view piece = text.substr(range.begin, range.end - range.begin);
    if (add_prefix_space && (prefix || range.begin > 0) && piece[0] != ' ') {
      spaced = " " + std::string(piece);
      piece = spaced;
    }
    cuts.clear();
    if (words) {
      words->split(piece, 0, cuts);
    } else {
      cuts.push_back({0, piece.size(), false});
    }
    for (const Range& cut : cuts) {
      word(piece.substr(cut.begin, cut.end - cut.begin));
    }
  }
}

void PreTokenizer::cut(
    std::string_view text,
    const std::function<void(std::string_view)>& word) const {
  for (size_t at = 0; at < text.size();) {
    const size_t valid = valid_run_end(text, at);
    if (valid > at) cut_valid(text.substr(at, valid - at), at == 0, word);
    at = invalid_run_end(text, valid);
    if (at > valid) word(text.substr(valid, at - valid));
  }
}

}  // namespace kvcache::model
