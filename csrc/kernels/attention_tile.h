// One KV tile against up to 64 query rows: scores, online softmax, weighted sum of values.
//
// For one query row and head everything is a chain in a fixed order: a score adds over d; a tile's
// weights add by vector lane, then by reduce_add; an output element adds over the visible positions
// in ascending order. Positions that a query must not see are left out of its chain, or are
// zeros (amx_attention.h), so their contents (another step's tokens, NaN) have no effect.
#pragma once

#include "kernels/amx_attention.h"
#include "kernels/attention_products.h"
#include "kernels/kernels.h"
#include "kernels/transpose.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {

constexpr int64_t kTile = 64;       // KV positions, at absolute multiples
constexpr int64_t kMaxQueries = 64;  // (token, head) pairs that share a pass over the KV
constexpr int64_t kMaxHeadSize = QS_MAX_HEAD_SIZE;
constexpr int64_t kUsualHeadSize = 256;  // up to which a pass has the smaller memory
static_assert(kMaxHeadSize % (2 * W) == 0);

// Softmax state of a query row over the positions seen so far: maximum (of scores in
// units of log2), sums of weights by vector lane, and the weighted sum of values.
struct SoftmaxState {
  float max[kMaxQueries];
  alignas(64) float sums[kMaxQueries * W];
  float* out;  // [query][width of values]
};

// A width is the size of keys or values rounded up to whole vectors; a word is a float or a pair.
struct TileBuffers {
  float* queries;  // [query][words of the width]
  float* keys;     // [word of the width][position]
  float* values;   // [position or pair of them][width]
  alignas(64) float scores[kMaxQueries * kTile];          // then exp(score - max)
  alignas(64) float pairs[kMaxQueries * kTile / 2];       // the same as pairs
  alignas(64) float rests[kMaxQueries * kTile / 2];       // what pairs of scaled weights leave
  alignas(64) float key_scales[kTile];                    // of quants; 0 outside the span
  alignas(64) float value_scales[kTile];
#if defined(__AMX_BF16__)
  TilesOfRows tiles;
#endif
};

// The memory of a pass whose keys and values have up to `Size` elements.
template <int64_t Size>
struct PassMemory {
  alignas(64) float queries[kMaxQueries * Size];
  alignas(64) float keys[Size * kTile];
  alignas(64) float values[kTile * Size];
  alignas(64) float out[kMaxQueries * Size];
  alignas(64) float total[kMaxQueries * Size];

  void lend(TileBuffers& buffers) {
    buffers.queries = queries;
    buffers.keys = keys;
    buffers.values = values;
  }
};

inline int64_t value_size(const qs_attention& call) {
  return call.v_cache == nullptr ? call.value_size : call.head_size;
}

// How a tile is computed: products of floats or of pairs; `kScaled`: keys and values are quants.
template <typename ProductType, bool Scaled>
struct TileForm {
  using Product = ProductType;
  static constexpr bool kScaled = Scaled;
  static constexpr int kPair = ProductType::kPair;
#if defined(__AMX_BF16__)
  static constexpr bool kOnTiles = kPair == 2;
#else
  static constexpr bool kOnTiles = false;
#endif
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

constexpr int kTileVectors = static_cast<int>(kTile / W);

// [query][kTile / Form::kPair], of weights without scales.
template <typename Form>
QS_INLINE const float* weights_of(const TileBuffers& buffers) {
  return Form::kPair == 2 ? buffers.pairs : buffers.scores;
}

// Query `row`'s weights as words of the product with values.
template <typename Form>
QS_INLINE void store_weights(TileBuffers& buffers, int row, const vf (&weights)[kTileVectors]) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) store(buffers.scores + row * kTile + i * W, weights[i]);
}

QS_INLINE bool is_complete_tile(Span visible) { return visible.begin == 0 && visible.end == kTile; }

// Scores of a tile in units of log2: scaled, capped, -inf where the query must not look.
template <bool Scaled>
QS_INLINE void finish_scores(const qs_attention& call, Span visible, const TileBuffers& buffers,
                             vf (&scores)[kTileVectors]) {
  constexpr float kLog2e = 1.44269504f;
  const bool capped = call.softcap > 0.0f;
  const float factor = capped ? call.scale / call.softcap : call.scale * kLog2e;
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    scores[i] = scores[i] * factor;
    if constexpr (Scaled) scores[i] = scores[i] * load(buffers.key_scales + i * W);
  }
  if (capped) {
    for (vf& score : scores) score = call.softcap * kLog2e * vtanh(score);
  }
  if (is_complete_tile(visible)) return;
  const vf low = set1(-__builtin_inff());
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    scores[i] = lanes_inside(i * W, visible) ? scores[i] : low;
  }
}

// The maxima of W rows of lanes.
QS_INLINE vf max_of_rows(const float* rows) {
  vf lanes[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) lanes[i] = load(rows + i * W);
  transpose(lanes);
#pragma GCC unroll 16
  for (int step = W / 2; step > 0; step /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < step; ++i) lanes[i] = vmax(lanes[i], lanes[i + step]);
  }
  return lanes[0];
}

// A query's scores as weights, whose sums are of the weights before they are multiplied by the
// values' scales.
template <typename Form>
QS_INLINE void softmax_row(Span visible, TileBuffers& buffers, int query, float max, float* sums) {
  vf weights[kTileVectors];
  vf total = load(sums);
#pragma GCC unroll 16
  for (int i = 0; i < kTileVectors; ++i) {
    weights[i] = vexp2_nonpositive(load(buffers.scores + query * kTile + i * W) - max);
    total += weights[i];
    if constexpr (Form::kScaled) weights[i] = weights[i] * load(buffers.value_scales + i * W);
  }
  store(sums, total);
  if (Form::kScaled && !is_complete_tile(visible)) {
    // a scale that the query must not see may be NaN
#pragma GCC unroll 16
    for (int i = 0; i < kTileVectors; ++i) {
      weights[i] = lanes_inside(i * W, visible) ? weights[i] : vf{};
    }
  }
  store_weights<Form>(buffers, query, weights);
}

// Turns raw scores of some queries into weights and moves their states on to the new maxima, where
// they see any of the tile. A pass for the maxima and one for the weights: no query waits for its
// own maximum, and W queries share an exponential.
template <typename Form>
void softmax_rows(const qs_attention& call, const Span* visible, int first, int last,
                TileBuffers& buffers, int64_t width, SoftmaxState& state) {
  alignas(64) float tops[kMaxQueries * W];
  for (int i = first; i < last; ++i) {
    if (visible[i].empty()) {
      store(tops + i * W, vf{});
      continue;
    }
    float* of_row = buffers.scores + i * kTile;
    vf scores[kTileVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kTileVectors; ++v) scores[v] = load(of_row + v * W);
    finish_scores<Form::kScaled>(call, visible[i], buffers, scores);
    vf top = scores[0];
#pragma GCC unroll 16
    for (int v = 1; v < kTileVectors; ++v) top = vmax(scores[v], top);
#pragma GCC unroll 16
    for (int v = 0; v < kTileVectors; ++v) store(of_row + v * W, scores[v]);
    store(tops + i * W, top);
  }
  for (int begin = first / W * W; begin < last; begin += W) {
    alignas(64) float maxima[W], factors[W];
    const vf old = load(state.max + begin), top = max_of_rows(tops + begin * W);
    const vf now = vmax(top, old);
    store(maxima, now);
    // other lanes may hold anything: an exponential of denormals takes a hundred times as long
    const vi computed = lanes_inside(begin, {first, last});
    store(factors, vexp2_nonpositive(computed ? old - now : vf{}));
    const int end = static_cast<int>(min_of(last, begin + W));
    for (int i = static_cast<int>(max_of(first, begin)); i < end; ++i) {
      if (visible[i].empty()) continue;
      float* sums = state.sums + i * W;
      const float factor = factors[i - begin];
      if (factor != 1.0f) {
        scale_row(sums, W, factor);
        scale_row(state.out + i * width, width, factor);
        state.max[i] = maxima[i - begin];
      }
      softmax_row<Form>(visible[i], buffers, i, state.max[i], sums);
    }
  }
}

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
QS_INLINE void store_weights<TileForm<Pairs, false>>(TileBuffers& buffers, int row,
                                                     const vf (&weights)[kTileVectors]) {
  float* pairs = buffers.pairs + row * kTile / 2;
#pragma GCC unroll 2
  for (int i = 0; i < kTileVectors; i += 2) {
    store(pairs + i / 2 * W, bit_cast<vf>(_mm512_cvtne2ps_pbh(weights[i + 1], weights[i])));
  }
}

// A weight that took over a scale has no few-bit values left, not even for one visible position;
// what its rounding leaves goes into a second word.
template <>
QS_INLINE void store_weights<TileForm<Pairs, true>>(TileBuffers& buffers, int row,
                                                    const vf (&weights)[kTileVectors]) {
  float* pairs = buffers.pairs + row * kTile / 2;
  float* rests = buffers.rests + row * kTile / 2;
#pragma GCC unroll 2
  for (int i = 0; i < kTileVectors; i += 2) {
    const vf low = weights[i], high = weights[i + 1];
    const __m512i packed = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    store(pairs + i / 2 * W, bit_cast<vf>(packed));
    const vf low_taken = bit_cast<vf>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(packed)), 16));
    const vf high_taken = bit_cast<vf>(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(packed, 1)), 16));
    const __m512bh rest = _mm512_cvtne2ps_pbh(high - high_taken, low - low_taken);
    store(rests + i / 2 * W, bit_cast<vf>(rest));
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
