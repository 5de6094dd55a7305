// src/model/packed/row_piece.h - where rows of a linear come from.
#pragma once

#include <cstdint>
#include <string>

namespace kvcache::model {

// Rows [first, first + count) of the matrix `name` of a file.
struct RowPiece {
  std::string name;
  int64_t first = 0;
  int64_t count = 0;
};

}  // namespace kvcache::model
