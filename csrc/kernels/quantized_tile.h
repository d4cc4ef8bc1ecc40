// The register tile of the low-bit linear: R rows x V vectors of outputs, in S panels at once, of
// integer sums.
//
//   AVX-512   6 x 4 vectors (a panel is 4), 3 x 4 for groups of 4 bits, and 1 row x 4 panels: 4
//             streams of memory a thread
//   AVX2      2 x 4 vectors (half a panel)
//   NEON      6 x 4 vectors (a quarter of a panel), where it has dot products; else as below
//   portable  2 x 4 vectors (a quarter of a panel), in plain C++
//
// Sums are exact, so their order is free; every level gives the same integers.
#pragma once

#include "kernels/quantized_dot.h"

namespace qs::QS_LEVEL {

constexpr int kTileVectors = 4;
constexpr int kPanelParts = kQuantizedPanel / (kTileVectors * W);
constexpr int64_t kPartBytes = kStepBytes / kPanelParts;
#if defined(__AVX512F__)
constexpr int kQuantizedRows = 6;
constexpr int kGroupRows = 3;
constexpr int kHeldSums = 12;  // fp32 sums that fit into registers beside the integer ones
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kQuantizedRows = 6;
constexpr int kGroupRows = 3;
constexpr int kHeldSums = 12;
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
