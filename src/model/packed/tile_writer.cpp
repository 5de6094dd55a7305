// src/model/packed/tile_writer.cpp - where an integer lies in its tile.
#include "src/model/packed/tile_writer.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvcache::model {
namespace {

uint16_t half_bits(float x) { return c10::Half(x).x; }
float of_half(uint16_t bits) {
  return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
}

uint16_t read_half(const std::byte* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

int8_t nearest(float x, float least, float most) {
  return static_cast<int8_t>(std::clamp(std::nearbyint(x), least, most));
}

// Bits of an integer; a vector of a tile holds 32 / bits of each output.
constexpr int bits_of(TileFormat format) {
  return format == TileFormat::kQ4 ? 4 : 8;
}

// Where integer i of a lane lies in it: even ones in the low half, odd ones in
// the high one.
constexpr int shift_of(int bits, int i) {
  return 16 * (i % 2) + bits * (i / 2);
}

template <int kBits>
void write_lanes(uint8_t* lanes, const int8_t* q) {
  constexpr int kPerLane = 32 / kBits;
  for (int64_t vector = 0; vector < kBits; ++vector) {
    uint32_t lane = 0;
    for (int i = 0; i < kPerLane; ++i) {
      const auto integer = static_cast<uint8_t>(q[vector * kPerLane + i]);
      lane |= static_cast<uint32_t>(integer) << shift_of(kBits, i);
    }
    std::memcpy(lanes + vector * kVectorBytes, &lane, sizeof(lane));
  }
}

int64_t tile_offset(const TileMatrix& shape, int64_t output, int64_t group) {
  return (output / kTileOutputs * shape.groups + group) *
         tile_bytes(shape.format);
}

// Q4_0: d, then 16 bytes: low nibbles are the first 16 values, high ones the
// others, 8 too large. Q4_1: d, m, then the same, with m added.
TileGroup of_q4(BlockType type, const std::byte* block) {
  TileGroup group;
  group.d = read_half(block);
  const bool minimum = type == BlockType::kQ4_1;
  group.m = minimum ? read_half(block + 2) : half_bits(-8 * of_half(group.d));
  const std::byte* nibbles = block + (minimum ? 4 : 2);
  for (int64_t i = 0; i < 16; ++i) {
    const auto both = std::to_integer<int>(nibbles[i]);
    group.q[i] = static_cast<int8_t>(both & 0xf);
    group.q[i + 16] = static_cast<int8_t>(both >> 4);
  }
  return group;
}

// Q5_0: d, 32 fifth bits, then nibbles as those of Q4_0; 16 too large.
TileGroup of_q5(const std::byte* block) {
  TileGroup group;
  group.d = read_half(block);
  uint32_t fifth = 0;
  std::memcpy(&fifth, block + 2, sizeof(fifth));
  for (int64_t i = 0; i < 16; ++i) {
    const auto both = std::to_integer<int>(block[6 + i]);
    const auto bit = [&](int64_t j) {
      return static_cast<int>(fifth >> j & 1U) << 4;
    };
    group.q[i] = static_cast<int8_t>(((both & 0xf) | bit(i)) - 16);
    group.q[i + 16] = static_cast<int8_t>(((both >> 4) | bit(i + 16)) - 16);
  }
  return group;
}

// Q8_0: d, then 32 bytes with a sign.
TileGroup of_q8(const std::byte* block) {
  TileGroup group;
  group.d = read_half(block);
  std::memcpy(group.q, block + 2, sizeof(group.q));
  return group;
}

}  // namespace

TileGroup round_q4(const float* w) {
  TileGroup group;
  const auto [least, most] = std::minmax_element(w, w + kTileInputs);
  const float span = *most - *least;
  group.d = half_bits(span / 15);
  group.m = half_bits(*least);
  const float d = of_half(group.d), m = of_half(group.m);
  for (int64_t i = 0; i < kTileInputs; ++i) {
    if (!std::isfinite(w[i])) group.d = half_bits(NAN);
    group.q[i] = d > 0 ? nearest((w[i] - m) / d, 0, 15) : int8_t{0};
  }
  return group;
}

TileGroup round_q8(const float* w) {
  TileGroup group;
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < kTileInputs; ++i) {
    most = std::max(most, std::fabs(w[i]));
    finite = finite && std::isfinite(w[i]);
  }
  group.d = half_bits(finite ? most / 127 : NAN);
  const float d = of_half(group.d);
  if (!(d > 0)) return group;
  for (int64_t i = 0; i < kTileInputs; ++i) {
    group.q[i] = nearest(w[i] / d, -127, 127);
  }
  return group;
}

bool keeps(TileFormat format, BlockType type) {
  if (format == TileFormat::kQ4) {
    return type == BlockType::kQ4_0 || type == BlockType::kQ4_1;
  }
  return type == BlockType::kQ8_0 || type == BlockType::kQ5_0;
}

TileGroup group_of_block(BlockType type, TileFormat format,
                         const std::byte* block) {
  if (format == TileFormat::kQ4) return of_q4(type, block);
  return type == BlockType::kQ5_0 ? of_q5(block) : of_q8(block);
}

void write_group(const TileMatrix& shape, uint8_t* tiles, int64_t output,
                 int64_t group_index, const TileGroup& group) {
  uint8_t* tile = tiles + tile_offset(shape, output, group_index);
  const int64_t lane = output % kTileOutputs;
  uint8_t* scales = tile + tile_vectors(shape.format) * kVectorBytes;
  std::memcpy(scales + 2 * lane, &group.d, sizeof(group.d));
  if (shape.format == TileFormat::kQ4) {
    write_lanes<bits_of(TileFormat::kQ4)>(tile + 4 * lane, group.q);
    std::memcpy(scales + kScaleBytes + 2 * lane, &group.m, sizeof(group.m));
  } else {
    write_lanes<bits_of(TileFormat::kQ8)>(tile + 4 * lane, group.q);
  }
}

TileGroup read_group(const TileMatrix& matrix, int64_t output,
                     int64_t group_index) {
  const uint8_t* tile = matrix.tiles + tile_offset(matrix, output, group_index);
  const int64_t lane = output % kTileOutputs;
  const int bits = bits_of(matrix.format), per_lane = 32 / bits;
  TileGroup group;
  for (int64_t i = 0; i < kTileInputs; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, tile + i / per_lane * kVectorBytes + 4 * lane,
                sizeof(word));
    const uint32_t integer =
        word >> shift_of(bits, static_cast<int>(i % per_lane));
    group.q[i] = static_cast<int8_t>(
        matrix.format == TileFormat::kQ4 ? integer & 0xfU : integer & 0xffU);
  }
  const uint8_t* scales = tile + tile_vectors(matrix.format) * kVectorBytes;
  std::memcpy(&group.d, scales + 2 * lane, sizeof(group.d));
  if (matrix.format == TileFormat::kQ4) {
    std::memcpy(&group.m, scales + kScaleBytes + 2 * lane, sizeof(group.m));
  }
  return group;
}

}  // namespace kvcache::model
