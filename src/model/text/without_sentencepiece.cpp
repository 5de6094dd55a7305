// without_sentencepiece.cpp - stands in for sentencepiece_tokenizer.cpp where
// the sentencepiece library is missing.

#include <c10/util/Exception.h>

#include "sentencepiece_tokenizer.h"

namespace kvcache::model {
namespace {

[[noreturn]] void refuse(const std::string& source) {
  TORCH_CHECK(false, "[load_tokenizer] ", source,
              ": a SentencePiece model must be read with the sentencepiece "
              "library but this build has none; install libsentencepiece-dev "
              "and build again.");
}

}  // namespace

bool has_sentencepiece() noexcept { return false; }

TokenizerPtr make_sentencepiece_tokenizer(const GgufVocabulary& vocabulary,
                                          SpecialIds) {
  refuse(vocabulary.source);
}

TokenizerPtr make_sentencepiece_tokenizer(std::string_view, std::string_view,
                                          const std::string& source) {
  refuse(source);
}

}  // namespace kvcache::model
