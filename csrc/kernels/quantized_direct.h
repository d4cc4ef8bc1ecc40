// The register tile of few rows for quants with sub-block scales, read in place. For up to
// kPartRows every 16 inputs have integer sums of their own, which are multiplied and added to those
// of the group; for more the quants are unpacked in registers. Many rows run the tile of 8 bits over
// unpacked quants (quantized_unpack.h). All of it is integers, so all give the same bits.
//
//   AVX-512   1 row x 4 panels, 2 or 3 rows x 2, 4 to 6 rows x 1, 7 to 12 rows x half a panel
//   AVX2      1 row x 4 panels, 2 rows x 2
//   others    a row to a tile's most x a part of a panel
#pragma once

#include "kernels/quantized_sums.h"
#include "kernels/quantized_unpack.h"

namespace qs::QS_LEVEL {

// What a tile reads of one half of a piece: 16 inputs, two pairs of quants.
struct DirectHalf {
  const uint8_t* w;      // the piece, in the first panel
  const int8_t* x;       // of the half's first input
  const int32_t* parts;  // -8 times the sums of x
  const char* fetch;
};

template <int Half, int R, int S>
QS_INLINE void add_half(const QuantizedTileArgs& args, const DirectHalf& half,
                        vi (&sum)[R][S * kTileVectors]) {
  using D = Dot<4>;
  constexpr int V = kTileVectors;
  constexpr int kSteps = kSubBlockInputs / kStepInputs;
  constexpr int64_t kVectorBytes = sizeof(vi);
  const uint8_t* quants =
      half.w + kQuantizedPanel + args.part_outputs * kStepInputs + Half * 2 * kStepBytes;
  const uint8_t* sub_scales = half.w + args.part_outputs;
#pragma GCC unroll kUnrolledPanels
  for (int i = 0; i < S; ++i) {
    const int64_t panel = i * args.panel_bytes;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (fetched_lines(1, S) > 0) {
        constexpr int64_t kBytes = kPieceInputs / 4 * kCacheLine / V;  // nearly a piece in both halves
        const char* lines = half.fetch + panel + (Half * V + v) * kBytes;
#pragma GCC unroll 2
        for (int64_t at = 0; at < kBytes; at += kCacheLine) __builtin_prefetch(lines + at, 0, 2);
      }
      typename D::Quants held[kSteps];
#pragma GCC unroll 2
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        const vquants both = load_quants(quants + panel + pair * kStepBytes + v * kVectorBytes);
        held[2 * pair] = D::quants(step_quants<4, 0>(both));
        held[2 * pair + 1] = D::quants(step_quants<4, 1>(both));
      }
      const vi factor = sub_block_factor<Half>(sub_scales + panel + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        SubBlockSum part(half.parts[r]);
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) {
          part.add(held[step], QuantizedTile<Held<8, 8>, R, S>::activations(
                                   half.x + (step * R + r) * kStepInputs));
        }
        part.add_to(sum[r][i * V + v], factor);
      }
    }
  }
}

// The same for more rows, whose own sums would be too many: the quants are unpacked in registers,
// so that a load of activations serves all vectors.
template <int Half, int R, int S>
QS_INLINE void unpack_half(const QuantizedTileArgs& args, const DirectHalf& half,
                         vi (&sum)[R][S * direct_vectors(R)]) {
  using D = Dot<8>;
  constexpr int V = S * direct_vectors(R);
  constexpr int64_t kVectorBytes = sizeof(vi);
  constexpr int64_t kFetched = 2 * V / kTileVectors;  // lines a step
  const uint8_t* quants =
      half.w + kQuantizedPanel + args.part_outputs * kStepInputs + Half * 2 * kStepBytes;
  Unpacking unpack[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    unpack[v] = unpacking<Half>(piece_sub_scales(half.w + args.part_outputs + v * W));
  }
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step) {
      const char* lines = half.fetch + (Half * 4 + pair * 2 + step) * kFetched * kCacheLine;
#pragma GCC unroll 2
      for (int64_t line = 0; line < kFetched; ++line) {
        __builtin_prefetch(lines + line * kCacheLine, 0, 2);
      }
      asm volatile("" ::: "memory");  // or the compiler makes a burst of all fetches of a piece
      typename D::Quants held[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const vquants both = load_quants(quants + pair * kStepBytes + v * kVectorBytes);
        held[v] = D::quants(step == 0 ? unpack[v].template unpack<0>(both)
                                     : unpack[v].template unpack<1>(both));
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vi x = QuantizedTile<Held<8, 8>, R, S>::activations(
            half.x + ((pair * 2 + step) * R + r) * kStepInputs);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) D::add(sum[r][v], held[v], x);
      }
    }
  }
}

template <int Half, int R, int S>
QS_INLINE void run_half(const QuantizedTileArgs& args, const DirectHalf& half,
                        vi (&sum)[R][S * direct_vectors(R)]) {
  if constexpr (R <= kPartRows) {
    add_half<Half, R, S>(args, half, sum);
  } else {
    static_assert(S == 1);
    unpack_half<Half, R, S>(args, half, sum);
  }
}

// As run_groups of 8 bits: c = fma(dot * x_scale, w_scale, c), groups in ascending order.
template <int R, int S, typename Scale>
void run_direct(const QuantizedTileArgs& call) {
  constexpr int V = direct_vectors(R);
  const QuantizedTileArgs args = call;  // a copy, which no store can change
  vf held[R][S * V] = {};
  if (!args.first) load_sums<S>(args, held);
  const uint8_t* w = args.w - args.part_outputs * kStepInputs;
  const int8_t* x = args.x;
  const int32_t* factors = args.factors;
  const int32_t* parts = args.parts;
  const char* fetch = args.fetch;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    vi sum[R][S * V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vi start = R > kPartRows && Dot<8>::kOffset ? set1i(factors[R + r]) : vi{};
#pragma GCC unroll 32
      for (int v = 0; v < S * V; ++v) sum[r][v] = start;
    }
    for (int64_t k = 0; k < args.num_inputs; k += kPieceInputs) {
      run_half<0, R, S>(args, {w, x, parts, fetch}, sum);
      x += kSubBlockInputs * R;
      parts += R;
      run_half<1, R, S>(args, {w, x, parts, fetch}, sum);
      x += kSubBlockInputs * R;
      parts += R;
      w += kPieceBytes;
      fetch += args.fetch_stride;
    }
#pragma GCC unroll 32
    for (int v = 0; v < S * V; ++v) {
      const Scale* scales = reinterpret_cast<const Scale*>(w + v / V * args.panel_bytes) +
                            args.part_outputs + v % V * W;
      const vf scale = load(scales);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf dot = __builtin_convertvector(sum[r][v], vf);
        held[r][v] = fma(dot * bit_cast<vf>(set1i(factors[r])), scale, held[r][v]);
      }
    }
    w += args.group_bytes - args.quant_bytes;
    factors += 2 * R;
    fetch += args.fetch_scales;
  }
  store_sums<S>(args, held);
}

struct DirectTileTable {
  QuantizedTileFn entries[2][kDirectRows][max_direct_panels(1)] = {};
  template <int R, int S>
  constexpr void fill() {
    entries[0][R - 1][S - 1] = run_direct<R, S, float>;
    entries[1][R - 1][S - 1] = run_direct<R, S, f16>;
    if constexpr (S < max_direct_panels(R)) {
      fill<R, S + 1>();
    } else if constexpr (R < kDirectRows) {
      fill<R + 1, 1>();
    }
  }
  constexpr DirectTileTable() { fill<1, 1>(); }
};

}  // namespace qs::QS_LEVEL
