// src/model/packed/tile_writer.h - one output of a tile matrix after the other.
#pragma once

#include <cstddef>

#include "kvcache/model/weights.h"
#include "src/model/packed/tile_table.h"

namespace kvcache::model {

// 32 weights of one output: integers and their scale, see TileFormat.
struct TileGroup {
  int8_t q[kTileInputs] = {};
  uint16_t d = 0;  // float16
  uint16_t m = 0;  // float16; kQ4 alone
};

// The nearest group to 32 weights. Scales are rounded to float16 first, then
// the integers to them. NaN and infinities give the scale NaN.
TileGroup round_q4(const float* w);
TileGroup round_q8(const float* w);

// The same values as a block of a file. kQ4: Q4_0 and Q4_1; kQ8: Q8_0 and Q5_0.
TileGroup group_of_block(BlockType type, TileFormat format,
                         const std::byte* block);
bool keeps(TileFormat format, BlockType type);

// Writes `group` into the tile of `tiles` that holds `output` and inputs
// [32 group_index, 32 group_index + 32).
void write_group(const TileMatrix& shape, uint8_t* tiles, int64_t output,
                 int64_t group_index, const TileGroup& group);
// Reads it back.
TileGroup read_group(const TileMatrix& matrix, int64_t output,
                     int64_t group_index);

}  // namespace kvcache::model
