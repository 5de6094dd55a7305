// What a store does with the contents of a text: check, cut, share.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kvcache/checkpoint_store.h"

namespace kvcache::store {

// Throws unless it is the memory of `tokens` tokens in a form that the store
// can cut.
void check_text(const StoredText& text, int64_t tokens);

bool has_states(const StoredText& text);    // of recurrent layers, in any part
bool restores_any(const StoredText& text);  // not at checkpoints only
// Positions with all that a restore needs, in every part; ascending. If any
// position will do, the last one.
std::vector<int64_t> usable_positions(const StoredText& text);

// Leaves what these positions need; they ascend and are usable.
void keep(StoredText& text, std::span<const int64_t> positions);
// Takes over what `with` has of the same tokens [0, same), written by the same
// kind of forward, in place of its own; of part 0 or of all others.
void share(StoredText& text, const StoredText& with, int64_t same,
           bool first_part);

int64_t decoded_before(const StoredText& text, int64_t position);
// Undefined: none at that position.
Tensor final_hidden_at(const StoredText& text, int64_t position);
Tensor features_at(const StoredText& text, int64_t position);
// As layout_of() of the caches that it came from.
std::string layout_of_text(const StoredText& text);

}  // namespace kvcache::store
