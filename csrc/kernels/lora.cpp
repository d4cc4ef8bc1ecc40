// Low-rank adapters: shrink, low = scale * (a x), then expand, y += b low + bias. Of an embedding,
// a x is a row of a. Of a complete matrix, which has no b, shrink writes y = scale * (a x) + bias.
//
// int8 weights are widened as they are read, and their scale is one per rank, so that it is
// multiplied with an element of `low`.
//
// Tiles are of tokens of one adapter. Each element of `low` is one chain of multiply-adds per lane
// over blocks of kBlock inputs; each output is one chain over the ranks. So neither depends on the
// tile's shape or on other tokens. Shrink: 2 tokens x 4 ranks, 8 accumulators, with both operands
// loaded along the inputs. Expand: 4 tokens x 2 vectors of outputs, 8 accumulators as well.

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kBlock = 512;  // inputs per chain
constexpr int kShrinkTokens = 2, kShrinkRanks = 4;

// The scale of a rank.
QS_INLINE float scale_of(const LoRAPart& part, int64_t rank) {
  return part.rank_scales == nullptr ? part.scale : part.rank_scales[rank];
}

// scale * (a x) of R tokens and the Q ranks from `first` on.
template <typename T, typename A, int R, int Q>
void shrink_tile(const T* const* x, const LoRAPart& part, int64_t first, float* low,
                 int64_t low_stride) {
  const int64_t k = part.k;
  const A* a = static_cast<const A*>(part.a) + first * k;
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
    for (int q = 0; q < Q; ++q) {
      low[r * low_stride + q] = reduce_add(total[r][q]) * scale_of(part, first + q);
    }
  }
}

template <typename T, typename A, int R>
void shrink_ranks(const T* const* x, const LoRAPart& part, int64_t first, int ranks, float* low,
                  int64_t low_stride) {
  if (ranks == 4) return shrink_tile<T, A, R, 4>(x, part, first, low, low_stride);
  if (ranks == 3) return shrink_tile<T, A, R, 3>(x, part, first, low, low_stride);
  if (ranks == 2) return shrink_tile<T, A, R, 2>(x, part, first, low, low_stride);
  shrink_tile<T, A, R, 1>(x, part, first, low, low_stride);
}

// Where the part's outputs of a tile's token are.
template <typename T>
QS_INLINE T* outputs_of(const LoRAArgs& args, const LoRATile& tile, int64_t token) {
  return static_cast<T*>(args.y) + tile.tokens[token] * args.n + tile.part->first_output;
}

// y = value + bias, of up to W outputs from `first` on.
template <typename T>
QS_INLINE void write(const LoRAPart& part, T* y, int64_t first, vf value, int64_t count) {
  if (part.bias != nullptr) value += load_up_to(part.bias + first, count);
  store_up_to(y + first, value, count);
}

template <typename T, typename A>
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
      const bool is_complete = part.b == nullptr;
      float values[kShrinkTokens * kShrinkRanks];
      float* low = is_complete ? values : tile.low + t * part.rank + rank;
      const int64_t low_stride = is_complete ? kShrinkRanks : part.rank;
      if (tokens == kShrinkTokens) {
        shrink_ranks<T, A, kShrinkTokens>(x, part, rank, ranks, low, low_stride);
      } else {
        shrink_ranks<T, A, 1>(x, part, rank, ranks, low, low_stride);
      }
      for (int64_t i = 0; is_complete && i < tokens; ++i) {
        const vf value = load_up_to(values + i * kShrinkRanks, ranks);
        write(part, outputs_of<T>(args, tile, t + i), rank, value, ranks);
      }
    }
  }
}

template <typename T, typename A>
void look_up(const LoRAArgs& args, const LoRATile& tile) {
  const LoRAPart& part = *tile.part;
  for (int64_t t = 0; t < tile.num_tokens; ++t) {
    const A* row = static_cast<const A*>(part.a) + args.ids[tile.tokens[t]] * part.rank;
    for (int64_t r = tile.begin; r < tile.end; r += W) {
      const int64_t count = tile.end - r;
      vf scale = set1(part.scale);
      if (part.rank_scales != nullptr) scale = load_up_to(part.rank_scales + r, count);
      const vf value = load_up_to(row + r, count) * scale;
      if (part.b == nullptr) {
        write(part, outputs_of<T>(args, tile, t), r, value, count);
      } else {
        store_up_to(tile.low + t * part.rank + r, value, count);
      }
    }
  }
}

// V vectors of outputs from `first` on, in one panel; the last one has `count` of W.
template <typename T, typename B, int R, int V>
void expand_vectors(const LoRAPart& part, const float* low, T* const* y, int64_t first,
                    int64_t count) {
  const int64_t panel = first / kLoRAPanel * kLoRAPanel;
  const int64_t width = min_of(kLoRAPanel, part.n - panel);
  const B* b = static_cast<const B*>(part.b) + panel * part.rank + (first - panel);
  vf sum[R][V] = {};
  for (int v = 0; part.bias != nullptr && v < V; ++v) {
    const vf bias = load_up_to(part.bias + first + v * W, v + 1 < V ? W : count);
    for (int r = 0; r < R; ++r) sum[r][v] = bias;
  }
  for (int64_t rank = 0; rank < part.rank; ++rank, b += width) {
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

template <typename T, typename B, int R>
void expand_tokens(const LoRATile& tile, T* const* y) {
  static_assert(kLoRAPanel % (2 * W) == 0 && kLoRAOutputs % kLoRAPanel == 0);
  int64_t i = tile.begin;
  for (; i + 2 * W <= tile.end; i += 2 * W) {
    expand_vectors<T, B, R, 2>(*tile.part, tile.low, y, i, W);
  }
  for (; i < tile.end; i += W) {
    expand_vectors<T, B, R, 1>(*tile.part, tile.low, y, i, min_of(W, tile.end - i));
  }
}

template <typename T, typename B>
void expand(const LoRAArgs& args, const LoRATile& tile) {
  T* y[kLoRATokens];
  for (int64_t i = 0; i < tile.num_tokens; ++i) y[i] = outputs_of<T>(args, tile, i);
  if (tile.num_tokens == 4) return expand_tokens<T, B, 4>(tile, y);
  if (tile.num_tokens == 3) return expand_tokens<T, B, 3>(tile, y);
  if (tile.num_tokens == 2) return expand_tokens<T, B, 2>(tile, y);
  expand_tokens<T, B, 1>(tile, y);
}

// The first half of a tile's work, on weights of type A.
template <typename T, typename A>
void multiply_a(const LoRAArgs& args, const LoRATile& tile) {
  args.ids == nullptr ? shrink<T, A>(args, tile) : look_up<T, A>(args, tile);
}

}  // namespace

static void add_lora(Pool* pool, const LoRAArgs& args) {
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, args.num_shrink, [&](int64_t i) {
      const LoRATile& tile = args.shrink[i];
      const bool is_int8 = tile.part->rank_scales != nullptr;
      is_int8 ? multiply_a<T, int8_t>(args, tile) : multiply_a<T, T>(args, tile);
    });
    parallel_for(pool, args.num_expand, [&](int64_t i) {
      const LoRATile& tile = args.expand[i];
      const bool is_int8 = tile.part->rank_scales != nullptr;
      is_int8 ? expand<T, int8_t>(args, tile) : expand<T, T>(args, tile);
    });
  });
}

void enter_lora(Kernels& level) {
  level.add_lora = add_lora;
}

}  // namespace qs::QS_LEVEL
