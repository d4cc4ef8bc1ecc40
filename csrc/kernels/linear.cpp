// y = x W^T + b. Every output is one accumulator chain over k in ascending order, vectorised over
// outputs, restarted every kBlockK inputs; block sums are added in order. Nothing in that depends
// on the number of rows, on the tile shape or on the thread, so a row's bits are its own.
//
// Tile: R rows x P panels of 16 outputs, R * P * (16 / W) accumulators (24 of 32 registers, 12 of
// 16). One row runs 8 panels at once: 8 weight streams per thread, which is what it takes to reach
// the memory's bandwidth. Many rows run 6 x 4: 24 products for 10 loads.
//
//   item = (chunk of <= 96 rows) x (<= 8 panels)
//     for each k block                 weights of the item: <= 128 KiB, stay in L2 over the tiles
//       for each row tile              fp32 copy of x where the level has no product for its type
//         for each panel group         accumulators in registers, sums in `c` (48 KiB)

#include "kernels/amx_linear.h"
#include "kernels/kernels.h"
#include "kernels/head_linear.h"
#include "kernels/linear_output.h"
#include "kernels/linear_tile.h"
#include "kernels/ranges.h"
#include "kernels/transpose.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kChunkRows = 96;
constexpr int64_t kItemPanels = 8;
constexpr int64_t kSums = kChunkRows * kItemPanels * kPanel;

template <typename T>
struct Problem {
  const PackedLinear* packed;
  const T* x;
  int64_t x_stride;
  int64_t num_tokens;
  T* out;
  int64_t out_stride;
  int64_t num_chunks;
  int64_t num_ranges;
  int64_t threads;
};

// The panels of an item and the block of inputs that they are at; `next` is where the panels of
// the next block begin.
template <typename T>
struct Sweep {
  Range panels;
  int64_t k_begin;
  const T* next;
};

// What tile `tile` of `num_tiles` fetches: its part of the next block's panels. Left to the
// hardware, the first tile waits for memory and the others find what it brought.
template <typename T>
QS_INLINE Ahead fetched_by(const Problem<T>& problem, const Sweep<T>& sweep, int64_t tile,
                           int64_t num_tiles) {
  const Range streams = part(sweep.panels.size(), tile, num_tiles);
  const int64_t stride = problem.packed->panel_size * static_cast<int64_t>(sizeof(T));
  return {reinterpret_cast<const char*>(sweep.next) + streams.begin * stride, stride,
          static_cast<int>(streams.size())};
}

// One row tile against all panels of the item, for one k block.
template <typename T>
void run_tile(const Problem<T>& problem, Range rows, const Sweep<T>& sweep, Ahead ahead,
              float* c) {
  const Range panels = sweep.panels;
  const int64_t k_begin = sweep.k_begin;
  const PackedLinear& packed = *problem.packed;
  const int num_rows = static_cast<int>(rows.size());
  const T* x = problem.x + rows.begin * problem.x_stride + k_begin;
  TileArgs<T> args;
  args.k = min_of(kBlockK, packed.k - k_begin);
  args.panel_size = packed.panel_size;
  args.c_stride = panels.size() * kPanel;
  args.first = k_begin == 0;
  alignas(64) typename Product<T>::X copy[Product<T>::kCopies ? kMaxRows * kBlockK : 1];
  if constexpr (Product<T>::kCopies) {
    copy_rows(x, problem.x_stride, num_rows, args.k, copy);
    args.x = copy;
    args.x_stride = kBlockK;
  } else {
    args.x = x;
    args.x_stride = problem.x_stride;
  }
  const int64_t num_groups = div_up(panels.size(), max_panels(num_rows));
  for (int64_t i = 0; i < num_groups; ++i) {
    const Range group = part(panels.size(), i, num_groups);
    args.w = static_cast<const T*>(packed.weights) +
             (panels.begin + group.begin) * packed.panel_size + k_begin * kPanel;
    args.c = c + group.begin * kPanel;
    args.ahead = i == 0 ? ahead : Ahead{};
    tile_function<T>(num_rows, static_cast<int>(group.size()))(args);
  }
}

// The range of panels that the thread of `item` will likely compute next.
template <typename T>
QS_INLINE int64_t following(const Problem<T>& problem, int64_t item) {
  const int64_t chunk = item % problem.num_chunks;
  const int64_t ahead = chunk + problem.threads < problem.num_chunks ? 0 : problem.threads;
  return min_of((item + ahead) / problem.num_chunks, problem.num_ranges - 1);
}

template <typename T>
void run_item(const Problem<T>& problem, int64_t item) {
  const PackedLinear& packed = *problem.packed;
  const Range panels = part(packed.num_panels, item / problem.num_chunks, problem.num_ranges);
  const Range chunk = part(problem.num_tokens, item % problem.num_chunks, problem.num_chunks);
  const int64_t num_tiles = div_up(chunk.size(), kMaxRows);
  const Range after = part(packed.num_panels, following(problem, item), problem.num_ranges);
  const T* weights = static_cast<const T*>(packed.weights);
  const bool fetches = num_tiles > 1;
  alignas(64) float c[kSums];
  for (int64_t k_begin = 0; k_begin < packed.k; k_begin += kBlockK) {
    const int64_t next = k_begin + kBlockK;
    const bool last = next >= packed.k;
    const T* next_block = last ? weights + after.begin * packed.panel_size
                               : weights + panels.begin * packed.panel_size + next * kPanel;
    const Sweep<T> sweep = {panels, k_begin, next_block};
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const Range local = part(chunk.size(), tile, num_tiles);
      const Range rows = {chunk.begin + local.begin, chunk.begin + local.end};
      float* tile_sums = c + local.begin * panels.size() * kPanel;
      const Ahead ahead =
          fetches ? fetched_by(problem, sweep, tile, num_tiles) : Ahead{};
      run_tile(problem, rows, sweep, ahead, tile_sums);
      if (last) {
        emit_panels(packed, rows.size(), panels, tile_sums, panels.size() * kPanel,
                    problem.out + rows.begin * problem.out_stride + panels.begin * kPanel,
                    problem.out_stride);
      }
    }
  }
}

template <typename T>
void linear_typed(Pool* pool, const LinearArgs& args) {
  Problem<T> problem;
  problem.packed = args.packed;
  problem.x = static_cast<const T*>(args.x);
  problem.x_stride = args.x_stride;
  problem.num_tokens = args.num_tokens;
  problem.out = static_cast<T*>(args.out);
  problem.out_stride = args.packed->n;
  problem.num_chunks = div_up(args.num_tokens, kChunkRows);
  // A multiple of the thread count, so that equal threads end together.
  problem.threads = pool_size(pool);
  const int64_t ranges = div_up(args.packed->num_panels, kItemPanels);
  problem.num_ranges =
      min_of(args.packed->num_panels, div_up(ranges, problem.threads) * problem.threads);
  parallel_for(pool, problem.num_chunks * problem.num_ranges,
               [&](int64_t item) { run_item(problem, item); });
}

// As linear_typed, head by head: an item is of one of them.
template <typename T>
void head_linear_typed(Pool* pool, const HeadLinearArgs& args) {
  const qs_head_linear_call& call = *args.call;
  const int64_t num_chunks = div_up(call.num_tokens, kChunkRows);
  const int64_t num_ranges = div_up(args.panels(), kItemPanels), per_head = num_chunks * num_ranges;
  parallel_for(pool, call.num_heads * per_head, [&](int64_t item) {
    const int64_t head = item / per_head;
    const PackedLinear packed = weight_of_head<T>(args, head);
    Problem<T> problem;
    problem.packed = &packed;
    problem.x = static_cast<const T*>(call.x) + head * call.x_head_stride;
    problem.x_stride = call.x_stride;
    problem.num_tokens = call.num_tokens;
    problem.out = static_cast<T*>(call.out) + head * args.out_head_stride();
    problem.out_stride = args.out_stride();
    problem.num_chunks = num_chunks;
    problem.num_ranges = num_ranges;
    problem.threads = 1;
    run_item(problem, item % per_head);
    if (item % per_head >= num_chunks) return;
    turn_rest<T>(args, head, part(call.num_tokens, item % num_chunks, num_chunks));
  });
}

// Transposes squares of W lanes and W words, a word being 4 bytes of adjacent inputs of a
// lane: complete lines are loaded and stored. Returns the number of words that it packed.
template <typename T>
int64_t pack_squares(const T* rows, int64_t row_stride, int64_t num_words, T* out) {
  constexpr int64_t kPair = Product<T>::kPair;
  if constexpr (sizeof(T) * kPair != sizeof(float)) return 0;
  const int64_t whole = num_words / W * W;
  for (int64_t begin = 0; begin < whole; begin += W) {
    for (int64_t lane = 0; lane < kPanel; lane += W) {
      vf square[W];
      for (int64_t i = 0; i < W; ++i) {
        memcpy(&square[i], rows + (lane + i) * row_stride + begin * kPair, sizeof(vf));
      }
      transpose(square);
      for (int64_t i = 0; i < W; ++i) {
        memcpy(out + ((begin + i) * kPanel + lane) * kPair, &square[i], sizeof(vf));
      }
    }
  }
  return whole;
}

// Some inputs of all lanes at a time: what is written stays in L1 until its lines are full.
template <typename T>
void pack_panel(const PackArgs& args, int64_t panel) {
  constexpr int64_t kPair = Product<T>::kPair;
  constexpr int64_t kAtOnce = 64;  // pairs
  const PackedLinear& packed = *args.packed;
  T* out = static_cast<T*>(packed.weights) + panel * packed.panel_size;
  const int64_t lanes = min_of(kPanel, packed.n - panel * kPanel);  // the memory is zeroed
  const T* rows = static_cast<const T*>(args.weight) + panel * kPanel * args.row_stride;
  const int64_t whole = packed.k / kPair;
  int64_t begin = lanes == kPanel ? pack_squares(rows, args.row_stride, whole, out) : 0;
  for (; begin < whole; begin += kAtOnce) {
    const int64_t end = min_of(whole, begin + kAtOnce);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const T* weight = rows + lane * args.row_stride;
      T* column = out + lane * kPair;
      for (int64_t i = begin; i < end; ++i) {
        memcpy(column + i * kPanel * kPair, weight + i * kPair, sizeof(T) * kPair);
      }
    }
  }
  for (int64_t lane = 0; lane < lanes && whole * kPair < packed.k; ++lane) {
    out[whole * kPanel * kPair + lane * kPair] = rows[lane * args.row_stride + whole * kPair];
  }
}

}  // namespace

static void pack_linear(Pool* pool, const PackArgs& args) {
  with_dtype(args.packed->dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, args.packed->num_panels,
                 [&](int64_t panel) { pack_panel<T>(args, panel); });
  });
}

static void linear(Pool* pool, const LinearArgs& args) {
  if (kTilesOfBf16 && args.packed->dtype == QS_BF16) {
    linear_tiles(pool, args);
    return;
  }
  with_dtype(args.packed->dtype, [&](auto type) { linear_typed<decltype(type)>(pool, args); });
}

static void head_linear(Pool* pool, const HeadLinearArgs& args) {
  if (kTilesOfBf16 && args.packed->dtype == QS_BF16) {
    head_linear_tiles(pool, args);
    return;
  }
  with_dtype(args.packed->dtype, [&](auto type) { head_linear_typed<decltype(type)>(pool, args); });
}

static bool gated_linear(Pool* pool, const LinearArgs& args, int activation) {
  const PackedLinear& packed = *args.packed;
  const bool has_kernel = kTilesOfBf16 && packed.dtype == QS_BF16;
  if (!has_kernel || packed.n % (2 * kPanel) != 0) return false;
  gated_linear_tiles(pool, args, activation);
  return true;
}

void enter_linear(Kernels& level) {
  level.pack_linear = pack_linear;
  level.linear = linear;
  level.head_linear = head_linear;
  level.gated_linear = gated_linear;
}

}  // namespace qs::QS_LEVEL
