// The register tile of the low-bit linear: R rows x V vectors of outputs, in S panels at once, of
// integer sums.
//
//   AVX-512   6 x 4 vectors (a panel is 4), for many rows of groups 4 x 4 of 8 bits and 3 x 4 of
//             4 bits, and 1 row x 4 panels, of 6 bits x 2: so many streams of memory a thread
//   AVX2      2 x 8 vectors (a panel), 2 rows x 2 panels and 1 row x 4, most of whose sums are in memory
//   NEON      6 x 4 vectors (a quarter of a panel), where it has dot products; else as below
//   portable  2 x 4 vectors (a quarter of a panel), in plain C++
//
// Sums are exact, so their order is free; every level computes the same integers.
#pragma once

#include <type_traits>

#include "kernels/quantized_tile.h"

namespace qs::QS_LEVEL {

// Cache lines that a tile fetches per step and panel, at most: as many as it reads. It is all of
// them where there is but one tile. None for 2 or 3 rows of several panels, nor for a row of them with
// AVX2, which are faster with the hardware's prefetching only.
constexpr int fetched_lines(int rows, int panels) {
  if (panels > 1 && (rows > 1 || kUnrolledPanels == 1)) return 0;
  return kPartBytes < kCacheLine ? 1 : static_cast<int>(kPartBytes / kCacheLine);
}

// The integer sums of a group. Everything is read at one pointer per stream, with constant offsets:
// registers that run short here are spilled to vectors, which delays the next group's loads.
template <typename F, int R, int S>
struct QuantizedTile {
  static constexpr int V = kTileVectors;
  static constexpr int64_t kVectorBytes = sizeof(vi);
  static constexpr int64_t kStepQuants = R * kStepInputs;
  static constexpr int kLines = fetched_lines(R, S);
  using D = Dot<F::kBits>;
  using L = Levels<F::kLooks>;
  vi sum[R][S * V];

  // Of the steps whose quants are in the same bytes, number `Step`.
  template <int Step>
  QS_INLINE void step(const uint8_t* w, int64_t panel_bytes, const L& levels, const int8_t* x) {
    if constexpr (R <= V) {
      vi held[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) held[r] = activations(x + r * kStepInputs);
#pragma GCC unroll kUnrolledPanels
      for (int panel = 0; panel < S; ++panel) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const auto quants = weights<Step>(w + panel * panel_bytes, levels, v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) D::add(sum[r][panel * V + v], quants, held[r]);
        }
      }
    } else {
      typename D::Quants held[S * V];
#pragma GCC unroll 16
      for (int v = 0; v < S * V; ++v) {
        held[v] = weights<Step>(w + v / V * panel_bytes, levels, v % V);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vi streamed = activations(x + r * kStepInputs);
#pragma GCC unroll 32
        for (int v = 0; v < S * V; ++v) D::add(sum[r][v], held[v], streamed);
      }
    }
  }

  template <int Step>
  static QS_INLINE typename D::Quants weights(const uint8_t* w, const L& levels, int v) {
    const vquants held = held_step<F::kHeld, Step>(w + v * kVectorBytes);
    if constexpr (F::kLooks) {
      return D::flipped(levels.of(held));
    } else if constexpr (F::kUnpacked) {
      return D::flipped(held);
    } else {
      return D::quants(held);
    }
  }

  static QS_INLINE vi activations(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, sizeof(four));
    return set1i(four);
  }

  // Fetches are spread over the steps: in a burst they would fill the queue of misses and stop
  // loads.
  template <int Lines>
  static QS_INLINE void bring(const char* fetch, int64_t panel_bytes) {
#pragma GCC unroll 32
    for (int i = 0; i < S * Lines; ++i) {
      __builtin_prefetch(fetch + i / Lines * panel_bytes + i % Lines * kCacheLine, 0, 2);
    }
  }

  // The step's fetches: all lines in a tile of several panels, else `fetch_lines`.
  static QS_INLINE void bring_step(const char* fetch, const QuantizedTileArgs& args) {
    if constexpr (S > 1 || kLines <= 1) {
      if constexpr (kLines > 0) bring<kLines>(fetch, args.panel_bytes);
    } else {
      bring<1>(fetch, args.panel_bytes);
      if (args.fetch_lines > 1) {
        bring<1>(fetch + kCacheLine, args.panel_bytes);
        if constexpr (kLines > 2) {
          if (args.fetch_lines > 2) bring<kLines - 2>(fetch + 2 * kCacheLine, args.panel_bytes);
        }
      }
    }
  }

  // Moves all three pointers past the group's steps.
  QS_INLINE void run(const uint8_t*& w, const int8_t*& x, const char*& fetch, const L& levels,
                     const QuantizedTileArgs& args) {
    constexpr int64_t kInputs = packed_inputs(F::kHeld);
    for (int64_t k = 0; k < args.num_inputs; k += kInputs) {
      bring_step(fetch, args);
      fetch += args.fetch_stride;
      step<0>(w, args.panel_bytes, levels, x);
      if constexpr (F::kHeld == 4) step<1>(w, args.panel_bytes, levels, x + kStepQuants);
      if constexpr (F::kHeld == 6) {
        bring_step(fetch, args);
        fetch += args.fetch_stride;
        step<1>(w, args.panel_bytes, levels, x + kStepQuants);
        bring_step(fetch, args);
        fetch += args.fetch_stride;
        step<2>(w, args.panel_bytes, levels, x + 2 * kStepQuants);
        asm volatile("" ::: "memory");  // or what was loaded for the other steps is spilled
        step<3>(w, args.panel_bytes, levels, x + 3 * kStepQuants);
      }
      w += packed_bytes(F::kHeld);
      x += kStepQuants * (kInputs / kStepInputs);
    }
  }
};

// The place of the tile's sums in c.
template <typename T, int S, int V>
QS_INLINE T* at(const QuantizedTileArgs& args, int row, int vector) {
  return static_cast<T*>(args.c) + (row * S + vector / V) * kQuantizedPanel + vector % V * W;
}

// The sums of groups in c: those of the blocks before, and with this block's.
template <int S, int R, int N>
QS_INLINE void load_sums(const QuantizedTileArgs& args, vf (&sums)[R][N]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < N; ++v) sums[r][v] = load(at<float, S, N / S>(args, r, v));
  }
}

template <int S, int R, int N>
QS_INLINE void store_sums(const QuantizedTileArgs& args, const vf (&sums)[R][N]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < N; ++v) store(at<float, S, N / S>(args, r, v), sums[r][v]);
  }
}

// One group: the block's integer sums, added to c.
template <typename F, int R, int S>
void run_single(const QuantizedTileArgs& call) {
  constexpr int V = kTileVectors;
  const QuantizedTileArgs args = call;  // a copy, which no store can change
  using Tile = QuantizedTile<F, R, S>;
  const typename Tile::L levels(args.levels, Tile::D::kFlip);
  Tile tile = {};
  const uint8_t* w = args.w;
  const int8_t* x = args.x;
  const char* fetch = args.fetch;
  tile.run(w, x, fetch, levels, args);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
    for (int v = 0; v < S * V; ++v) {
      int32_t* c = at<int32_t, S, V>(args, r, v);
      vi total = {};
      if (!args.first) memcpy(&total, c, sizeof(total));
      total += tile.sum[r][v];
      memcpy(c, &total, sizeof(total));
    }
  }
}

// Groups in ascending order: c = fma((dot - zero * sum) * x_scale, w_scale, c). Of 4 bits, where
// some groups share an x_scale: part = fma(dot - zero * sum, w_scale, part) over those, from 0, and
// then c = fma(part, x_scale, c): one operation a group less on the units that multiply. With
// minimums the dot is that of the quants themselves, and after it minimum * sum is added to part, or
// minimum * (sum * x_scale) to c. Scales that are bytes have factors per super-block.
template <typename F, int R, int S, typename Scale, Offset Kind>
void run_groups(const QuantizedTileArgs& call) {
  constexpr int V = kTileVectors;
  constexpr int Bits = F::kBits;
  constexpr bool kShares = Bits == 4, kSuper = std::is_same_v<Scale, int8_t>;
  using Tile = QuantizedTile<F, R, S>;
  const QuantizedTileArgs args = call;  // a copy, which no store can change
  const typename Tile::L levels(args.levels, Dot<Bits>::kFlip);
  // Local, so that the compiler keeps as many as fit in registers next to the integer sums.
  vf held[R][S * V] = {};
  if (!args.first) load_sums<S>(args, held);
  const uint8_t* w = args.w;
  const uint8_t* super = w;  // the scales of the super-block, in the first panel
  const int8_t* x = args.x;
  const int32_t* factors = args.factors;
  const char* fetch = args.fetch;
  const int64_t shared = kShares ? args.shared_groups : 1;
  for (int64_t first = 0; first < args.num_groups; first += shared) {
    vf part[kShares ? R : 1][kShares ? S * V : 1] = {};
    for (int64_t i = 0; i < shared; ++i) {
      if (kSuper && ((first + i) & (args.super_groups - 1)) == 0) {
        super = w - args.part_outputs * kStepInputs;
        w += args.super_bytes;
      }
      Tile tile;
      const int32_t* corrections = factors + R;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vi start = Dot<Bits>::kOffset ? set1i(corrections[r]) : vi{};
        if constexpr (Kind == kMinimums) start = set1i(minimum_start<Bits>(corrections[r]));
#pragma GCC unroll 32
        for (int v = 0; v < S * V; ++v) tile.sum[r][v] = start;
      }
      tile.run(w, x, fetch, levels, args);
      constexpr int kLines = Tile::kLines;
      constexpr int kScaleLines = kLines < 2 ? kLines : kSuper ? 3 : 2;
      tile.template bring<kScaleLines>(fetch, args.panel_bytes);
#pragma GCC unroll kUnrolledPanels
      for (int panel = 0; panel < S; ++panel) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
          const int v = panel * V + i;
          const Scale* scales =
              reinterpret_cast<const Scale*>(w - args.part_outputs * kStepInputs +
                                             panel * args.panel_bytes) +
              args.part_outputs + i * W;
          const f16* factor = reinterpret_cast<const f16*>(super + panel * args.panel_bytes) +
                              args.part_outputs + i * W;
          const vf scale = group_scales(scales, factor);
          const vf zero = Kind != kMiddle
                              ? group_scales(scales + kQuantizedPanel, factor + kQuantizedPanel)
                              : vf{};
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            vf dot = __builtin_convertvector(tile.sum[r][v], vf);
            const vf negative = negative_sum(Bits, corrections[r]);
            if (Kind == kZeros) dot = fma(zero, negative, dot);
            if constexpr (kShares) {
              part[r][v] = fma(dot, scale, part[r][v]);
              if (Kind == kMinimums) part[r][v] = fma(zero, -negative, part[r][v]);
            } else {
              const vf x_scale = bit_cast<vf>(set1i(factors[r]));
              held[r][v] = fma(dot * x_scale, scale, held[r][v]);
              if (Kind == kMinimums) held[r][v] = fma(zero, -negative * x_scale, held[r][v]);
            }
          }
        }
      }
      w += args.group_bytes - args.quant_bytes;
      factors += 2 * R;
      fetch += args.fetch_scales;
    }
    if constexpr (kShares) {
      const int32_t* x_scales = factors - 2 * R;  // of the last group, which are those of all
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf x_scale = bit_cast<vf>(set1i(x_scales[r]));
#pragma GCC unroll 32
        for (int v = 0; v < S * V; ++v) held[r][v] = fma(part[r][v], x_scale, held[r][v]);
      }
    }
  }
  store_sums<S>(args, held);
}

enum QuantizedForm {
  kSingle,
  kGroupsF32,
  kGroupsF16,
  kZerosF32,
  kZerosF16,
  kMinimumsF32,
  kMinimumsF16,
  kGroupsSuper,
  kMinimumsSuper,
  kNumForms
};

// Quants are unpacked for several tiles of rows, which run a panel at a time; only those of groups,
// and without zeros (`unpackable` in quantized_linear.cpp).
template <typename F>
struct QuantizedTileTable {
  static constexpr int kMaxPanels = max_quantized_panels(8, 1);  // the most of any bits
  template <int R>
  static constexpr int kPanels = F::kUnpacked ? 1 : max_quantized_panels(F::kHeld, R);
  QuantizedTileFn entries[kNumForms][kQuantizedRows][kMaxPanels] = {};
  template <int R, int S>
  constexpr void fill() {
    entries[kGroupsF32][R - 1][S - 1] = run_groups<F, R, S, float, kMiddle>;
    entries[kGroupsF16][R - 1][S - 1] = run_groups<F, R, S, f16, kMiddle>;
    if constexpr (!F::kUnpacked) {
      entries[kSingle][R - 1][S - 1] = run_single<F, R, S>;
      entries[kGroupsSuper][R - 1][S - 1] = run_groups<F, R, S, int8_t, kMiddle>;
    }
    if constexpr (F::kBits != 6 && !F::kLooks && !F::kUnpacked) {
      entries[kZerosF32][R - 1][S - 1] = run_groups<F, R, S, float, kZeros>;
      entries[kZerosF16][R - 1][S - 1] = run_groups<F, R, S, f16, kZeros>;
    }
    if constexpr (!F::kLooks) {  // with levels there are none
      entries[kMinimumsF32][R - 1][S - 1] = run_groups<F, R, S, float, kMinimums>;
      entries[kMinimumsF16][R - 1][S - 1] = run_groups<F, R, S, f16, kMinimums>;
    }
    if constexpr (!F::kLooks && !F::kUnpacked) {
      entries[kMinimumsSuper][R - 1][S - 1] = run_groups<F, R, S, int8_t, kMinimums>;
    }
    if constexpr (S < kPanels<R>) {
      fill<R, S + 1>();
    } else if constexpr (R < kQuantizedRows) {
      fill<R + 1, 1>();
    }
  }
  constexpr QuantizedTileTable() { fill<1, 1>(); }
};

}  // namespace qs::QS_LEVEL
