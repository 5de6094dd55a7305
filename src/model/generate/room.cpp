// room.cpp - how many new tokens fit behind a prompt.

#include "room.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "kvcache/model/generate.h"

namespace kvcache::model {

int64_t room_for_new(const char* function, const RoomRequest& request) {
  const auto& [prompt, wanted, context, cache] = request;
  TORCH_CHECK_VALUE(!wanted || *wanted >= 1, "[", function,
                    "] max_new_tokens must be at least 1 but got ", *wanted,
                    ".");
  TORCH_CHECK_VALUE(prompt > 0, "[", function,
                    "] the prompt must not be empty; give at least one "
                    "token.");
  // The last token is never fed, so a text may be one longer than its cache.
  const bool small = cache && cache->capacity() < context - 1;
  const int64_t longest = small ? cache->capacity() + 1 : context;
  const int64_t limit = small ? cache->capacity() : context;
  const char* what = small ? "the cache's capacity" : "the context";
  TORCH_CHECK_VALUE(prompt <= limit, "[", function, "] prompt of ", prompt,
                    " tokens is longer than ", what, " of ", limit,
                    " tokens; shorten it.");
  const int64_t room = longest - prompt;
  TORCH_CHECK_VALUE(room > 0, "[", function, "] prompt of ", prompt,
                    " tokens leaves no room for a new one in ", what, " of ",
                    limit, " tokens; shorten it.");
  if (!wanted) return std::min(room, kDefaultNewTokens);
  TORCH_CHECK_VALUE(*wanted <= room, "[", function, "] prompt of ", prompt,
                    " tokens and ", *wanted, " new ones exceed ", what, " of ",
                    limit, " tokens; ask for at most ", room, " new ones.");
  return *wanted;
}

}  // namespace kvcache::model
