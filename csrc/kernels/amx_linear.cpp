// y = x W^T + b in bf16 on tiles. A step has 32 inputs: a tile of 16 rows of x and tiles of weights
// ([16 pairs][16 outputs][2], 1 KiB of a panel), both in place. An output is one chain over the
// steps in ascending order; within a step the tile product has an order of its own, described in
// tests/native/emulated_tiles.h. So a row's bits are its own.
//
//   up to 16 rows   1 tile of rows x 4 panels: 4 streams of memory a thread
//   17 and more     2 x 2, so that 4 products take 4 loads: 32 rows x 2 panels
//
//   item = (chunk of <= 256 rows) x (<= 16 panels)
//     for each block of 1024 inputs     512 KiB of weights, 512 KiB of x: stay in L2
//       for 2 (or 4) panels
//         for each 32 rows              fetch their part of the next panels into L2
//           sums in tiles, between blocks in `c` (256 KiB)
//
// Gates and ups: an item has <= 8 panels of each, and their outputs (128 KiB) become activations.

#include "kernels/amx_linear.h"

#if defined(__AMX_BF16__)

#include "kernels/amx_items.h"
#include "kernels/amx_tiles.h"
#include "kernels/head_linear.h"
#include "kernels/linear_output.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kTileInputs = 32;
constexpr int64_t kTileBytes = 64;  // of a row
constexpr int64_t kStepElements = kTileInputs * kPanel;  // of a panel
constexpr int64_t kPanelsOfTwo = 2;  // at once, with 17 rows and more
constexpr int64_t kItemPanels = 16;
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kSums = kChunkRows * kItemPanels * kPanel;
constexpr int64_t kCacheLine = 64;
static_assert(W == kPanel);

struct Problem {
  const PackedLinear* packed;
  const bf16* x;
  int64_t x_stride;
  int64_t num_tokens;
};

// Tiles 0 to 3 are sums. Up to 16 rows: 4 has rows of x and 5 to 7 have weights; else 4 and 5 have
// rows, and 6 and 7 weights.
void set_shapes(int64_t num_rows) {
  const bool both = num_rows > kTileRows;
  const int64_t first = both ? kTileRows : num_rows, second = both ? num_rows - kTileRows : 0;
  const int64_t rows[8] = {first, first, both ? second : first, both ? second : first,
                           first, both ? second : kTileRows, kTileRows, kTileRows};
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
    shapes.row_bytes[tile] = kTileBytes;
  }
  set_shapes(shapes);
}

struct Fetch {
  const char* from;
  int64_t lines;  // with every step
};

QS_INLINE void bring(Fetch& fetch) {
  for (int64_t i = 0; i < fetch.lines; ++i, fetch.from += kCacheLine) {
    __builtin_prefetch(fetch.from, 0, 2);
  }
}

// Some rows of x against some panels, for a number of steps.
struct Products {
  const bf16* x;
  int64_t x_bytes;  // from a row to the next
  const bf16* weights;
  int64_t panel_size;
  int64_t num_panels;  // with 17 rows and more up to 2, else 4
  int64_t num_steps;
  float* c;
  int64_t c_bytes;
  bool first;  // c is written, else added to
  Fetch fetch;
};

template <int Tile>
QS_INLINE void begin_sums(const Products& call, float* c) {
  if (call.first) {
    zero_tile<Tile>();
  } else {
    load_tile<Tile>(c, call.c_bytes);
  }
}

template <int Panels>
void multiply_one(const Products& call) {
  Fetch fetch = call.fetch;
  float* c = call.c;
  begin_sums<0>(call, c);
  if constexpr (Panels > 1) begin_sums<1>(call, c + kPanel);
  if constexpr (Panels > 2) begin_sums<2>(call, c + 2 * kPanel);
  if constexpr (Panels > 3) begin_sums<3>(call, c + 3 * kPanel);
  const bf16* w = call.weights;
  const bf16* x = call.x;
  for (int64_t step = 0; step < call.num_steps; ++step, w += kStepElements, x += kTileInputs) {
    bring(fetch);
    load_tile<4>(x, call.x_bytes);
    load_tile<5>(w, kTileBytes);
    add_pairs<0, 4, 5>();
    if constexpr (Panels > 1) {
      load_tile<6>(w + call.panel_size, kTileBytes);
      add_pairs<1, 4, 6>();
    }
    if constexpr (Panels > 2) {
      load_tile<7>(w + 2 * call.panel_size, kTileBytes);
      add_pairs<2, 4, 7>();
    }
    if constexpr (Panels > 3) {
      load_tile<5>(w + 3 * call.panel_size, kTileBytes);
      add_pairs<3, 4, 5>();
    }
  }
  store_tile<0>(c, call.c_bytes);
  if constexpr (Panels > 1) store_tile<1>(c + kPanel, call.c_bytes);
  if constexpr (Panels > 2) store_tile<2>(c + 2 * kPanel, call.c_bytes);
  if constexpr (Panels > 3) store_tile<3>(c + 3 * kPanel, call.c_bytes);
}

template <int Panels>
void multiply_two(const Products& call) {
  Fetch fetch = call.fetch;
  float* c = call.c;
  float* below = c + kTileRows * call.c_bytes / sizeof(float);
  begin_sums<0>(call, c);
  begin_sums<2>(call, below);
  if constexpr (Panels > 1) {
    begin_sums<1>(call, c + kPanel);
    begin_sums<3>(call, below + kPanel);
  }
  const bf16* w = call.weights;
  const bf16* x = call.x;
  const bf16* other = call.x + kTileRows * call.x_bytes / sizeof(bf16);
  for (int64_t step = 0; step < call.num_steps; ++step) {
    bring(fetch);
    load_tile<4>(x, call.x_bytes);
    load_tile<6>(w, kTileBytes);
    add_pairs<0, 4, 6>();
    if constexpr (Panels > 1) {
      load_tile<7>(w + call.panel_size, kTileBytes);
      add_pairs<1, 4, 7>();
    }
    load_tile<5>(other, call.x_bytes);
    add_pairs<2, 5, 6>();
    if constexpr (Panels > 1) add_pairs<3, 5, 7>();
    w += kStepElements;
    x += kTileInputs;
    other += kTileInputs;
  }
  store_tile<0>(c, call.c_bytes);
  store_tile<2>(below, call.c_bytes);
  if constexpr (Panels > 1) {
    store_tile<1>(c + kPanel, call.c_bytes);
    store_tile<3>(below + kPanel, call.c_bytes);
  }
}

void multiply(const Products& call, int64_t num_rows) {
  if (num_rows > kTileRows) {
    call.num_panels == 1 ? multiply_two<1>(call) : multiply_two<2>(call);
  } else if (call.num_panels <= 2) {
    call.num_panels == 1 ? multiply_one<1>(call) : multiply_one<2>(call);
  } else {
    call.num_panels == 3 ? multiply_one<3>(call) : multiply_one<4>(call);
  }
}

// The last inputs, fewer than a step: copied, with zeros after them.
void multiply_rest(Products call, int64_t num_rows, int64_t rest) {
  alignas(64) bf16 x[kMostRows * kTileInputs] = {};
  alignas(64) bf16 weights[4 * kStepElements] = {};
  for (int64_t row = 0; row < num_rows; ++row) {
    memcpy(x + row * kTileInputs, call.x + row * call.x_bytes / sizeof(bf16), rest * sizeof(bf16));
  }
  for (int64_t panel = 0; panel < call.num_panels; ++panel) {
    memcpy(weights + panel * kStepElements, call.weights + panel * call.panel_size,
           div_up(rest, 2) * 2 * kPanel * sizeof(bf16));
  }
  call.x = x;
  call.x_bytes = kTileBytes;
  call.weights = weights;
  call.panel_size = kStepElements;
  call.num_steps = 1;
  call.fetch = {};
  multiply(call, num_rows);
}

// A part of the weights that `tile` fetches while it computes: the tiles of a chunk divide those of
// the panels from `panel` on, at input `k`, among them.
Fetch fetch_of(const Problem& problem, int64_t panel, int64_t k, int64_t inputs, int64_t tile,
               int64_t num_tiles) {
  const PackedLinear& packed = *problem.packed;
  const int64_t lines = kStepElements * sizeof(bf16) / kCacheLine;
  const int64_t parts = div_up(num_tiles, kPanelsOfTwo);
  const bf16* from = static_cast<const bf16*>(packed.weights) +
                     (panel + tile / parts) * packed.panel_size + k * kPanel +
                     tile % parts * (inputs / parts) * kPanel;
  return {reinterpret_cast<const char*>(from), div_up(lines, parts)};
}

// The outputs of some panels for some tiles of rows; `out` is the first of them, and `out_stride`
// from a row to the next.
void run_panels(const Problem& problem, Range all, Range tiles, bf16* out, int64_t out_stride) {
  const PackedLinear& packed = *problem.packed;
  const bf16* weights = static_cast<const bf16*>(packed.weights);
  const int64_t at_once = problem.num_tokens > kTileRows ? kPanelsOfTwo : 4;
  // With one block sums are read at once, and all tiles can use the same memory.
  const bool kept = packed.k > kBlockInputs;
  const int64_t c_stride = (kept ? all.size() : at_once) * kPanel;
  alignas(64) float c[kSums];
  int64_t shaped = 0;
  for (int64_t k = 0; k == 0 || k < packed.k; k += kBlockInputs) {
    const int64_t inputs = min_of(kBlockInputs, packed.k - k);
    const bool last = k + kBlockInputs >= packed.k;
    for (int64_t begin = all.begin; begin < all.end; begin += at_once) {
      const Range panels = {begin, min_of(all.end, begin + at_once)};
      const bool moves = panels.end == all.end;  // on to the next block
      const int64_t next = moves ? all.begin : panels.end;
      const int64_t next_k = moves && !last ? k + kBlockInputs : k;
      for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const Range rows = {tile * kMostRows, min_of(problem.num_tokens, (tile + 1) * kMostRows)};
        if (rows.size() != shaped) set_shapes(shaped = rows.size());
        float* sums = c;
        if (kept) {
          sums += (tile - tiles.begin) * kMostRows * c_stride + (begin - all.begin) * kPanel;
        }
        Products call;
        call.x = problem.x + rows.begin * problem.x_stride + k;
        call.x_bytes = problem.x_stride * static_cast<int64_t>(sizeof(bf16));
        call.weights = weights + begin * packed.panel_size + k * kPanel;
        call.panel_size = packed.panel_size;
        call.c_bytes = c_stride * static_cast<int64_t>(sizeof(float));
        call.fetch = {};
        if (problem.num_tokens > kTileRows) {
          call.fetch =
              fetch_of(problem, next, next_k, inputs, tile - tiles.begin, tiles.size());
        }
        call.num_panels = panels.size();
        call.c = sums;
        call.first = k == 0;
        call.num_steps = inputs / kTileInputs;
        multiply(call, rows.size());
        const int64_t rest = inputs % kTileInputs;
        if (rest > 0) {
          call.first = false;
          call.x += call.num_steps * kTileInputs;
          call.weights += call.num_steps * kStepElements;
          multiply_rest(call, rows.size(), rest);
        }
        if (!last) continue;
        const int64_t row = (tile - tiles.begin) * kMostRows;
        emit_panels(packed, rows.size(), panels, sums, c_stride,
                    out + row * out_stride + (begin - all.begin) * kPanel, out_stride);
      }
    }
  }
  release_tiles();
}

Problem problem_of(const LinearArgs& args) {
  return {args.packed, static_cast<const bf16*>(args.x), args.x_stride, args.num_tokens};
}

}  // namespace

void linear_tiles(Pool* pool, const LinearArgs& args) {
  const Problem problem = problem_of(args);
  const int64_t n = args.packed->n, num_panels = args.packed->num_panels;
  for_items(pool, args.num_tokens, num_panels, kItemPanels, [&](Range panels, Range tiles) {
    bf16* out = static_cast<bf16*>(args.out) + tiles.begin * kMostRows * n;
    run_panels(problem, panels, tiles, out + panels.begin * kPanel, n);
  });
}

void head_linear_tiles(Pool* pool, const HeadLinearArgs& args) {
  const qs_head_linear_call& call = *args.call;
  const int64_t num_tiles = div_up(call.num_tokens, kMostRows);
  const int64_t num_chunks = div_up(call.num_tokens, kChunkRows);
  const int64_t num_ranges = div_up(args.panels(), kItemPanels), per_head = num_chunks * num_ranges;
  parallel_for(pool, call.num_heads * per_head, [&](int64_t item) {
    const int64_t head = item / per_head, range = item % per_head / num_chunks;
    const PackedLinear packed = weight_of_head<bf16>(args, head);
    const bf16* x = static_cast<const bf16*>(call.x) + head * call.x_head_stride;
    const Problem problem = {&packed, x, call.x_stride, call.num_tokens};
    const Range panels = part(packed.num_panels, range, num_ranges);
    const Range tiles = part(num_tiles, item % num_chunks, num_chunks);
    bf16* out = static_cast<bf16*>(call.out) + tiles.begin * kMostRows * args.out_stride() +
                head * args.out_head_stride() + panels.begin * kPanel;
    run_panels(problem, panels, tiles, out, args.out_stride());
    if (range > 0) return;
    turn_rest<bf16>(args, head, {tiles.begin * kMostRows,
                                 min_of(call.num_tokens, tiles.end * kMostRows)});
  });
}

void gated_linear_tiles(Pool* pool, const LinearArgs& args, int activation) {
  const Problem problem = problem_of(args);
  const int64_t num_panels = args.packed->num_panels / 2;
  for_items(pool, args.num_tokens, num_panels, kItemPanels / 2, [&](Range gates, Range tiles) {
    alignas(64) bf16 halves[kSums];
    activate_item<kPanel>(activation, args.num_tokens, num_panels, gates, tiles, halves, args.out,
                          [&](Range panels, bf16* out, int64_t out_stride) {
                            run_panels(problem, panels, tiles, out, out_stride);
                          });
  });
}

}  // namespace qs::QS_LEVEL

#endif
