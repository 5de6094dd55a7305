// normalizer.h - what is done to a text before it is cut into words.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvcache::model {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

struct NormalizerStep {
  enum class Kind { kForm, kReplace, kPrepend } kind = Kind::kForm;
  NormalForm form = NormalForm::kNfc;
  std::string pattern = {};  // kReplace: what is replaced, literally
  std::string content = {};  // kReplace, kPrepend: what is put there
};

struct Normalizer {
  std::vector<NormalizerStep> steps;

  bool empty() const noexcept { return steps.empty(); }
  // Bytes that are not UTF-8 stay as they are.
  std::string apply(std::string_view text) const;
};

}  // namespace kvcache::model
