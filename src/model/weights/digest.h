// digest.h - 128 bits that stand for bytes, as text.
#pragma once

#include <cstddef>
#include <string>

namespace kvcache::model {

// XXH3, 32 hexadecimal digits: against accidents, not against forgery.
std::string digest_of(const void* data, size_t bytes);

inline std::string digest_of(const std::string& text) {
  return digest_of(text.data(), text.size());
}

}  // namespace kvcache::model
