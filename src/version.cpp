// version.cpp - the versions of kvcache and of the LibTorch under it.

#include "kvcache/version.h"

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif

namespace kvcache {
namespace {

std::string dotted(uint64_t major, uint64_t minor, uint64_t patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." +
         std::to_string(patch);
}

std::string_view release_of(std::string_view version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

}  // namespace

std::string_view version() noexcept {
#define KVCACHE_TEXT(x) #x
#define KVCACHE_DOTTED(a, b, c) \
  KVCACHE_TEXT(a) "." KVCACHE_TEXT(b) "." KVCACHE_TEXT(c)
  return KVCACHE_DOTTED(KVCACHE_VERSION_MAJOR, KVCACHE_VERSION_MINOR,
                        KVCACHE_VERSION_PATCH);
#undef KVCACHE_DOTTED
#undef KVCACHE_TEXT
}

std::string compiled_libtorch_version() {
  return dotted(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH);
}

std::string loaded_libtorch_version() {
  // The one version that libtorch_cpu exports with a C name, so that asking for
  // it needs no C++ ABI: major, minor and patch in the three top bytes
  // (torch/csrc/inductor/aoti_torch/c/shim.h). Looked up by name, since a
  // LibTorch that lacks it shall be reported and not stop the loader.
  using AbiVersion = uint64_t (*)();
  const auto abi_version = reinterpret_cast<AbiVersion>(
      dlsym(RTLD_DEFAULT, "aoti_torch_abi_version"));
  if (abi_version == nullptr) return "unknown";
  const uint64_t packed = abi_version();
  return dotted(packed >> 56 & 0xff, packed >> 48 & 0xff, packed >> 40 & 0xff);
}

void check_libtorch() {
  detail::check_libtorch_release(compiled_libtorch_version(),
                                 loaded_libtorch_version());
}

void detail::check_libtorch_release(std::string_view compiled,
                                    std::string_view loaded) {
  if (release_of(compiled) == release_of(loaded)) return;
  throw std::runtime_error(
      "[kvcache::check_libtorch] kvcache was compiled for LibTorch " +
      std::string(compiled) + " but LibTorch " + std::string(loaded) +
      " is loaded; rebuild against it, or see LD_LIBRARY_PATH.");
}

}  // namespace kvcache
