// pre_tokenizer.h - cuts text into the words that byte pairs merge within.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pattern.h"

namespace kvcache::model {

// What becomes of a match of a Split step (Hugging Face's names).
enum class SplitBehavior {
  kIsolated,
  kRemoved,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,
};

struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what is between matches is the match
};

// The steps of a tokenizer.json. ByteLevel comes last; here it is plain bytes.
struct PreTokenizer {
  std::vector<SplitStep> steps;
  bool add_prefix_space = false;  // ByteLevel: before a piece without one
  std::optional<Pattern> words;   // ByteLevel's own pattern

  // Calls `word` for every word of `text`, in order. Bytes that are not UTF-8
  // are words of their own.
  void cut(std::string_view text,
           const std::function<void(std::string_view)>& word) const;

 private:
  void cut_valid(std::string_view text, bool prefix,
                 const std::function<void(std::string_view)>& word) const;
};

// The pattern of GPT-2, which ByteLevel applies unless told otherwise.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace kvcache::model
