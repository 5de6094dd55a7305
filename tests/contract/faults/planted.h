// Which fault the copies of the cache's sources in this folder's test have.
#pragma once

namespace kvcache {

extern int planted_fault;  // 0: none

inline bool planted(int fault) { return planted_fault == fault; }

}  // namespace kvcache
