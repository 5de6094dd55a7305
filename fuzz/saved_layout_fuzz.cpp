// The layout of a saved text, which a stranger's file brings along.
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "src/model/reuse/saved_layout.h"

// Refused with an error, or the numbers make sense and are written again as
// they were read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using kvcache::model::SavedLayout;
  try {
    const SavedLayout layout = SavedLayout::from_json(
        {reinterpret_cast<const char*>(data), size}, "fuzz");
    const std::string text = layout.to_json();
    if (SavedLayout::from_json(text, "fuzz").to_json() != text) std::abort();
  } catch (const c10::Error&) {
  }
  return 0;
}
