// The products of attention on AMX's tiles, for keys and values as pairs of bfloat16: 32 rows x 32
// columns at a time, 32 inputs a step. An output is one chain over the steps in ascending order;
// within a step the tile product has an order of its own (tests/native/emulated_tiles.h).
//
//   scores     queries [row][pairs of the width] x keys [pair][position]
//   outputs    weights [row][pairs of positions] x values [pair][dimension], a step at an absolute
//              multiple of 32 positions; those that a row must not see have the weight 0
//
// A step that is zeros for a row leaves its sums as they are, so that its bits do not depend on what
// the other rows see. That needs finite values: 0 times NaN is NaN. Tiles with others are computed
// apart for the rows that see the same positions, from values with zeros elsewhere.
#pragma once

#include "kernels/attention_products.h"

#if defined(__AMX_BF16__)

#include "kernels/amx_tiles.h"

namespace qs::QS_LEVEL {

constexpr int64_t kStepWords = 16;       // of a row: 32 inputs
constexpr int64_t kStepPositions = 32;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileRows = 16;
constexpr int kMostRows = 32;

// The shapes that the thread's tiles have: 0 to 3 are sums, 4 and 5 have rows, 6 and 7 columns.
class TilesOfRows {
 public:
  TilesOfRows() = default;
  TilesOfRows(const TilesOfRows&) = delete;
  TilesOfRows& operator=(const TilesOfRows&) = delete;
  ~TilesOfRows() {
    if (rows_ > 0) release_tiles();
  }

  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
    const int shape[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = static_cast<uint8_t>(shape[tile]);
      shapes.row_bytes[tile] = shape[tile] > 0 ? kStepWords * sizeof(float) : 0;
    }
    set_shapes(shapes);
  }

 private:
  int rows_ = 0;
};

// c[rows][columns] (+)= sum over the words of `steps` of a[row][word] * b[word][column].
template <bool TwoRows, bool TwoColumns>
void multiply_tiles(const Products& products, Span steps, int64_t at) {
  const Products of = products;  // a copy, which no store can change
  const int64_t a_bytes = of.a_stride * sizeof(float), b_bytes = of.b_stride * sizeof(float);
  const int64_t c_bytes = of.c_stride * sizeof(float);
  float* c = of.c + at;
  float* below = c + kTileRows * of.c_stride;
  if (of.from_zero) {
    zero_tile<0>();
    if constexpr (TwoColumns) zero_tile<1>();
    if constexpr (TwoRows) zero_tile<2>();
    if constexpr (TwoRows && TwoColumns) zero_tile<3>();
  } else {
    load_tile<0>(c, c_bytes);
    if constexpr (TwoColumns) load_tile<1>(c + kTileColumns, c_bytes);
    if constexpr (TwoRows) load_tile<2>(below, c_bytes);
    if constexpr (TwoRows && TwoColumns) load_tile<3>(below + kTileColumns, c_bytes);
  }
  for (int64_t step = steps.begin; step < steps.end; ++step) {
    const float* a = of.a + step * kStepWords;
    const float* b = of.b + step * kStepWords * of.b_stride + at;
    load_tile<4>(a, a_bytes);
    load_tile<6>(b, b_bytes);
    add_pairs<0, 4, 6>();
    if constexpr (TwoColumns) {
      load_tile<7>(b + kTileColumns, b_bytes);
      add_pairs<1, 4, 7>();
    }
    if constexpr (TwoRows) {
      load_tile<5>(a + kTileRows * of.a_stride, a_bytes);
      add_pairs<2, 5, 6>();
    }
    if constexpr (TwoRows && TwoColumns) add_pairs<3, 5, 7>();
  }
  store_tile<0>(c, c_bytes);
  if constexpr (TwoColumns) store_tile<1>(c + kTileColumns, c_bytes);
  if constexpr (TwoRows) store_tile<2>(below, c_bytes);
  if constexpr (TwoRows && TwoColumns) store_tile<3>(below + kTileColumns, c_bytes);
}

// The same over all rows and all columns of `width`, a multiple of 16.
inline void multiply_rows(TilesOfRows& tiles, int rows, Products of, Span steps, int64_t width) {
  for (; rows > 0; rows -= kMostRows) {
    const int here = rows < kMostRows ? rows : kMostRows;
    tiles.set(here);
    const bool two = here > kTileRows;
    int64_t at = 0;
    for (; at + 2 * kTileColumns <= width; at += 2 * kTileColumns) {
      two ? multiply_tiles<true, true>(of, steps, at) : multiply_tiles<false, true>(of, steps, at);
    }
    if (at < width) {
      two ? multiply_tiles<true, false>(of, steps, at)
          : multiply_tiles<false, false>(of, steps, at);
    }
    of.a += kMostRows * of.a_stride;
    of.c += kMostRows * of.c_stride;
  }
}

// Whether words [0, count), pairs of bfloat16, are all finite.
inline bool all_finite(const float* words, int64_t count) {
  __mmask32 found = 0;
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (int64_t i = 0; i < count; i += W) {
    const __m512i pairs = _mm512_and_si512(bit_cast<__m512i>(load(words + i)), exponent);
    found |= _mm512_cmpeq_epi16_mask(pairs, exponent);
  }
  return found == 0;
}

}  // namespace qs::QS_LEVEL

#endif
