// The products of attention: a register tile of query rows by positions (scores) or by dimensions
// (weighted values), every output one chain in ascending order.
//
// A step of a chain multiplies words of 4 bytes: a float, or, on a level with dot products of
// bfloat16, two neighbours of them (`kPair` 2), which is twice as fast.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// Half-open range of KV positions, or of steps of a chain.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

QS_INLINE Span intersect(Span a, Span b) {
  return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

struct Floats {
  static constexpr int kPair = 1;
  static QS_INLINE vf add(vf sum, float a, vf b) { return fma(set1(a), b, sum); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int kPair = 2;
  static QS_INLINE vf add(vf sum, float a, vf b) {
    return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(set1(a)), bit_cast<__m512bh>(b));
  }
};
#endif

// Rows of a register tile, and its vectors: 24 accumulators of 32 registers at most, 8 of 16. With 32
// up to 8 rows, so that the query heads of a kv head are not parted into a tile and a rest. With 16
// that would leave a vector a row, hence a load for every product; two tiles of 4 and 3 rows by two
// and four vectors take 0.9 times as long as one of 7 rows.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRows = 8;
constexpr int sum_vectors(int rows) { return rows > 6 ? 2 : 4; }
#elif defined(__AVX2__)
constexpr int kSumRows = 4;
constexpr int sum_vectors(int rows) { return rows > 3 ? 2 : 4; }
#else
constexpr int kSumRows = 4;
constexpr int sum_vectors(int) { return 2; }
#endif

// What a run of sum_products reads and writes; strides count words.
struct Products {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  bool from_zero;
};

// c[R][V * W] (+)= sum over i in `range` of a[r][i] * b[i][...], i ascending.
template <typename Product, int R, int V>
QS_INLINE void sum_products(const Products& of, Span range, int64_t at) {
  vf sum[R][V];
  float* c = of.c + at;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sum[r][v] = of.from_zero ? vf{} : load(c + r * of.c_stride + v * W);
    }
  }
  const float* a = of.a;
  const int64_t a_stride = of.a_stride;
  for (int64_t i = range.begin; i < range.end; ++i) {
    vf held[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) held[v] = load(of.b + i * of.b_stride + at + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = Product::add(sum[r][v], a[r * a_stride + i], held[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * of.c_stride + v * W, sum[r][v]);
  }
}

// The same over `rows` <= kSumRows rows and `width` columns, a multiple of W.
template <typename Product, int R = kSumRows>
inline void sum_products_rows(int rows, const Products& of, Span range, int64_t width) {
  if constexpr (R > 1) {
    if (rows < R) {
      sum_products_rows<Product, R - 1>(rows, of, range, width);
      return;
    }
  }
  constexpr int V = sum_vectors(R);
  int64_t at = 0;
  for (; at + V * W <= width; at += V * W) sum_products<Product, R, V>(of, range, at);
  for (; at < width; at += W) sum_products<Product, R, 1>(of, range, at);
}

}  // namespace qs::QS_LEVEL
