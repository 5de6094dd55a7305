// safetensors_fuzz.cpp - any bytes as a safetensors file.

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "kvcache/model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvcache::model;
  const std::span file(reinterpret_cast<const std::byte*>(data), size);
  try {
    const SafetensorsHeader header = parse_safetensors_header(file, "fuzz");
    // What was accepted lies in the file, in order and without holes.
    size_t covered = header.data_offset;
    for (const SafetensorsEntry& entry : header.entries) {
      if (header.data_offset + entry.begin != covered) std::abort();
      if (entry.end < entry.begin) std::abort();
      covered = header.data_offset + entry.end;
    }
    if (covered != size) std::abort();
  } catch (const c10::Error&) {
  }
  return 0;
}
