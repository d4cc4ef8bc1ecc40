// Tile registers in memory, for builds with QUICKSTEP_EMULATED_LEVELS: what AMX's instructions do,
// by Intel's description, in plain loops; what would be an invalid instruction ends the process.
#pragma once

#include <stdint.h>
#include <string.h>

namespace qs::QS_LEVEL {

class EmulatedTiles {
 public:
  void set(const uint16_t* row_bytes, const uint8_t* rows) {
    for (int tile = 0; tile < kTiles; ++tile) {
      check(row_bytes[tile] <= kRowBytes && row_bytes[tile] % 4 == 0 && rows[tile] <= kRows);
      check((row_bytes[tile] == 0) == (rows[tile] == 0));
      row_bytes_[tile] = row_bytes[tile];
      rows_[tile] = rows[tile];
    }
    memset(data_, 0, sizeof(data_));
    configured_ = true;
  }

  void release() { configured_ = false; }

  void zero(int tile) {
    check(configured_);
    memset(data_[tile], 0, sizeof(data_[tile]));
  }

  void load(int tile, const void* from, int64_t stride) {
    zero(tile);  // what lies beyond the shape is zero
    for (int row = 0; row < rows_[tile]; ++row) {
      memcpy(data_[tile][row], static_cast<const char*>(from) + row * stride, row_bytes_[tile]);
    }
  }

  void store(int tile, void* to, int64_t stride) const {
    check(configured_);
    for (int row = 0; row < rows_[tile]; ++row) {
      memcpy(static_cast<char*>(to) + row * stride, data_[tile][row], row_bytes_[tile]);
    }
  }

  void add_signed_by_unsigned(int sums, int a, int b) {
    check(configured_ && sums != a && sums != b && a != b);
    check(rows_[sums] == rows_[a] && row_bytes_[sums] == row_bytes_[b]);
    check(row_bytes_[a] == 4 * rows_[b]);
    for (int row = 0; row < rows_[sums]; ++row) {
      for (int column = 0; column < row_bytes_[sums] / 4; ++column) {
        int32_t total;
        memcpy(&total, data_[sums][row] + 4 * column, sizeof(total));
        for (int k = 0; k < row_bytes_[a]; ++k) {
          const int8_t x = static_cast<int8_t>(data_[a][row][k]);
          total += x * data_[b][k / 4][4 * column + k % 4];
        }
        memcpy(data_[sums][row] + 4 * column, &total, sizeof(total));
      }
    }
  }

  // Even and odd inputs each are a chain of multiply-adds from 0, whose sum is then added. Denormal
  // operands and results count as 0 of their sign.
  void add_pairs(int sums, int a, int b) {
    check(configured_ && sums != a && sums != b && a != b);
    check(rows_[sums] == rows_[a] && row_bytes_[sums] == row_bytes_[b]);
    check(row_bytes_[a] == 4 * rows_[b]);
    for (int row = 0; row < rows_[sums]; ++row) {
      for (int column = 0; column < row_bytes_[sums] / 4; ++column) {
        float chains[2] = {};
        for (int k = 0; k < row_bytes_[a] / 4; ++k) {
          for (int i = 0; i < 2; ++i) {
            const float x = widened(data_[a][row] + 4 * k + 2 * i);
            const float w = widened(data_[b][k] + 4 * column + 2 * i);
            chains[i] = flushed(__builtin_fmaf(x, w, chains[i]));
          }
        }
        float total;
        memcpy(&total, data_[sums][row] + 4 * column, sizeof(total));
        total = flushed(flushed(total) + flushed(chains[0] + chains[1]));
        memcpy(data_[sums][row] + 4 * column, &total, sizeof(total));
      }
    }
  }

 private:
  static float flushed(float x) {
    const float least = 0x1p-126f;
    return x > -least && x < least ? __builtin_copysignf(0.0f, x) : x;
  }

  static float widened(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return flushed(x);
  }

  static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

  static void check(bool valid) {
    if (!valid) __builtin_trap();
  }

  bool configured_ = false;
  uint16_t row_bytes_[kTiles] = {};
  uint8_t rows_[kTiles] = {};
  uint8_t data_[kTiles][kRows][kRowBytes] = {};
};

inline thread_local EmulatedTiles emulated_tiles;

}  // namespace qs::QS_LEVEL
