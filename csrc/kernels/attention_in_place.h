// Products with a tile of a cache in pairs (kv_pairs.h) where it is: words are what products of pairs read,
// or become floats in registers, so that a tile is neither copied nor widened in memory. The chains are
// those of attention_products.h, hence the bits too.
//
// A copy of floats fills the first cache, while the shifts and masks that widen run next to the products.
// Products of AMX read a copy.
#pragma once

#include "kernels/attention_tile.h"
#include "kv_pairs.h"

namespace qs::QS_LEVEL {

// Whether the products of a form read a cache in pairs where it is.
#if defined(__AVX2__)
template <typename Form>
constexpr bool kReadsInPlace = !Form::kOnTiles;
#else
template <typename Form>
constexpr bool kReadsInPlace = false;
#endif

constexpr int kPlaceVectors = kPairPositions / W;
constexpr int kPlaces = kTile / kPairPositions;

// A kv head's keys and values of a tile, 16 positions at a time.
struct TilePlaces {
  const bf16* keys[kPlaces];
  const bf16* values[kPlaces];
};

// The operands of a tile's products. `size` is the head's, and a multiple of 2 * W. A product multiplies
// `kPair` elements of a query or weights at a time.
struct InPlace {
  TilePlaces tile;
  TilePlaces ahead;  // of the next tile
  int64_t size, key_stride;
  const float* queries;  // [query][size / kPair]
  float* scores;         // [query][position]
  const float* weights;  // [query][position / kPair]
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

QS_INLINE vu load_words(const bf16* from) {
  return bit_cast<vu>(load(reinterpret_cast<const float*>(from)));
}

// `add`: sum[r][v] += a[r] times word v, by products of floats or of pairs.
template <typename Product>
struct WordProducts;

#if defined(__AVX2__)

template <>
struct WordProducts<Floats> {
  // The halves of a word in turn. In registers are the factors or the halves, which of them are fewer.
  template <int R, int V, typename Words>
  static QS_INLINE void add(vf (&sum)[R][V], const float* a, int64_t a_stride, const Words& words) {
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

 private:
  // In the sum's register and in the order of the source: by itself GCC 12 moves sums about and spills them.
  static QS_INLINE vf add_product(vf sum, vf a, vf b) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};

#endif

#if defined(__AVX512BF16__)

template <>
struct WordProducts<Pairs> {
  template <int R, int V, typename Words>
  static QS_INLINE void add(vf (&sum)[R][V], const float* a, int64_t a_stride, const Words& words) {
    vu held[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) held[v] = words(v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf factor = set1(a[r * a_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum[r][v]) : "v"(factor), "v"(held[v]));
      }
    }
  }
};

#endif

// Rows of a register tile at most, and its vectors: the products need 8 accumulators at least to be in
// flight, and the more rows, the fewer words are widened again.
#if defined(__AVX512F__)
constexpr int kInPlaceRows = 8, kUsualRows = 8;
constexpr int in_place_vectors(int rows) { return rows > 6 ? 2 : 4; }
#else
constexpr int kInPlaceRows = 6, kUsualRows = 4;
constexpr int in_place_vectors(int rows) {
  return rows == 1 ? 8 : rows == 2 ? 4 : rows == 3 ? 3 : 2;
}
#endif

// Scores of R queries at V vectors of positions from vector `first` of the tile on.
template <typename Product, int R, int V, Fetch F>
inline void multiply_keys(const InPlace& of, int query, int64_t first) {
  const bf16* keys[V];
  const bf16* ahead[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const int64_t place = (first + v) / kPlaceVectors, at = (first + v) % kPlaceVectors * 2 * W;
    keys[v] = of.tile.keys[place] + at;
    ahead[v] = of.ahead.keys[place] + at;
  }
  constexpr int64_t kStep = 2 / Product::kPair;
  const int64_t words = of.size / 2, a_stride = words * kStep, key_stride = of.key_stride;
  const float* a = of.queries + query * a_stride;
  vf sum[R][V] = {};
  int64_t at = 0;
  for (int64_t word = 0; word < words; ++word, at += key_stride) {
    if (fetches<F>(word)) fetch_lines<V>([&](int v) { return ahead[v] + at; });
    WordProducts<Product>::add(sum, a, a_stride, [&](int v) { return load_words(keys[v] + at); });
    a += kStep;
  }
  float* scores = of.scores + query * kTile + first * W;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kTile + v * W, sum[r][v]);
  }
}

// Adds R queries' weights times V vectors of the values' elements.
template <typename Product, int R, int V, Fetch F>
inline void add_values(const InPlace& of, int query, int64_t first) {
  const int64_t size = of.size;
  float* out = of.out + query * size + first * W;
  vf sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = load(out + r * size + v * W);
  }
  constexpr int64_t kStep = 2 / Product::kPair, kStride = kTile / Product::kPair;
  const float* a = of.weights + query * kStride;
  for (int i = 0; i < kPlaces; ++i) {
    const bf16* values = of.tile.values[i] + first * 2 * W;
    const bf16* ahead = of.ahead.values[i] + first * 2 * W;
    for (int64_t pair = 0; pair < kPairPositions / 2; ++pair) {
      if (fetches<F>(pair)) fetch_lines<V>([&](int v) { return ahead + v * 2 * W; });
      WordProducts<Product>::add(sum, a, kStride,
                                 [&](int v) { return load_words(values + v * 2 * W); });
      a += kStep;
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

enum class Operand { kKeys, kValues };

template <typename Product, Operand O, Fetch F, int R, int V>
QS_INLINE void multiply_vectors(const InPlace& of, int query, int64_t first) {
  if constexpr (O == Operand::kKeys) {
    multiply_keys<Product, R, V, F>(of, query, first);
  } else {
    add_values<Product, R, V, F>(of, query, first);
  }
}

// Of `rows` <= kInPlaceRows queries.
template <typename Product, Operand O, Fetch F, int R = kInPlaceRows>
inline void multiply_rows_in_place(const InPlace& of, int query, int rows) {
  if constexpr (R > 1) {
    if (rows < R) {
      multiply_rows_in_place<Product, O, F, R - 1>(of, query, rows);
      return;
    }
  }
  constexpr int V = in_place_vectors(R);
  const int64_t count = O == Operand::kKeys ? kTile / W : of.size / W;  // even
  int64_t at = 0;
  for (int64_t left = count; left >= V && left != V + 1; left -= V, at += V) {
    multiply_vectors<Product, O, F, R, V>(of, query, at);
  }
  for (; at < count; at += 2) multiply_vectors<Product, O, F, R, 2>(of, query, at);
}

// Of queries [first, last). Those of the first register tile, or of the first two, fetch the next tile.
template <typename Product, Operand O>
inline void multiply_in_place(const InPlace& of, int first, int last) {
  const auto rows_from = [&](int query) {
    return last - query <= kInPlaceRows ? last - query : kUsualRows;
  };
  int query = first, rows = rows_from(query);
  if (rows == last - first) {
    multiply_rows_in_place<Product, O, Fetch::kAll>(of, query, rows);
    return;
  }
  multiply_rows_in_place<Product, O, Fetch::kEven>(of, query, rows);
  query += rows;
  rows = rows_from(query);
  multiply_rows_in_place<Product, O, Fetch::kOdd>(of, query, rows);
  for (query += rows; query < last; query += rows) {
    rows = rows_from(query);
    multiply_rows_in_place<Product, O, Fetch::kNone>(of, query, rows);
  }
}

}  // namespace qs::QS_LEVEL
