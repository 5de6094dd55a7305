// errors.h - what a person sees when the program cannot go on.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace kvcache::cli {

// The command line asks for something that cannot be: exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

// One line for people: no stack trace, no name of a function, no line end.
std::string message_of(const std::exception& error);
std::string message_of(std::string text);

}  // namespace kvcache::cli
