// sentencepiece_tokenizer.h - a SentencePiece model as a Tokenizer.

#pragma once

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

// From a GGUF vocabulary of tokens, scores and types. Throws if the library was
// built without sentencepiece.
TokenizerPtr make_sentencepiece_tokenizer(const GgufVocabulary& vocabulary,
                                          SpecialIds ids);

}  // namespace kvcache::model
