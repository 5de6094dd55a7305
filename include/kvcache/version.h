// kvcache/version.h - which kvcache this is, and on which LibTorch it runs.
//
// The three numbers below are the only place where the version stands; the
// build and the package read them from here.

#pragma once

#include <string>
#include <string_view>

#define KVCACHE_VERSION_MAJOR 0
#define KVCACHE_VERSION_MINOR 1
#define KVCACHE_VERSION_PATCH 0

namespace kvcache {

// "0.1.0".
std::string_view version() noexcept;

// The LibTorch whose headers kvcache was compiled with, as "2.15.0".
std::string compiled_libtorch_version();

// The LibTorch that this process has loaded, as "2.15.0"; "unknown" if it does
// not say (releases before 2.9).
std::string loaded_libtorch_version();

// Throws std::runtime_error unless both are of one release (major.minor):
// LibTorch keeps no C++ ABI from one release to the next, so anything may fail
// later. A program calls this first. It is not a c10::Error because building
// one would already run the library in doubt.
void check_libtorch();

namespace detail {
// check_libtorch() for any two versions.
void check_libtorch_release(std::string_view compiled, std::string_view loaded);
}  // namespace detail

}  // namespace kvcache
