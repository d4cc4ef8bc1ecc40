// One KV tile against up to 32 query rows: gather, scores, online softmax, weighted sum of values.
//
// For one query row and head everything is a chain in a fixed order: a score adds over d; a tile's
// weights add by vector lane, then by reduce_add; an output element adds over the visible positions
// in ascending order. Positions that a query must not see are left out of its chain, not multiplied
// by zero, so what stands there (another step's tokens, NaN) cannot show.
#pragma once

#include "kernels/kernels.h"
#include "kernels/transpose.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {

constexpr int64_t kTile = 64;       // KV positions, at absolute multiples
constexpr int64_t kMaxQueries = 32;  // (token, head) pairs that share a pass over the KV
constexpr int64_t kMaxHeadSize = 256;

// Register tile of both products: kSumRows queries x kSumVectors registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRows = 6, kSumVectors = 4;
#elif defined(__AVX2__)
constexpr int kSumRows = 6, kSumVectors = 2;
#else
constexpr int kSumRows = 4, kSumVectors = 2;
#endif

// Softmax state of a query row over the positions seen so far: maximum, sum of weights, and the
// weighted sum of values, which stands in `out`.
struct SoftmaxState {
  float max[kMaxQueries];
  float sum[kMaxQueries];
  float out[kMaxQueries * kMaxHeadSize];
};

// Half-open range of absolute KV positions.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

QS_INLINE Span intersect(Span a, Span b) {
  return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

struct TileBuffers {
  alignas(64) float queries[kMaxQueries * kMaxHeadSize];
  alignas(64) float keys[kMaxHeadSize * kTile];  // transposed: [d][position]
  alignas(64) float values[kTile * kMaxHeadSize];
  alignas(64) float weights[kMaxQueries * kTile];  // scores, then exp(score - max)
};

// c[R][V * W] (+)= sum over i in [begin, end) of a[r][i] * b[i][...], i ascending.
template <int R, int V>
QS_INLINE void sum_products(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            Span range, float* c, int64_t c_stride, bool from_zero) {
  vf sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = from_zero ? vf{} : load(c + r * c_stride + v * W);
  }
  for (int64_t i = range.begin; i < range.end; ++i) {
    vf held[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) held[v] = load(b + i * b_stride + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf streamed = set1(a[r * a_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = fma(streamed, held[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * W, sum[r][v]);
  }
}

template <int R>
QS_INLINE void sum_products_wide(const float* a, int64_t a_stride, const float* b,
                                 int64_t b_stride, Span range, float* c, int64_t c_stride,
                                 int64_t width, bool from_zero) {
  int64_t at = 0;
  for (; at + kSumVectors * W <= width; at += kSumVectors * W) {
    sum_products<R, kSumVectors>(a, a_stride, b + at, b_stride, range, c + at, c_stride, from_zero);
  }
  for (; at < width; at += W) {
    sum_products<R, 1>(a, a_stride, b + at, b_stride, range, c + at, c_stride, from_zero);
  }
}

// As sum_products over `rows` <= kSumRows rows and `width` columns, a multiple of W.
template <int R = kSumRows>
inline void sum_products_rows(int rows, const float* a, int64_t a_stride, const float* b,
                              int64_t b_stride, Span range, float* c, int64_t c_stride,
                              int64_t width, bool from_zero) {
  if constexpr (R > 1) {
    if (rows < R) {
      sum_products_rows<R - 1>(rows, a, a_stride, b, b_stride, range, c, c_stride, width,
                               from_zero);
      return;
    }
  }
  sum_products_wide<R>(a, a_stride, b, b_stride, range, c, c_stride, width, from_zero);
}

// Brings the positions of `span` (inside one tile) to fp32: keys transposed, values as rows.
template <typename T>
class TileLoader {
 public:
  TileLoader(const qs_attention& call, int64_t row, int64_t kv_head)
      : block_table_(call.block_tables + row * call.max_blocks),
        block_size_(call.block_size),
        head_size_(call.head_size),
        stride_(int64_t{call.num_kv_heads} * call.head_size),
        keys_(static_cast<const T*>(call.k_cache) + kv_head * call.head_size),
        values_(static_cast<const T*>(call.v_cache) + kv_head * call.head_size) {}

  void load_tile(int64_t tile_begin, Span span, TileBuffers& buffers) {
    int64_t offsets[kTile];
    for (int64_t j = span.begin; j < span.end; ++j) {
      const int64_t block = block_table_[j / block_size_];
      offsets[j - tile_begin] = (block * block_size_ + j % block_size_) * stride_;
    }
    const Span local = {span.begin - tile_begin, span.end - tile_begin};
    if (head_size_ % W == 0) {
      convert<true>(offsets, local, buffers);
    } else {
      convert<false>(offsets, local, buffers);
    }
  }

 private:
  // `Whole`: the head size is a multiple of W.
  template <bool Whole>
  QS_INLINE static vf load_head(const T* p, int64_t n) {
    return Whole ? load(p) : load_up_to(p, n);
  }

  template <bool Whole>
  void convert(const int64_t* offsets, Span local, TileBuffers& buffers) const {
    for (int64_t j = 0; j < kTile; j += W) {
      if (j >= local.begin && j + W <= local.end) {
        load_keys<Whole>(offsets + j, 0, W, buffers.keys + j);
      } else if (j < local.end && j + W > local.begin) {
        load_keys<Whole>(offsets + j, max_of(0, local.begin - j), min_of(W, local.end - j),
                         buffers.keys + j);
      }
    }
    for (int64_t j = local.begin; j < local.end; ++j) {
      const T* from = values_ + offsets[j];
      float* to = buffers.values + j * kMaxHeadSize;
      for (int64_t d = 0; d < head_size_; d += W) {
        store(to + d, load_head<Whole>(from + d, head_size_ - d));
      }
    }
  }

  // W positions, of which [first, last) exist; the others get zeros.
  template <bool Whole>
  QS_INLINE void load_keys(const int64_t* offsets, int64_t first, int64_t last,
                           float* keys) const {
    for (int64_t d = 0; d < head_size_; d += W) {
      vf rows[W] = {};
      for (int64_t i = first; i < last; ++i) {
        rows[i] = load_head<Whole>(keys_ + offsets[i] + d, head_size_ - d);
      }
      transpose(rows);
      const int64_t num_d = Whole ? W : min_of(W, head_size_ - d);
      for (int64_t i = 0; i < num_d; ++i) store(keys + (d + i) * kTile, rows[i]);
    }
  }

  const int32_t* block_table_;
  int64_t block_size_, head_size_, stride_;
  const T* keys_;
  const T* values_;
};

QS_INLINE void scale_row(float* row, int64_t size, float factor) {
  const vf factors = set1(factor);
  for (int64_t i = 0; i < size; i += W) store(row + i, load(row + i) * factors);
}

// Turns a query's raw scores into weights and moves its state on to the new maximum.
QS_INLINE void softmax_row(const qs_attention& call, Span visible, float* scores, float& max,
                           float& sum, float* out) {
  const vf low = set1(-__builtin_inff());
  const vi lanes = lane_indices();
  vf tile_max = low;
  for (int64_t j = visible.begin / W * W; j < visible.end; j += W) {
    vf s = load(scores + j) * call.scale;
    if (call.softcap > 0.0f) s = call.softcap * vtanh(s / call.softcap);
    if (j < visible.begin || j + W > visible.end) {
      const vi lane = lanes + static_cast<int32_t>(j);
      const vi inside = (lane >= static_cast<int32_t>(visible.begin)) &
                        (lane < static_cast<int32_t>(visible.end));
      s = inside ? s : low;
    }
    store(scores + j, s);
    tile_max = vmax(s, tile_max);
  }
  const float tile_top = reduce_max(tile_max);
  const float new_max = tile_top > max ? tile_top : max;
  vf total = {};
  for (int64_t j = visible.begin / W * W; j < visible.end; j += W) {
    const vf weight = vexp(load(scores + j) - new_max);
    store(scores + j, weight);
    total += weight;
  }
  if (new_max != max) {
    const float factor = vexp(set1(max - new_max))[0];
    sum *= factor;
    scale_row(out, call.head_size, factor);
    max = new_max;
  }
  sum += reduce_add(total);
}

}  // namespace qs::QS_LEVEL
