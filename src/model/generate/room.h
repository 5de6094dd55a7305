// room.h - how many new tokens fit behind a prompt.
#pragma once

#include "kvcache/model/language_model.h"

namespace kvcache::model {

struct RoomRequest {
  int64_t prompt = 0;                          // tokens
  std::optional<int64_t> max_new_tokens = {};  // as asked for
  int64_t context = 0;                         // tokens
  const Cache* cache = nullptr;
};

// The number of new tokens to make; throws, with the numbers, if the prompt or
// what was asked for does not fit the context or the cache. What was not asked
// for is cut to what fits.
int64_t room_for_new(const char* function, const RoomRequest& request);

}  // namespace kvcache::model
