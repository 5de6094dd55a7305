// version_test.cpp - versions, and the refusal of another LibTorch.

#include "kvcache/version.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace kvcache {
namespace {

TEST(Version, IsTheHeadersNumbers) {
  EXPECT_EQ(version(), std::to_string(KVCACHE_VERSION_MAJOR) + "." +
                           std::to_string(KVCACHE_VERSION_MINOR) + "." +
                           std::to_string(KVCACHE_VERSION_PATCH));
}

TEST(Version, LoadedLibTorchIsTheCompiledOne) {
  EXPECT_EQ(loaded_libtorch_version(), compiled_libtorch_version());
  EXPECT_NO_THROW(check_libtorch());
}

std::string refusal(const char* compiled, const char* loaded) {
  try {
    detail::check_libtorch_release(compiled, loaded);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Version, PatchReleasesShareAnAbi) {
  EXPECT_EQ(refusal("2.15.0", "2.15.1"), "accepted");
}

TEST(Version, AnotherReleaseIsRefusedWithBothNumbers) {
  EXPECT_EQ(refusal("2.15.0", "2.11.0"),
            "[kvcache::check_libtorch] kvcache was compiled for LibTorch "
            "2.15.0 but LibTorch 2.11.0 is loaded; rebuild against it, or see "
            "LD_LIBRARY_PATH.");
  EXPECT_NE(refusal("2.1.0", "2.15.0"), "accepted");
  EXPECT_NE(refusal("2.15.0", "unknown"), "accepted");
}

}  // namespace
}  // namespace kvcache
