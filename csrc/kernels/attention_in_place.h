// Products of floats with a tile of a cache in pairs (kv_pairs.h) where it is: words become floats in
// registers, so that a tile is neither copied nor widened in memory. The chains are those of
// attention_products.h, hence the bits too.
//
// On AVX2 only. There a copy of floats fills the first cache, while the shifts and masks that widen run
// next to the products.
#pragma once

#include "kernels/attention_tile.h"
#include "kv_pairs.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace qs::QS_LEVEL {

constexpr int kPlaceVectors = kPairPositions / W;
constexpr int kPlaces = kTile / kPairPositions;

// A kv head's keys and values of a tile, 16 positions at a time.
struct TilePlaces {
  const bf16* keys[kPlaces];
  const bf16* values[kPlaces];
};

// The operands of a tile's products. `size` is the head's, and a multiple of 16.
struct InPlace {
  TilePlaces tile;
  TilePlaces ahead;  // of the next tile
  int64_t size, key_stride;
  const float* queries;  // [query][size]
  float* scores;         // [query][position]; then the weights
  float* out;            // [query][size]
};

// Which lines of the next tile a product brings into the second cache, of one for each that it reads: two
// products of the same tile share them, since fetches that follow each other too closely wait, and loads
// with them.
enum class Fetch { kNone, kAll, kEven, kOdd };

template <Fetch F>
QS_INLINE bool fetches(int64_t step) {
  return F == Fetch::kAll || (F != Fetch::kNone && step % 2 == (F == Fetch::kOdd ? 1 : 0));
}

// The first of the vectors that are in a line.
template <int V, typename At>
QS_INLINE void fetch_lines(const At& at) {
#pragma GCC unroll 8
  for (int v = 0; v < V; v += kPlaceVectors) __builtin_prefetch(at(v), 0, 2);
}

// In the sum's register and in the order of the source: by itself GCC 12 moves sums about and spills them.
QS_INLINE vf add_product(vf sum, vf a, vf b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}

QS_INLINE vu load_words(const bf16* from) {
  return bit_cast<vu>(load(reinterpret_cast<const float*>(from)));
}

// sum[r][v] += a[r][half] * that half of word v, of both halves in turn. In registers are the factors or
// the halves, which of them are fewer.
template <int R, int V, typename Words>
QS_INLINE void add_words(vf (&sum)[R][V], const float* a, int64_t a_stride, const Words& words) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const auto factor = [&](int r) { return set1(a[r * a_stride + half]); };
    const auto widened = [&](int v) {
      return bit_cast<vf>(half == 0 ? words(v) << 16 : words(v) & 0xffff0000u);
    };
    if constexpr (R > V) {
      vf b[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) b[v] = widened(v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf held = factor(r);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = add_product(sum[r][v], held, b[v]);
      }
    } else {
      vf factors[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) factors[r] = factor(r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const vf held = widened(v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r][v] = add_product(sum[r][v], factors[r], held);
      }
    }
  }
}

// Scores of R queries at V vectors of positions from vector `first` of the tile on.
template <int R, int V, Fetch F>
inline void multiply_keys(const InPlace& of, int query, int64_t first) {
  const bf16* keys[V];
  const bf16* ahead[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const int64_t place = (first + v) / kPlaceVectors, at = (first + v) % kPlaceVectors * 2 * W;
    keys[v] = of.tile.keys[place] + at;
    ahead[v] = of.ahead.keys[place] + at;
  }
  const float* a = of.queries + query * of.size;
  const int64_t words = of.size / 2, a_stride = of.size, key_stride = of.key_stride;
  vf sum[R][V] = {};
  int64_t at = 0;
  for (int64_t word = 0; word < words; ++word, at += key_stride) {
    if (fetches<F>(word)) fetch_lines<V>([&](int v) { return ahead[v] + at; });
    add_words<R, V>(sum, a + 2 * word, a_stride, [&](int v) { return load_words(keys[v] + at); });
  }
  float* scores = of.scores + query * kTile + first * W;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kTile + v * W, sum[r][v]);
  }
}

// Adds R queries' weights times V vectors of the values' elements.
template <int R, int V, Fetch F>
inline void add_values(const InPlace& of, int query, int64_t first) {
  const int64_t size = of.size;
  float* out = of.out + query * size + first * W;
  vf sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = load(out + r * size + v * W);
  }
  const float* a = of.scores + query * kTile;
  for (int i = 0; i < kPlaces; ++i) {
    const bf16* values = of.tile.values[i] + first * 2 * W;
    const bf16* ahead = of.ahead.values[i] + first * 2 * W;
    for (int64_t pair = 0; pair < kPairPositions / 2; ++pair, a += 2) {
      if (fetches<F>(pair)) fetch_lines<V>([&](int v) { return ahead + v * 2 * W; });
      add_words<R, V>(sum, a, kTile, [&](int v) { return load_words(values + v * 2 * W); });
      values += 2 * size;
      ahead += 2 * size;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(out + r * size + v * W, sum[r][v]);
  }
}

// Rows of a register tile at most, and its vectors: the products need 8 accumulators at least to be in
// flight, and the more rows, the fewer words are widened again.
constexpr int kInPlaceRows = 6, kUsualRows = 4;
constexpr int in_place_vectors(int rows) {
  return rows == 1 ? 8 : rows == 2 ? 4 : rows == 3 ? 3 : 2;
}

enum class Operand { kKeys, kValues };

template <Operand O, Fetch F, int R, int V>
QS_INLINE void multiply_vectors(const InPlace& of, int query, int64_t first) {
  if constexpr (O == Operand::kKeys) {
    multiply_keys<R, V, F>(of, query, first);
  } else {
    add_values<R, V, F>(of, query, first);
  }
}

// Of `rows` <= kInPlaceRows queries.
template <Operand O, Fetch F, int R = kInPlaceRows>
inline void multiply_rows_in_place(const InPlace& of, int query, int rows) {
  if constexpr (R > 1) {
    if (rows < R) {
      multiply_rows_in_place<O, F, R - 1>(of, query, rows);
      return;
    }
  }
  constexpr int V = in_place_vectors(R);
  const int64_t count = O == Operand::kKeys ? kTile / W : of.size / W;  // even
  int64_t at = 0;
  for (int64_t left = count; left >= V && left != V + 1; left -= V, at += V) {
    multiply_vectors<O, F, R, V>(of, query, at);
  }
  for (; at < count; at += 2) multiply_vectors<O, F, R, 2>(of, query, at);
}

// Of queries [first, last). Those of the first register tile, or of the first two, fetch the next tile.
template <Operand O>
inline void multiply_in_place(const InPlace& of, int first, int last) {
  const auto rows_from = [&](int query) {
    return last - query <= kInPlaceRows ? last - query : kUsualRows;
  };
  int query = first, rows = rows_from(query);
  if (rows == last - first) {
    multiply_rows_in_place<O, Fetch::kAll>(of, query, rows);
    return;
  }
  multiply_rows_in_place<O, Fetch::kEven>(of, query, rows);
  query += rows;
  rows = rows_from(query);
  multiply_rows_in_place<O, Fetch::kOdd>(of, query, rows);
  for (query += rows; query < last; query += rows) {
    rows = rows_from(query);
    multiply_rows_in_place<O, Fetch::kNone>(of, query, rows);
  }
}

}  // namespace qs::QS_LEVEL

#endif
