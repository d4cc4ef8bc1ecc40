// The register tile of linear: R rows x P panels of accumulators over one k block, and how an
// element type is multiplied on the level being compiled.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// Inputs per accumulator chain. A multiple of 2.
constexpr int64_t kBlockK = 256;

constexpr int kVectors = kPanel / W;  // registers per panel
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAccumulators = 24;  // of 32 registers
#elif defined(__AVX2__)
constexpr int kAccumulators = 12;  // of 16
#else
constexpr int kAccumulators = 8;  // of 16, one of them for the product before it is added
#endif
constexpr int kMaxRows = kAccumulators / kVectors < 6 ? kAccumulators / kVectors : 6;
constexpr int kMaxPanels = 8;

constexpr int max_panels(int rows) {
  const int fit = kAccumulators / (rows * kVectors);
  return fit < kMaxPanels ? fit : kMaxPanels;
}

// sum += x * w. On AVX-512 it is assembly, because GCC 12 spills an accumulator around the intrinsic
// and copies others.
QS_INLINE void multiply_add(vf& sum, vf x, vf w) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#else
  sum = fma(x, w, sum);
#endif
}

// The product of a weight register and an activation. `X` is the type of the tile's activations;
// with kCopies, rows are converted to it first. Weights of kPair inputs are adjacent; the
// level multiplies kTogether of them at once, so that a pair is kPair / kTogether steps.
template <typename T>
struct Product {  // float and f16: fp32 multiply-add
  using X = float;
  using Operand = vf;
  static constexpr int kPair = 1;
  static constexpr int kTogether = 1;
  static constexpr bool kCopies = true;
  static QS_INLINE Operand activation(const X* x) { return set1(*x); }
  static QS_INLINE Operand last_activation(const X* x) { return set1(*x); }
  template <int Part>
  static QS_INLINE Operand weight(const T* w) {
    return load(w);
  }
  static QS_INLINE void add(vf& sum, Operand x, Operand w) { multiply_add(sum, x, w); }
};

template <>
struct Product<float> : Product<f16> {
  static constexpr bool kCopies = false;
  template <int Part>
  static QS_INLINE Operand weight(const float* w) {
    return load(w);
  }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

template <>
struct Product<bf16> {  // two products and two additions per instruction
  using X = bf16;
  using Operand = vi;
  static constexpr int kPair = 2;
  static constexpr int kTogether = 2;
  static constexpr bool kCopies = false;
  static QS_INLINE Operand activation(const X* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof(pair));
    return set1i(pair);
  }
  // The last input of an odd count, paired with zero.
  static QS_INLINE Operand last_activation(const X* x) { return set1i(x->bits); }
  template <int Part>
  static QS_INLINE Operand weight(const bf16* w) {
    Operand v;
    memcpy(&v, w, sizeof(v));
    return v;
  }
  static QS_INLINE void add(vf& sum, Operand x, Operand w) {
#if defined(__AVX512BF16__)
    // Written as assembly because GCC 12 spills arrays of accumulators around the intrinsic.
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#else
    // Likewise because GCC 12 treats constant operands of the intrinsic as halves.
    asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(x), "w"(w));
#endif
  }
};

#else

template <>
struct Product<bf16> {  // even inputs, then odd ones, by fp32 multiply-add
  using X = float;
  using Operand = vf;
  static constexpr int kPair = 2;
  static constexpr int kTogether = 1;
  static constexpr bool kCopies = true;
  static QS_INLINE Operand activation(const X* x) { return set1(*x); }
  // Rows are copied with a zero after an odd last input.
  static QS_INLINE Operand last_activation(const X* x) { return set1(*x); }
  template <int Part>
  static QS_INLINE Operand weight(const bf16* w) {
    vu pairs;
    memcpy(&pairs, w, sizeof(pairs));
    return bit_cast<vf>(Part == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
  static QS_INLINE void add(vf& sum, Operand x, Operand w) { multiply_add(sum, x, w); }
};

#endif

// Weights to fetch while a tile computes: `streams` of them, each as long as a panel's part of the
// block. None for null.
struct Ahead {
  const char* first = nullptr;
  int64_t stride = 0;  // bytes from one stream to the next
  int streams = 0;
};

template <typename T>
struct TileArgs {
  const typename Product<T>::X* x;
  int64_t x_stride;
  const T* w;
  int64_t panel_size;
  int64_t k;
  float* c;
  int64_t c_stride;
  bool first;  // the first k block: c is written, afterwards added to
  Ahead ahead;
};

template <typename T>
using TileFn = void (*)(const TileArgs<T>& args);

template <typename T, int R, int P>
struct Tile {
  using Mul = Product<T>;
  using Operand = typename Mul::Operand;
  static constexpr int V = P * kVectors;

  vf sum[R][V] = {};
  const T* w[P];
  const typename Mul::X* x[R];

  QS_INLINE explicit Tile(const TileArgs<T>& args) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = args.w + p * args.panel_size;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) x[r] = args.x + r * args.x_stride;
  }

  template <int Part>
  QS_INLINE Operand weight(int v, int64_t k) const {
    return Mul::template weight<Part>(w[v / kVectors] + k * kPanel +
                                      v % kVectors * W * Mul::kPair);
  }

  template <bool Last>
  QS_INLINE Operand activation(int r, int64_t k) const {
    return Last ? Mul::last_activation(x[r] + k) : Mul::activation(x[r] + k);
  }

  // Inputs k + Part ... of every row against those of every output. The smaller operand set is
  // held in registers, the other streamed.
  template <int Part, bool Last>
  QS_INLINE void step(int64_t k) {
    if constexpr (R <= V) {
      Operand held[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) held[r] = activation<Last>(r, k + Part);
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) {
        const Operand streamed = weight<Part>(v, k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) Mul::add(sum[r][v], held[r], streamed);
      }
    } else {
      Operand held[V];
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) held[v] = weight<Part>(v, k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Operand streamed = activation<Last>(r, k + Part);
#pragma GCC unroll 32
        for (int v = 0; v < V; ++v) Mul::add(sum[r][v], streamed, held[v]);
      }
    }
  }

  template <bool Last>
  QS_INLINE void pair(int64_t k) {
    step<0, Last>(k);
    if constexpr (Mul::kTogether < Mul::kPair) step<1, Last>(k);
  }

  QS_INLINE void write(const TileArgs<T>& args) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < V; ++v) {
        float* c = args.c + r * args.c_stride + v * W;
        store(c, args.first ? sum[r][v] : load(c) + sum[r][v]);
      }
    }
  }
};

// All inputs of the block; a tile that fetches nothing has no loop over streams in its steps.
template <bool Fetches, typename T, int R, int P>
QS_INLINE void run_steps(Tile<T, R, P>& tile, const TileArgs<T>& args) {
  constexpr int64_t kPair = Product<T>::kPair;
  constexpr int64_t kStepBytes = kPanel * kPair * sizeof(T);  // of a panel
  const Ahead ahead = args.ahead;
  const char* fetch = ahead.first;
  const int64_t whole = args.k / kPair * kPair;
  for (int64_t k = 0; k < whole; k += kPair) {
    if constexpr (Fetches) {
      for (int i = 0; i < ahead.streams; ++i) {
        __builtin_prefetch(fetch + i * ahead.stride, 0, 2);
      }
      fetch += kStepBytes;
    }
    tile.template pair<false>(k);
  }
  if (whole < args.k) tile.template pair<true>(whole);
}

template <typename T, int R, int P>
void run_tile_of(const TileArgs<T>& args) {
  Tile<T, R, P> tile(args);
  if (R > 1 && args.ahead.streams > 0) {
    run_steps<true>(tile, args);
  } else {
    run_steps<false>(tile, args);
  }
  tile.write(args);
}

template <typename T>
struct TileTable {
  TileFn<T> entries[kMaxRows][kMaxPanels] = {};
  template <int R, int P>
  constexpr void fill() {
    entries[R - 1][P - 1] = run_tile_of<T, R, P>;
    if constexpr (P < max_panels(R)) {
      fill<R, P + 1>();
    } else if constexpr (R < kMaxRows) {
      fill<R + 1, 1>();
    }
  }
  constexpr TileTable() { fill<1, 1>(); }
};

// The tile of `rows` x `panels`, both at least 1 and within max_panels(rows).
template <typename T>
QS_INLINE TileFn<T> tile_function(int rows, int panels) {
  static constexpr TileTable<T> table;
  return table.entries[rows - 1][panels - 1];
}

// Converts `num_rows` rows of k inputs to fp32, kBlockK apart, with a zero after an odd last one.
template <typename T>
QS_INLINE void copy_rows(const T* x, int64_t x_stride, int num_rows, int64_t k, float* copy) {
  for (int row = 0; row < num_rows; ++row, x += x_stride, copy += kBlockK) {
    const int64_t whole = k / W * W;
    for (int64_t i = 0; i < whole; i += W) store(copy + i, load(x + i));
    if (whole < k) store_n(copy + whole, load_n(x + whole, k - whole), k - whole);
    if (k % 2 != 0) copy[k] = 0.0f;
  }
}

}  // namespace qs::QS_LEVEL
