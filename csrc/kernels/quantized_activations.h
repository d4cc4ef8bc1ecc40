// Activations as the low-bit kernels read them: quants of 8 bits, per token and group the largest
// magnitude / 127 as their scale, rounded half to even.
#pragma once

#include "kernels/quantized_tile.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {

constexpr int64_t kQuantizeItemElements = 8192;
constexpr int64_t kGroupsAhead = 2;
constexpr float kTiny = 1e-30f;  // 127 over anything smaller overflows, or nearly

// The largest magnitude; NaN or inf if there is one.
template <typename T>
QS_INLINE float largest(const T* x, int64_t n) {
  vi most = {};
  for (int64_t i = 0; i < n; i += W) {
    const vi magnitude = bit_cast<vi>(load_up_to(x + i, n - i)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return bit_cast<float>(reduce_max(most));
}

// Steps of 4 quants, `rows` steps apart.
QS_INLINE void store_quants(int8_t* p, vi v, int64_t rows) {
  typedef int32_t steps __attribute__((vector_size(W)));
  steps narrow;
#if defined(__AVX512F__)
  narrow = bit_cast<steps>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(v)));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  narrow = bit_cast<steps>(__builtin_convertvector(v, bytes));
#endif
  for (int i = 0; i < W / kStepInputs; ++i) {
    const int32_t step = narrow[i];
    memcpy(p + i * rows * kStepInputs, &step, sizeof(step));
  }
}

// The factors of n inputs: what quants are multiplied with, and their scale.
struct Scaling {
  float inverse, scale;
};

template <typename T>
QS_INLINE Scaling scaling_of(const T* x, int64_t n) {
  const float most = largest(x, n);
  if (!(most < __builtin_inff())) return {0.0f, __builtin_nanf("")};
  if (!(most > kTiny)) return {0.0f, 0.0f};
  return {127.0f / most, most / 127.0f};
}

constexpr float kMagic = 0x1.8p23f;  // adding it leaves no bits below 1, rounding half to even

template <typename T>
QS_INLINE vi rounded_quants(const T* x, int64_t n, float inverse) {
  const vf scaled = load_up_to(x, n) * set1(inverse) + set1(kMagic);
  return bit_cast<vi>(scaled) - bit_cast<int32_t>(kMagic);
}

// Returns the sum of the quants, whose array has n elements rounded up to W.
template <typename T>
QS_INLINE int32_t quantize_group(const T* x, int64_t n, int64_t rows, float inverse,
                                 int8_t* quants) {
  vi total = {};
  if (inverse == 0.0f) {
    for (int64_t i = 0; i < n; i += W) store_quants(quants + i * rows, total, rows);
    return 0;
  }
  for (int64_t i = 0; i < n; i += W) {
    const vi rounded = rounded_quants(x + i, n - i, inverse);
    total += rounded;
    store_quants(quants + i * rows, rounded, rows);
  }
  return reduce_add(total);
}

constexpr int64_t kTogether = 4;  // rows whose quants of W inputs make a register of AVX-512

#if defined(__AVX512F__)
// The same for the rows of a tile of 4, `x_stride` apart, none of whose factors is 0: complete
// registers are stored instead of steps.
template <typename T>
QS_INLINE void quantize_together(const T* x, int64_t x_stride, int64_t n, const Scaling* scalings,
                                 int8_t* quants, int32_t* sums) {
  const __m512i steps_of_rows =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  vi totals[kTogether] = {};
  for (int64_t i = 0; i < n; i += W) {
    __m128i narrow[kTogether];
#pragma GCC unroll 4
    for (int row = 0; row < kTogether; ++row) {
      const vi rounded = rounded_quants(x + row * x_stride + i, n - i, scalings[row].inverse);
      totals[row] += rounded;
      narrow[row] = _mm512_cvtepi32_epi8(bit_cast<__m512i>(rounded));
    }
    __m512i all = _mm512_castsi128_si512(narrow[0]);
    all = _mm512_inserti32x4(all, narrow[1], 1);
    all = _mm512_inserti32x4(all, narrow[2], 2);
    all = _mm512_inserti32x4(all, narrow[3], 3);
    all = _mm512_permutexvar_epi32(steps_of_rows, all);
    memcpy(quants + i * kTogether, &all, sizeof(all));
  }
#pragma GCC unroll 4
  for (int row = 0; row < kTogether; ++row) sums[row] = reduce_add(totals[row]);
}
#endif

// One group of all rows of a tile, at `quants`.
template <typename T>
QS_INLINE void quantize_rows_of_group(const T* x, int64_t x_stride, int64_t n, int64_t rows,
                                      const Scaling* scalings, int8_t* quants, int32_t* sums) {
#if defined(__AVX512F__)
  bool together = rows == kTogether;
  for (int64_t row = 0; row < rows; ++row) together = together && scalings[row].inverse != 0.0f;
  if (together) {
    quantize_together(x, x_stride, n, scalings, quants, sums);
    return;
  }
#endif
  for (int64_t row = 0; row < rows; ++row) {
    sums[row] = quantize_group(x + row * x_stride, n, rows, scalings[row].inverse,
                               quants + row * kStepInputs);
  }
}

// Prefetches the group that is kGroupsAhead further: rows are far apart, and the bytes read of one
// at a time are too few for the hardware to predict the next.
template <typename T>
QS_INLINE void fetch_group(const T* x, int64_t x_stride, int64_t n, int64_t rows) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead = reinterpret_cast<const char*>(x + row * x_stride + kGroupsAhead * n);
    for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(ahead + i, 0, 3);
  }
}

// -8 times the sums of 16 inputs' quants.
inline void sum_parts(const int8_t* quants, int64_t num_parts, int64_t rows, int32_t* parts) {
  constexpr int64_t kSteps = kSubBlockInputs / kStepInputs;
#if defined(__AVX512F__)
  const auto lanes = static_cast<__mmask16>((1u << rows) - 1);
  const auto ones = Dot<4>::quants(vquants{} + 1);
  for (int64_t part = 0; part < num_parts; ++part) {
    vi sum = {};
#pragma GCC unroll 4
    for (int64_t step = 0; step < kSteps; ++step) {
      Dot<4>::add(sum, ones, bit_cast<vi>(_mm512_maskz_loadu_epi32(lanes, quants)));
      quants += rows * kStepInputs;
    }
    _mm512_mask_storeu_epi32(parts, lanes, bit_cast<__m512i>(sum * -8));
    parts += rows;
  }
#else
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int64_t row = 0; row < rows; ++row) {
      const int8_t* first = quants + (part * kSteps * rows + row) * kStepInputs;
      int32_t sum = 0;
      for (int64_t i = 0; i < kSubBlockInputs; ++i) {
        sum += first[i / kStepInputs * rows * kStepInputs + i % kStepInputs];
      }
      *parts++ = -8 * sum;
    }
  }
#endif
}

// Rows of a tile are interleaved, as the tile reads them: [steps][rows][4], [groups][2][rows].
template <typename T>
void quantize_tile(const QuantizedLinearArgs& args, Range tile) {
  const PackedQuantized& packed = *args.packed;
  const QuantizedRows& rows = args.rows;
  int8_t* quants = rows.quants + tile.begin * rows.stride;
  int32_t* factors = rows.factors + tile.begin * packed.num_groups * 2;
  // What follows the inputs is multiplied by quants that are zero, but has to be finite: bytes are.
  const int64_t written = div_up(packed.k, W) * W;
  const int64_t shared = packed.shared_groups();
  memset(quants + written * tile.size(), 0, (rows.stride - written) * tile.size());
  const T* x = static_cast<const T*>(args.x) + tile.begin * args.x_stride;
  Scaling scalings[kDirectRows] = {};
  int32_t sums[kDirectRows];
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    const int64_t first = group * packed.group_size;
    const int64_t size = min_of(packed.group_size, packed.k - first);
    for (int64_t row = 0; row < tile.size() && group % shared == 0; ++row) {
      scalings[row] = scaling_of(x + row * args.x_stride + first, size * shared);
    }
    if (packed.num_groups > 1) fetch_group(x + first, args.x_stride, size, tile.size());
    quantize_rows_of_group(x + first, args.x_stride, size, tile.size(), scalings,
                           quants + first * tile.size(), sums);
    int32_t* factor = factors + 2 * group * tile.size();
    for (int64_t row = 0; row < tile.size(); ++row) {
      factor[row] = bit_cast<int32_t>(scalings[row].scale * packed.scale_unit());
      factor[row + tile.size()] = -(sums[row] << (packed.bits - 1));
    }
  }
  if (rows.parts == nullptr || tile.size() > kPartRows) return;
  const int64_t num_parts = rows.stride / kSubBlockInputs;
  sum_parts(quants, num_parts, tile.size(), rows.parts + tile.begin * num_parts);
}

inline void quantize_rows(Pool* pool, const QuantizedLinearArgs& args, int64_t num_tiles) {
  const int64_t num_items =
      max_of(1, min_of(num_tiles, args.num_tokens * args.packed->k / kQuantizeItemElements));
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_items, [&](int64_t item) {
      const Range tiles = part(num_tiles, item, num_items);
      for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        quantize_tile<T>(args, part(args.num_tokens, tile, num_tiles));
      }
    });
  });
}

}  // namespace qs::QS_LEVEL
