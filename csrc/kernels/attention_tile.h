// One KV tile against up to 32 query rows: scores, online softmax, weighted sum of values.
//
// For one query row and head everything is a chain in a fixed order: a score adds over d; a tile's
// weights add by vector lane, then by reduce_add; an output element adds over the visible positions
// in ascending order. Positions that a query must not see are left out of its chain, or meet it as
// zeros on both sides, so what stands there (another step's tokens, NaN) cannot show.
#pragma once

#include "kernels/attention_products.h"
#include "kernels/kernels.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {

constexpr int64_t kTile = 64;       // KV positions, at absolute multiples
constexpr int64_t kMaxQueries = 32;  // (token, head) pairs that share a pass over the KV
constexpr int64_t kMaxHeadSize = 256;

// Softmax state of a query row over the positions seen so far: maximum, sum of weights, and the
// weighted sum of values, which stands in `out` [query][width].
struct SoftmaxState {
  float max[kMaxQueries];
  float sum[kMaxQueries];
  alignas(64) float out[kMaxQueries * kMaxHeadSize];
};

// `width` is the head size rounded up to whole vectors; a word is a float or a pair.
struct TileBuffers {
  alignas(64) float queries[kMaxQueries * kMaxHeadSize];  // [query][words of the width]
  alignas(64) float keys[kMaxHeadSize * kTile];           // [word of the width][position]
  alignas(64) float values[kTile * kMaxHeadSize];         // [position or pair of them][width]
  alignas(64) float scores[kMaxQueries * kTile];          // then exp(score - max)
  alignas(64) float pairs[kMaxQueries * kTile / 2];       // the same as pairs
  alignas(64) float rests[kMaxQueries * kTile / 2];       // what pairs of scaled weights leave
  alignas(64) float key_scales[kTile];                    // of codes; 0 outside the span
  alignas(64) float value_scales[kTile];
};

// How a tile is computed: products of floats or of pairs; `kScaled`: keys and values are codes.
template <typename ProductType, bool Scaled>
struct TileForm {
  using Product = ProductType;
  static constexpr bool kScaled = Scaled;
  static constexpr int kPair = ProductType::kPair;
  static int64_t width(int64_t head_size) {
    return div_up(head_size, W * kPair) * W * kPair;
  }
};

QS_INLINE void scale_row(float* row, int64_t size, float factor) {
  const vf factors = set1(factor);
  for (int64_t i = 0; i < size; i += W) store(row + i, load(row + i) * factors);
}

QS_INLINE vi lanes_inside(int64_t first, Span span) {
  const vi lane = lane_indices() + static_cast<int32_t>(first);
  return (lane >= static_cast<int32_t>(span.begin)) & (lane < static_cast<int32_t>(span.end));
}

// Where a query's softmax stands.
struct RowState {
  float& max;
  float& sum;
  float* out;  // [width]
  int64_t width;
};

// Turns a query's raw scores into weights and moves its state on to the new maximum. The sum is of
// the weights before they take over the values' scales.
template <bool Scaled>
QS_INLINE void softmax_row(const qs_attention& call, Span visible, const TileBuffers& buffers,
                           float* scores, RowState row) {
  const vf low = set1(-__builtin_inff());
  const int64_t begin = visible.begin / W * W;
  vf tile_max = low;
  for (int64_t j = begin; j < visible.end; j += W) {
    vf s = load(scores + j) * call.scale;
    if constexpr (Scaled) s = s * load(buffers.key_scales + j);
    if (call.softcap > 0.0f) s = call.softcap * vtanh(s / call.softcap);
    if (j < visible.begin || j + W > visible.end) s = lanes_inside(j, visible) ? s : low;
    store(scores + j, s);
    tile_max = vmax(s, tile_max);
  }
  const float tile_top = reduce_max(tile_max);
  const float new_max = tile_top > row.max ? tile_top : row.max;
  vf total = {};
  for (int64_t j = begin; j < visible.end; j += W) {
    vf weight = vexp(load(scores + j) - new_max);
    total += weight;
    if constexpr (Scaled) {
      weight = weight * load(buffers.value_scales + j);
      if (j < visible.begin || j + W > visible.end) {
        weight = lanes_inside(j, visible) ? weight : vf{};
      }
    }
    store(scores + j, weight);
  }
  if (new_max != row.max) {
    const float factor = vexp(set1(row.max - new_max))[0];
    row.sum *= factor;
    scale_row(row.out, row.width, factor);
    row.max = new_max;
  }
  row.sum += reduce_add(total);
}

// Query `row`'s weights as words of the product with values: floats are as they stand.
template <typename Form>
QS_INLINE void pack_weights(TileBuffers&, int) {}

// out[rows][width] += the weights of `visible` times the values; one chain per element.
template <typename Form>
QS_INLINE void add_values(int rows, Span visible, const TileBuffers& buffers, int first_row,
                          float* out, int64_t width) {
  const Products of = {buffers.scores + first_row * kTile, kTile, buffers.values, width,
                       out + first_row * width,            width, false};
  sum_products_rows<typename Form::Product>(rows, of, visible, width);
}

#if defined(__AVX512BF16__)

// As bfloat16, two to a word.
template <>
QS_INLINE void pack_weights<TileForm<Pairs, false>>(TileBuffers& buffers, int row) {
  const float* scores = buffers.scores + row * kTile;
  float* pairs = buffers.pairs + row * kTile / 2;
  for (int64_t j = 0; j < kTile; j += 2 * W) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(load(scores + j + W), load(scores + j));
    store(pairs + j / 2, bit_cast<vf>(packed));
  }
}

// A weight that took over a scale has no few-bit values left, not even for one visible position;
// what its rounding leaves goes into a second word.
template <>
QS_INLINE void pack_weights<TileForm<Pairs, true>>(TileBuffers& buffers, int row) {
  const float* scores = buffers.scores + row * kTile;
  float* pairs = buffers.pairs + row * kTile / 2;
  float* rests = buffers.rests + row * kTile / 2;
  for (int64_t j = 0; j < kTile; j += 2 * W) {
    const vf low = load(scores + j), high = load(scores + j + W);
    const __m512i packed = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    store(pairs + j / 2, bit_cast<vf>(packed));
    const vf low_taken = bit_cast<vf>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(packed)), 16));
    const vf high_taken = bit_cast<vf>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(packed, 1)), 16));
    const __m512bh rest = _mm512_cvtne2ps_pbh(high - high_taken, low - low_taken);
    store(rests + j / 2, bit_cast<vf>(rest));
  }
}

// The words of one pair of positions, of which only one is visible; the other becomes zero.
QS_INLINE void add_single_value(int rows, Products of, int64_t pair, uint32_t mask, int64_t width) {
  alignas(64) float masked[kMaxHeadSize];
  for (int64_t d = 0; d < width; d += W) {
    const vu words = bit_cast<vu>(load(of.b + pair * of.b_stride + d));
    store(masked + d, bit_cast<vf>(words & mask));
  }
  of.a += pair;
  of.b = masked;
  sum_products_rows<Pairs>(rows, of, {0, 1}, width);
}

inline void add_pairs(int rows, Span visible, const Products& of, int64_t width) {
  const Span whole = {div_up(visible.begin, 2), visible.end / 2};
  if (visible.begin % 2 != 0) {
    add_single_value(rows, of, visible.begin / 2, 0xffff0000u, width);
  }
  if (!whole.empty()) sum_products_rows<Pairs>(rows, of, whole, width);
  if (visible.end % 2 != 0) add_single_value(rows, of, visible.end / 2, 0x0000ffffu, width);
}

template <>
inline void add_values<TileForm<Pairs, false>>(int rows, Span visible, const TileBuffers& buffers,
                                               int first_row, float* out, int64_t width) {
  const Products of = {buffers.pairs + first_row * kTile / 2, kTile / 2, buffers.values, width,
                       out + first_row * width,               width,     false};
  add_pairs(rows, visible, of, width);
}

template <>
inline void add_values<TileForm<Pairs, true>>(int rows, Span visible, const TileBuffers& buffers,
                                              int first_row, float* out, int64_t width) {
  add_values<TileForm<Pairs, false>>(rows, visible, buffers, first_row, out, width);
  const Products of = {buffers.rests + first_row * kTile / 2, kTile / 2, buffers.values, width,
                       out + first_row * width,               width,     false};
  add_pairs(rows, visible, of, width);
}

#endif

}  // namespace qs::QS_LEVEL
