// sentencepiece_model.h - the little of SentencePiece's ModelProto that has to
// be read or written here.
//
// Source: sentencepiece_model.proto, google/sentencepiece 0.1.97.

#pragma once

#include <string>
#include <string_view>

#include "kvcache/model/tokenizer.h"

namespace kvcache::model {

// Whether a model puts a space before a text. Throws if `model` is no protocol
// buffer.
bool adds_dummy_prefix(std::string_view model, const std::string& source);

// `model` with that set. A later field of a message overrides an earlier one,
// so it is enough to append.
std::string with_dummy_prefix(std::string_view model, bool add);

// A GGUF vocabulary as a ModelProto (BPE by scores, no normalisation).
std::string to_sentencepiece_model(const GgufVocabulary& vocabulary);

}  // namespace kvcache::model
