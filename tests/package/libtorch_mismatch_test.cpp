// libtorch_mismatch_test.cpp - a LibTorch of another release is refused.
//
// This program exports the name by which LibTorch tells its version, so the
// library finds 2.10.1 where it was compiled for something newer.

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kvcache/version.h"

extern "C" __attribute__((visibility("default"))) uint64_t
aoti_torch_abi_version() {
  return uint64_t{2} << 56 | uint64_t{10} << 48 | uint64_t{1} << 40;
}

namespace {

TEST(CheckLibTorch, AnotherLoadedReleaseIsRefused) {
  EXPECT_EQ(kvcache::loaded_libtorch_version(), "2.10.1");
  try {
    kvcache::check_libtorch();
    FAIL() << "accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()),
              "[kvcache::check_libtorch] kvcache was compiled for LibTorch " +
                  kvcache::compiled_libtorch_version() +
                  " but LibTorch 2.10.1 is loaded; rebuild against it, or see "
                  "LD_LIBRARY_PATH.");
  }
}

}  // namespace
