// json_pipeline.h - the parts of a tokenizer.json around its model.
//
// A component that is not known is refused with its name, never passed over.

#pragma once

#include <string>

#include "json_fields.h"
#include "kvcache/model/tokenizer.h"
#include "normalizer.h"
#include "pre_tokenizer.h"

namespace kvcache::model {

void read_normalizer(const JsonField& field, Normalizer& normalizer);

// Throws unless the last step is ByteLevel.
void read_pre_tokenizer(const JsonField& field, const std::string& source,
                        PreTokenizer& pre_tokenizer);

void check_decoder(const JsonField& field);

// Which tokens the file puts around a text.
void read_post_processor(const JsonField& field, SpecialIds& ids);

}  // namespace kvcache::model
