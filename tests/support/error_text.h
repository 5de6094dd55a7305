// tests/support/error_text.h - the one line that a failing call says.

#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace kvcache::testing {

// What `call` throws, without the backtrace; "no error" if it does not throw.
template <typename Call>
std::string error_text(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace kvcache::testing
