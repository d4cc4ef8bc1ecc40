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

// Quants of a row with its scales and zeros, one per group.
struct QuantRow {
  uint8_t* quants;
  float* scales;
  float* zeros;
};

// What a kind of quants is decoded to; bits 0 for kinds that hold floating point.
struct RowKind {
  int bits;
  int64_t group_size;  // 0: the caller decides
  bool has_zeros;
  int64_t block_inputs, block_bytes;
};

// Null for an unknown kind.
const RowKind* row_kind(int kind);
// Bytes of a row of k inputs, which the kind's blocks divide.
int64_t stored_row_bytes(int kind, int64_t k);
// Reads rows [first, first + count) of all parts combined. False if a file lacks them.
bool read_rows(const qs_stored_matrix& matrix, int64_t first, int64_t count, uint8_t* out);
// One row of a kind of quants; scales of QS_ROWS_I8 are not among its bytes and stay as they are.
void decode_row(int kind, const uint8_t* row, int64_t k, const QuantRow& out);

}  // namespace qs
