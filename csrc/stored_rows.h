// Rows of a matrix as checkpoint files hold them: read by offset, decoded from ggml's blocks.
#pragma once

#include <cstdint>
#include <cstring>

#include "quickstep.h"

namespace qs {

struct RowRange {
  int64_t first, count;
};

float half_to_float(uint16_t half);
inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Quants of a row with its scales and zeros, or the minimums of kinds that have those, one per group.
struct QuantRow {
  uint8_t* quants;
  float* scales;
  float* zeros;
};

// What a kind of quants is decoded to; bits 0 for kinds that hold floating point. Wide scales are
// products of two, which seldom fit 16 bits.
struct RowKind {
  int bits;
  int64_t group_size;  // 0: the caller decides
  bool has_zeros;
  int64_t block_inputs, block_bytes;
  bool wide_scales;
  bool has_minimums = false;  // in place of zeros
  bool has_super_scales = false;  // scales are bytes times an f16 of the block
  const uint8_t* levels = nullptr;  // the 16 values of all quants; null where there are more
};

// The scales and minimums of a block of 256 inputs as such products: their factors.
struct SuperBlock {
  uint16_t scale, minimum;              // f16
  int8_t scales[16], minimums[16];
};

// An element of a row of floating point.
float stored_value(int kind, const uint8_t* row, int64_t index);
// Null for an unknown kind.
const RowKind* row_kind(int kind);
// Bytes of a row of k inputs, which the kind's blocks divide.
int64_t stored_row_bytes(int kind, int64_t k);
// Bytes of the longest row of any part.
int64_t longest_row_bytes(const qs_stored_matrix& matrix);
// Whether a part is of another kind than the matrix.
bool is_converted(const qs_stored_matrix& matrix);
// Bytes per row that convert_rows needs besides its result.
int64_t conversion_bytes(const qs_stored_matrix& matrix);
// Reads rows [first, first + count) of all parts combined. False if a file lacks them.
bool read_rows(const qs_stored_matrix& matrix, RowRange rows, uint8_t* out);
// Reads the same rows as floating point of the matrix's kind; `scratch` only where is_converted.
bool convert_rows(const qs_stored_matrix& matrix, RowRange rows, uint8_t* scratch, uint8_t* out);

// Calls fn(row, part, row of the part, bytes) for rows that read_rows has read; `row` counts from 0.
template <typename Fn>
void for_each_row(const qs_stored_matrix& matrix, RowRange rows, const uint8_t* read,
                  const Fn& fn) {
  int64_t first = rows.first, row = 0;
  for (int part = 0; part < matrix.num_parts; ++part) {
    const qs_file_rows& stored = matrix.parts[part];
    const int64_t row_bytes = stored_row_bytes(stored.kind, matrix.k);
    for (; first < stored.num_rows && row < rows.count; ++first, ++row, read += row_bytes) {
      fn(row, stored, first, read);
    }
    first -= stored.num_rows;
    if (first < 0) first = 0;
  }
}

// Of a kind that has these.
SuperBlock super_block(int kind, const uint8_t* block);
// One row of a part in blocks.
void decode_row(const qs_file_rows& part, const uint8_t* row, int64_t k, const QuantRow& out);
// Reads `size` bytes; false if the file lacks them.
bool read_all(int fd, uint8_t* out, int64_t size, int64_t offset);
// The tensor's row that is row `row` of the result.
int64_t stored_row(const qs_file_rows& part, int64_t row);

}  // namespace qs
