// The register tile of the low-bit linear: R rows x V vectors of outputs, in S panels at once, of
// integer sums; and how 4 inputs of a step meet on the level being compiled.
//
//   AVX-512   6 x 4 vectors (a panel is 4), 3 x 4 for groups of 4 bits, and 1 row x 4 panels: 4
//             streams of memory a thread
//   AVX2      2 x 4 vectors (half a panel)
//   portable  2 x 4 vectors (a quarter of a panel), in plain C++
//
// Sums are exact, so their order is free; every level gives the same integers.
#pragma once

#include "kernels/quantized.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

constexpr int kTileVectors = 4;
constexpr int kPanelParts = kQuantizedPanel / (kTileVectors * W);
constexpr int64_t kPartBytes = kStepBytes / kPanelParts;
#if defined(__AVX512F__)
constexpr int kQuantizedRows = 6;
constexpr int kGroupRows = 3;
constexpr int kHeldSums = 12;  // fp32 sums that fit into registers beside the integer ones
#elif defined(__AVX2__)
constexpr int kQuantizedRows = 2;
constexpr int kGroupRows = 2;
constexpr int kHeldSums = 0;
#else
constexpr int kQuantizedRows = 2;
constexpr int kGroupRows = 2;
constexpr int kHeldSums = 0;
#endif

// Rows of a tile. For groups of 4 bits fewer, as sums that stay in registers are worth more (Zen 4,
// groups of 32, 512 rows: 0.32 of 0.47 TOPS, against 0.28 with 6 rows; 8 bits lose, 0.24 for 0.30).
// One tile is best anyway, as codes are unpacked for each.
QS_INLINE int max_quantized_rows(const PackedQuantized& packed, int64_t num_tokens) {
  const bool few = packed.num_groups > 1 && packed.bits == 4 && num_tokens > kQuantizedRows;
  return few ? kGroupRows : kQuantizedRows;
}

// Panels that a tile of `rows` runs at once.
constexpr int max_quantized_panels(int rows) {
  if (kPanelParts > 1) return 1;
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// W outputs x 4 inputs.
typedef uint8_t vcodes __attribute__((vector_size(4 * W)));

QS_INLINE vcodes load_codes(const uint8_t* p) {
  vcodes v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// One step's codes of W outputs, out of a loaded vector: itself, or its lower or upper halves.
template <int Bits, int Half>
QS_INLINE vcodes step_codes(vcodes v) {
  if constexpr (Bits == 8) return v;
  const vu words = bit_cast<vu>(v);
  return bit_cast<vcodes>((Half == 0 ? words : words >> 4) & 0x0f0f0f0fu);
}

// sum += codes x activations, 4 inputs a lane. `kOffset` says that the codes count as they are, so
// that 2^(bits - 1) times the activations' sum is to be taken off; otherwise the product is of
// codes less 2^(bits - 1) already.
#if defined(__AVX512VNNI__)

template <int Bits>
struct Dot {
  using Codes = vi;
  static constexpr bool kOffset = true;
  static QS_INLINE Codes codes(vcodes v) { return bit_cast<vi>(v); }
  // Written as assembly because GCC 12 spills arrays of accumulators around the intrinsic.
  static QS_INLINE void add(vi& sum, Codes w, vi x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  }
};

#elif defined(__AVX2__)

#if defined(__AVX512F__)
QS_INLINE __m512i pairs_16(__m512i a, __m512i b) { return _mm512_maddubs_epi16(a, b); }
QS_INLINE __m512i pairs_32(__m512i a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
QS_INLINE __m512i magnitude(__m512i a) { return _mm512_abs_epi8(a); }
QS_INLINE __m512i with_sign_of(__m512i x, __m512i w) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
using vbytes = __m512i;
#else
QS_INLINE __m256i pairs_16(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }
QS_INLINE __m256i pairs_32(__m256i a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
QS_INLINE __m256i magnitude(__m256i a) { return _mm256_abs_epi8(a); }
QS_INLINE __m256i with_sign_of(__m256i x, __m256i w) { return _mm256_sign_epi8(x, w); }
using vbytes = __m256i;
#endif

template <int Bits>
struct Dot;

// 2 x 15 x 127 fits the 16 bits in which vpmaddubsw saturates.
template <>
struct Dot<4> {
  using Codes = vbytes;
  static constexpr bool kOffset = true;
  static QS_INLINE Codes codes(vcodes v) { return bit_cast<vbytes>(v); }
  static QS_INLINE void add(vi& sum, Codes w, vi x) {
    sum += bit_cast<vi>(pairs_32(pairs_16(w, bit_cast<vbytes>(x))));
  }
};

// 2 x 255 x 127 does not, but 2 x 128 x 127 does: magnitudes of codes - 128, signs moved over to
// the activations, which are never -128.
template <>
struct Dot<8> {
  struct Codes {
    vbytes value, magnitude;
  };
  static constexpr bool kOffset = false;
  static QS_INLINE Codes codes(vcodes v) {
    const vbytes value = bit_cast<vbytes>(v ^ 0x80);
    return {value, magnitude(value)};
  }
  static QS_INLINE void add(vi& sum, Codes w, vi x) {
    const vbytes moved = with_sign_of(bit_cast<vbytes>(x), w.value);
    sum += bit_cast<vi>(pairs_32(pairs_16(w.magnitude, moved)));
  }
};

#else

typedef int16_t vpairs __attribute__((vector_size(4 * W)));
typedef uint16_t vwords __attribute__((vector_size(4 * W)));

// Products of 16 bits, none of which overflows: 255 x 127.
template <int Bits>
struct Dot {
  using Codes = vcodes;
  static constexpr bool kOffset = true;
  static QS_INLINE Codes codes(vcodes v) { return v; }
  static QS_INLINE vi add_pairs(vpairs products) {
    const vi both = bit_cast<vi>(products);
    return (bit_cast<vi>(bit_cast<vu>(both) << 16) >> 16) + (both >> 16);
  }
  static QS_INLINE void add(vi& sum, Codes w, vi x) {
    const vpairs inputs = bit_cast<vpairs>(x);
    const vpairs even_inputs = bit_cast<vpairs>(bit_cast<vwords>(x) << 8) >> 8;
    const vpairs even = bit_cast<vpairs>(w) & 0xff;
    const vpairs odd = bit_cast<vpairs>(bit_cast<vwords>(w) >> 8);
    sum += add_pairs(even * even_inputs) + add_pairs(odd * (inputs >> 8));
  }
};

#endif

struct QuantizedTileArgs {
  const int8_t* x;
  int64_t x_stride;
  const float* x_scales;   // of the block's first group
  const int32_t* x_corrections;  // likewise: -2^(bits - 1) times the codes' sum
  int64_t x_groups;        // groups per token
  const uint8_t* w;        // the block's codes in the first panel, at the tile's part
  int64_t panel_bytes;
  int64_t group_bytes;
  int64_t code_bytes;      // of a group in a panel
  int64_t part_outputs;    // outputs of the panel before the tile's part
  int64_t num_inputs;      // of a group, or of the block within the one group; padded
  int64_t num_groups;      // of the block
  void* c;                 // int32 sums with one group, fp32 sums with groups; added to
  int64_t c_stride;
};

using QuantizedTileFn = void (*)(const QuantizedTileArgs& args);

// Multiplies [first, first + num_inputs) of R rows with the tile's outputs.
template <int Bits, int R, int S>
struct QuantizedTile {
  static constexpr int V = kTileVectors;
  static constexpr int64_t kVectorBytes = sizeof(vi);
  vi sum[R][S * V];

  template <int Half>
  QS_INLINE void step(const uint8_t* const (&w)[S], const int8_t* const (&x)[R], int64_t input) {
    using D = Dot<Bits>;
    if constexpr (R <= V) {
      vi held[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) held[r] = activations(x[r] + input);
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) {
        const auto codes = D::codes(step_codes<Bits, Half>(
            load_codes(w[v / V] + input * kStepBytes / kStepInputs * Bits / 8 -
                       Half * kStepBytes / 2 + v % V * kVectorBytes)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) D::add(sum[r][v], codes, held[r]);
      }
    } else {
      typename D::Codes held[S * V];
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) {
        held[v] = D::codes(step_codes<Bits, Half>(
            load_codes(w[v / V] + input * kStepBytes / kStepInputs * Bits / 8 -
                       Half * kStepBytes / 2 + v % V * kVectorBytes)));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vi streamed = activations(x[r] + input);
#pragma GCC unroll 16
        for (int v = 0; v < S * V; ++v) D::add(sum[r][v], held[v], streamed);
      }
    }
  }

  static QS_INLINE vi activations(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, sizeof(four));
    return set1i(four);
  }

  QS_INLINE void run(const uint8_t* const (&w)[S], const int8_t* const (&x)[R],
                     int64_t num_inputs) {
    if constexpr (Bits == 8) {
      for (int64_t k = 0; k < num_inputs; k += kStepInputs) step<0>(w, x, k);
    } else {
      for (int64_t k = 0; k < num_inputs; k += 2 * kStepInputs) {
        step<0>(w, x, k);
        step<1>(w, x, k + kStepInputs);
      }
    }
  }
};

// One group: the block's integer sums, added to c.
template <int Bits, int R, int S>
void run_single(const QuantizedTileArgs& call) {
  constexpr int V = kTileVectors;
  const QuantizedTileArgs args = call;  // so that no store can be taken to change it
  QuantizedTile<Bits, R, S> tile = {};
  const uint8_t* w[S];
  const int8_t* x[R];
#pragma GCC unroll 8
  for (int s = 0; s < S; ++s) w[s] = args.w + s * args.panel_bytes;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) x[r] = args.x + r * args.x_stride;
  tile.run(w, x, args.num_inputs);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < S * V; ++v) {
      int32_t* c = static_cast<int32_t*>(args.c) + r * args.c_stride + v / V * kQuantizedPanel +
                   v % V * W;
      vi total;
      memcpy(&total, c, sizeof(total));
      total += tile.sum[r][v];
      memcpy(c, &total, sizeof(total));
    }
  }
}

// The codes' sum of activations out of its correction, negative; exact.
template <int Bits>
QS_INLINE vf negative_sum(int32_t correction) {
  return __builtin_convertvector(set1i(correction), vf) * set1(1.0f / (1 << (Bits - 1)));
}

// Where the tile's sums stand in c.
QS_INLINE float* at(const QuantizedTileArgs& args, int row, int vector) {
  return static_cast<float*>(args.c) + row * args.c_stride +
         vector / kTileVectors * kQuantizedPanel + vector % kTileVectors * W;
}

// Groups in ascending order: c = fma((dot - zero * sum) * x_scale, w_scale, c).
template <int Bits, int R, int S, typename Scale, bool Zeros>
void run_groups(const QuantizedTileArgs& call) {
  constexpr int V = kTileVectors;
  const QuantizedTileArgs args = call;  // so that no store can be taken to change it
  const int64_t to_scales = args.code_bytes - args.part_outputs * kStepInputs;
  constexpr bool kHeld = R * S * V <= kHeldSums;
  vf held[kHeld ? R : 1][kHeld ? S * V : 1];
  if constexpr (kHeld) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) held[r][v] = load(at(args, r, v));
    }
  }
  for (int64_t group = 0; group < args.num_groups; ++group) {
    QuantizedTile<Bits, R, S> tile;
    const uint8_t* w[S];
    const int8_t* x[R];
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) w[s] = args.w + s * args.panel_bytes + group * args.group_bytes;
    const int32_t* corrections = args.x_corrections + group;
    const float* x_scales = args.x_scales + group;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      x[r] = args.x + r * args.x_stride + group * args.num_inputs;
      const vi start = Dot<Bits>::kOffset ? set1i(corrections[r * args.x_groups]) : vi{};
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) tile.sum[r][v] = start;
    }
    tile.run(w, x, args.num_inputs);
#pragma GCC unroll 16
    for (int v = 0; v < S * V; ++v) {
      const Scale* scales = reinterpret_cast<const Scale*>(w[v / V] + to_scales) +
                            args.part_outputs + v % V * W;
      const vf scale = load(scales);
      const vf zero = Zeros ? load(scales + kQuantizedPanel) : vf{};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf dot = __builtin_convertvector(tile.sum[r][v], vf);
        if (Zeros) dot = fma(zero, negative_sum<Bits>(corrections[r * args.x_groups]), dot);
        const vf product = dot * set1(x_scales[r * args.x_groups]);
        if constexpr (kHeld) {
          held[r][v] = fma(product, scale, held[r][v]);
        } else {
          float* c = at(args, r, v);
          store(c, fma(product, scale, load(c)));
        }
      }
    }
  }
  if constexpr (kHeld) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) store(at(args, r, v), held[r][v]);
    }
  }
}

enum QuantizedForm { kSingle, kGroupsF32, kGroupsF16, kZerosF32, kZerosF16, kNumForms };

template <int Bits>
struct QuantizedTileTable {
  static constexpr int kMaxPanels = max_quantized_panels(1);
  QuantizedTileFn entries[kNumForms][kQuantizedRows][kMaxPanels] = {};
  template <int R, int S>
  constexpr void fill() {
    entries[kSingle][R - 1][S - 1] = run_single<Bits, R, S>;
    entries[kGroupsF32][R - 1][S - 1] = run_groups<Bits, R, S, float, false>;
    entries[kGroupsF16][R - 1][S - 1] = run_groups<Bits, R, S, f16, false>;
    entries[kZerosF32][R - 1][S - 1] = run_groups<Bits, R, S, float, true>;
    entries[kZerosF16][R - 1][S - 1] = run_groups<Bits, R, S, f16, true>;
    if constexpr (S < max_quantized_panels(R)) {
      fill<R, S + 1>();
    } else if constexpr (R < kQuantizedRows) {
      fill<R + 1, 1>();
    }
  }
  constexpr QuantizedTileTable() { fill<1, 1>(); }
};

QS_INLINE QuantizedTileFn quantized_tile(const PackedQuantized& packed, int rows, int panels) {
  static constexpr QuantizedTileTable<4> four;
  static constexpr QuantizedTileTable<8> eight;
  int form = kSingle;
  if (packed.num_groups > 1) {
    form = (packed.has_zeros ? kZerosF32 : kGroupsF32) + (packed.half_scales ? 1 : 0);
  }
  return (packed.bits == 4 ? four.entries : eight.entries)[form][rows - 1][panels - 1];
}

}  // namespace qs::QS_LEVEL
