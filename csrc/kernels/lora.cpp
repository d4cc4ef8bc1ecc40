// Low-rank adapters: shrink, low = scale * (a x), then expand, y += b low. Of an embedding, a x is a
// row of a.
//
// Tiles are of tokens of one adapter. Each element of `low` is one chain of multiply-adds per lane
// over blocks of kBlock inputs; each output is one chain over the ranks. So neither depends on the
// tile's shape or on other tokens. Shrink: 2 tokens x 4 ranks, 8 accumulators, with both operands
// loaded along the inputs. Expand: 4 tokens x 2 vectors of outputs, 8 accumulators as well.

#include "kernels/entries.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kBlock = 512;  // inputs per chain
constexpr int kShrinkTokens = 2, kShrinkRanks = 4;

template <typename T, int R, int Q>
void shrink_tile(const T* const* x, const T* a, int64_t k, float scale, float* low,
                 int64_t low_stride) {
  vf total[R][Q] = {};
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    const int64_t end = min_of(k, begin + kBlock);
    vf sum[R][Q] = {};
    for (int64_t i = begin; i < end; i += W) {
      const int64_t count = end - i;
      vf inputs[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) inputs[r] = load_up_to(x[r] + i, count);
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const vf weight = load_up_to(a + q * k + i, count);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r][q] = fma(inputs[r], weight, sum[r][q]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) total[r][q] += sum[r][q];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int q = 0; q < Q; ++q) low[r * low_stride + q] = reduce_add(total[r][q]) * scale;
  }
}

template <typename T, int R>
void shrink_ranks(const T* const* x, const T* a, int ranks, const LoRAPart& part, float* low) {
  if (ranks == 4) return shrink_tile<T, R, 4>(x, a, part.k, part.scale, low, part.rank);
  if (ranks == 3) return shrink_tile<T, R, 3>(x, a, part.k, part.scale, low, part.rank);
  if (ranks == 2) return shrink_tile<T, R, 2>(x, a, part.k, part.scale, low, part.rank);
  shrink_tile<T, R, 1>(x, a, part.k, part.scale, low, part.rank);
}

template <typename T>
void shrink(const LoRAArgs& args, const LoRATile& tile) {
  const LoRAPart& part = *tile.part;
  for (int64_t t = 0; t < tile.num_tokens; t += kShrinkTokens) {
    const T* x[kShrinkTokens];
    const int64_t tokens = min_of(kShrinkTokens, tile.num_tokens - t);
    for (int64_t i = 0; i < tokens; ++i) {
      x[i] = static_cast<const T*>(args.x) + tile.tokens[t + i] * args.x_stride;
    }
    for (int64_t rank = tile.begin; rank < tile.end; rank += kShrinkRanks) {
      const int ranks = static_cast<int>(min_of(kShrinkRanks, tile.end - rank));
      const T* a = static_cast<const T*>(part.a) + rank * part.k;
      float* low = tile.low + t * part.rank + rank;
      if (tokens == kShrinkTokens) {
        shrink_ranks<T, kShrinkTokens>(x, a, ranks, part, low);
      } else {
        shrink_ranks<T, 1>(x, a, ranks, part, low);
      }
    }
  }
}

template <typename T>
void look_up(const LoRAArgs& args, const LoRATile& tile) {
  const LoRAPart& part = *tile.part;
  const vf scale = set1(part.scale);
  for (int64_t t = 0; t < tile.num_tokens; ++t) {
    const T* row = static_cast<const T*>(part.a) + args.ids[tile.tokens[t]] * part.rank;
    float* low = tile.low + t * part.rank;
    for (int64_t r = tile.begin; r < tile.end; r += W) {
      const int64_t count = tile.end - r;
      store_up_to(low + r, load_up_to(row + r, count) * scale, count);
    }
  }
}

// V vectors of outputs from `first` on; the last one has `count` of W.
template <typename T, int R, int V>
void expand_vectors(const LoRAPart& part, const float* low, T* const* y, int64_t first,
                    int64_t count) {
  const T* b = static_cast<const T*>(part.b) + first;
  vf sum[R][V] = {};
  for (int64_t rank = 0; rank < part.rank; ++rank, b += part.n) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf weight = v + 1 < V ? load(b + v * W) : load_up_to(b + v * W, count);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[r][v] = fma(set1(low[r * part.rank + rank]), weight, sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      T* to = y[r] + first + v * W;
      const int64_t left = v + 1 < V ? W : count;
      store_up_to(to, load_up_to(to, left) + sum[r][v], left);
    }
  }
}

template <typename T, int R>
void expand_tokens(const LoRATile& tile, T* const* y) {
  int64_t i = tile.begin;
  for (; i + 2 * W <= tile.end; i += 2 * W) {
    expand_vectors<T, R, 2>(*tile.part, tile.low, y, i, W);
  }
  for (; i < tile.end; i += W) {
    expand_vectors<T, R, 1>(*tile.part, tile.low, y, i, min_of(W, tile.end - i));
  }
}

template <typename T>
void expand(const LoRAArgs& args, const LoRATile& tile) {
  T* y[kLoRATokens];
  for (int64_t i = 0; i < tile.num_tokens; ++i) {
    y[i] = static_cast<T*>(args.y) + tile.tokens[i] * args.n + tile.part->first_output;
  }
  if (tile.num_tokens == 4) return expand_tokens<T, 4>(tile, y);
  if (tile.num_tokens == 3) return expand_tokens<T, 3>(tile, y);
  if (tile.num_tokens == 2) return expand_tokens<T, 2>(tile, y);
  expand_tokens<T, 1>(tile, y);
}

}  // namespace

void add_lora(Pool* pool, const LoRAArgs& args) {
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, args.num_shrink, [&](int64_t i) {
      args.ids == nullptr ? shrink<T>(args, args.shrink[i]) : look_up<T>(args, args.shrink[i]);
    });
    parallel_for(pool, args.num_expand, [&](int64_t i) { expand<T>(args, args.expand[i]); });
  });
}

}  // namespace qs::QS_LEVEL
