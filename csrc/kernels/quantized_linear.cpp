// y = x W^T + b over weights of 4, 6 or 8 bits, in integers.
//
// First the activations: per token, and per group where the weight has groups, scale = largest
// magnitude / 127, quants rounded half to even. Then tiles as in linear.cpp: sums within a group
// are integers, exact in any order; groups are added in ascending order. So a row's bits are its
// own. A weight with sub-block scales is one of 8 bits to all of this: a block of a panel is
// unpacked for the tiles of a chunk. Few rows have tiles of their own (quantized_direct.h). In the
// same way scales of super-blocks are multiplied, levels are looked up, and quants of 6 bits get a byte
// each, once for several tiles, and in registers for few.
//
//   item = (chunk of rows) x (one panel of 64; with one tile of rows, as many as needed)
//     for each block of inputs         quants of a panel: <= 128 KiB, stay in L2 over the tiles
//       for each row tile              each prefetches a part of the next block into L2
//         sums in registers, between blocks in `c` (<= 48 KiB)
//
// Items of one panel follow one another while the quants of all tokens fit L2: the panel is read
// from memory once then. Otherwise items of one chunk do.

#include "kernels/amx_quantized.h"
#include "kernels/kernels.h"
#include "kernels/quantized_activations.h"
#include "kernels/quantized_output.h"
#include "kernels/quantized_tile.h"
#include "kernels/quantized_unpack.h"

namespace qs::QS_LEVEL {
namespace {

// Of a chunk. Blocks of 4 bits are short and their sums often read: those of 96 rows stay in L1.
constexpr int64_t kChunkRows8 = 192;
constexpr int64_t kChunkRows4 = 96;
constexpr int64_t kKeptBytes = 512 << 10;  // quants of tokens, next to panels, in L2
// Inputs of a block: with one tile of rows, and of 4 bits, the distance that is fetched ahead. With
// many tiles a longer one, for the sake of the sums between blocks.
constexpr int64_t kBlockInputs = 1024;
constexpr int64_t kAheadInputs = 512;
constexpr int64_t kLongBlockInputs = 2048;
constexpr int64_t kLongBlockTiles = 16;
constexpr int64_t kSums = kChunkRows8 * kQuantizedPanel;
static_assert(kDirectRows * max_quantized_panels(8, 1) * kQuantizedPanel <= kSums);
// Quants of a block and the scales of its groups: of 16 inputs, or of 32 with a minimum.
constexpr int64_t kUnpackedBytes =
    kQuantizedPanel * kLongBlockInputs + kLongBlockInputs / kSubBlockInputs * kQuantizedPanel * 4;

struct Problem {
  const QuantizedLinearArgs* args;  // with the form that products see
  const PackedQuantized* stored;    // and the one that memory has
  bool direct;                      // quants with sub-block scales are read in place
  bool unpacks;                     // from the form that memory has to the other
  int64_t num_tiles;    // of rows
  int64_t num_chunks;   // of tiles
  int64_t num_ranges;
  bool chunks_first;    // items go through the chunks of a range, then through ranges
  int64_t block_groups;  // groups, or parts of the one group, per block
  int64_t block_inputs;
  int64_t num_blocks;
  int64_t threads;
  int tile_panels;  // panels that run at once
};

// Row tiles of a chunk against some panels, for one block of inputs.
struct Sweep {
  Range panels;
  Range tiles;
  int64_t block;
  uint8_t* unpacked;   // memory for a block in the form that products see
  const char* next;  // the block to fetch: what this thread will probably read then
};

template <typename T>
void emit(const Problem& problem, Range rows, Range panels, const int32_t* c) {
  const PackedQuantized& packed = *problem.args->packed;
  const int64_t first = panels.begin * kQuantizedPanel;
  const int64_t n = min_of(packed.n, panels.end * kQuantizedPanel) - first;
  for (int64_t row = rows.begin; row < rows.end; ++row, c += panels.size() * kQuantizedPanel) {
    T* out = static_cast<T*>(problem.args->out) + row * problem.args->out_stride + first;
    if (packed.num_groups == 1) {
      const int32_t* factor = problem.args->rows.factors + rows.begin + row;
      emit_single(packed, bit_cast<float>(factor[0]), factor[rows.size()], c, {first, first + n},
                  out);
    } else {
      emit_groups(packed, reinterpret_cast<const float*>(c), first, n, out);
    }
  }
}

QS_INLINE int64_t block_offset(const Problem& problem, int64_t block) {
  const PackedQuantized& packed = *problem.stored;
  return packed.num_groups == 1
             ? block * problem.block_inputs * kQuantizedPanel * packed.held_bits / 8
             : packed.groups_bytes(block * problem.block_groups);
}

QS_INLINE const uint8_t* block_at(const Problem& problem, int64_t panel, int64_t block) {
  const PackedQuantized& packed = *problem.stored;
  return static_cast<const uint8_t*>(packed.weights) + panel * packed.panel_bytes +
         block_offset(problem, block);
}

// The arguments that are common to all tiles of a sweep.
QuantizedTileArgs sweep_args(const Problem& problem, const Sweep& sweep) {
  const PackedQuantized& packed = problem.direct ? *problem.stored : *problem.args->packed;
  const bool single = packed.num_groups == 1;
  const int64_t first_input = sweep.block * problem.block_inputs;
  const int64_t first_group = single ? 0 : sweep.block * problem.block_groups;
  QuantizedTileArgs args;
  args.w = block_at(problem, sweep.panels.begin, sweep.block);
  args.panel_bytes = packed.panel_bytes;
  args.group_bytes = packed.group_bytes;
  args.quant_bytes = packed.quant_bytes();
  args.num_inputs =
      single ? min_of(problem.block_inputs, packed.group_size - first_input) : packed.group_size;
  args.num_groups = min_of(problem.block_groups, packed.num_groups - first_group);
  args.shared_groups = packed.shared_groups();
  args.super_groups = packed.super_bytes != 0 ? packed.super_groups() : 0;
  args.super_bytes = packed.super_bytes;
  args.levels = packed.levels;
  args.first = sweep.block == 0;
  return args;
}

// Sets what tile number `tile` fetches: its part of the next block. Equal parts keep the memory
// busy all the time; if only the first tiles fetched, they would wait for the memory.
QS_INLINE void set_fetch(const Problem& problem, const Sweep& sweep, int64_t tile,
                         QuantizedTileArgs& args) {
  const PackedQuantized& packed = *problem.stored;
  const int64_t shares = sweep.tiles.size();
  const int64_t bytes =
      packed.num_groups == 1 ? problem.block_inputs * kQuantizedPanel * packed.held_bits / 8
                             : packed.groups_bytes(args.num_groups);
  args.fetch = sweep.next + tile * (bytes / shares);
  args.fetch_lines = static_cast<int>(div_up(kStepBytes / kCacheLine, shares));
  const int64_t super_part = packed.super_bytes * packed.group_size / kSuperInputs;
  args.fetch_scales = (packed.group_bytes + super_part - packed.quant_bytes()) / shares;
  // unpacked quants have more steps of 256 bytes
  args.fetch_stride = kStepBytes / shares * packed.held_bits / problem.args->packed->held_bits;
  if (!packed.has_sub_scales) return;
  if (problem.direct) {
    args.fetch_stride = kPieceBytes;
  } else {
    args.fetch_scales = packed.group_bytes / shares -
                        packed.group_size / kStepInputs * args.fetch_stride;
  }
}

// Brings in the lines that the tile's outputs go to; they are written once it has ended.
QS_INLINE void fetch_outputs(const Problem& problem, Range rows, Range panels) {
  const QuantizedLinearArgs& args = *problem.args;
  const int64_t element = args.dtype == QS_F32 ? 4 : 2;
  const int64_t first = panels.begin * kQuantizedPanel;
  const int64_t bytes = (min_of(args.packed->n, panels.end * kQuantizedPanel) - first) * element;
  const char* out = static_cast<const char*>(args.out) + first * element;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const char* line = out + row * args.out_stride * element;
    for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(line + i, 1, 3);
  }
}

void unpack_block(const Problem& problem, const Sweep& sweep, int64_t num_groups) {
  const PackedQuantized& stored = *problem.stored;
  const uint8_t* from = block_at(problem, sweep.panels.begin, sweep.block);
  uint8_t* to = sweep.unpacked;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (stored.has_sub_scales) {
      unpack_group(stored, from + stored.group_offset(group), to);
    } else {
      widen_group(stored, from, group, to);
    }
    to += problem.args->packed->group_bytes;
  }
}

void run_sweep(const Problem& problem, const Sweep& sweep, int32_t* c) {
  const PackedQuantized& packed = *problem.args->packed;
  const QuantizedRows& x = problem.args->rows;
  QuantizedTileArgs args = sweep_args(problem, sweep);
  if (problem.unpacks) {
    unpack_block(problem, sweep, args.num_groups);
    args.w = sweep.unpacked;
  }
  const uint8_t* w = args.w;
  const int64_t first_input = sweep.block * problem.block_inputs;
  const int64_t first_group = packed.num_groups == 1 ? 0 : sweep.block * problem.block_groups;
  const int panels = static_cast<int>(sweep.panels.size());
  const bool last = sweep.block + 1 == problem.num_blocks;
  const int64_t first_row =
      part(problem.args->num_tokens, sweep.tiles.begin, problem.num_tiles).begin;
  for (int64_t tile = sweep.tiles.begin; tile < sweep.tiles.end; ++tile) {
    const Range rows = part(problem.args->num_tokens, tile, problem.num_tiles);
    const int num_rows = static_cast<int>(rows.size());
    const QuantizedTileFn run = problem.direct ? direct_tile(packed, num_rows, panels)
                                               : quantized_tile(packed, num_rows, panels);
    args.x = x.quants + rows.begin * x.stride + first_input * rows.size();
    if (problem.direct) {
      const int64_t before = rows.begin * x.stride + first_input * rows.size();
      args.parts = x.parts + before / kSubBlockInputs;
    }
    args.factors =
        x.factors + 2 * (rows.begin * packed.num_groups + first_group * rows.size());
    // With one block the sums of a tile are read at once, and all tiles can use the same memory.
    const int64_t kept_rows = problem.num_blocks == 1 ? 0 : rows.begin - first_row;
    int32_t* sums = c + kept_rows * panels * kQuantizedPanel;
    if (last) fetch_outputs(problem, rows, sweep.panels);
    const int64_t num_parts =
        kPanelParts * (problem.direct ? kTileVectors / direct_vectors(num_rows) : 1);
    const int64_t outputs = kQuantizedPanel / num_parts;
    for (int64_t p = 0; p < num_parts; ++p) {
      args.part_outputs = p * outputs;
      args.w = w + p * outputs * kStepInputs;
      args.c = sums + p * outputs;  // both kinds of sums have 4 bytes
      set_fetch(problem, sweep, tile - sweep.tiles.begin, args);
      if (num_parts > kPanelParts) {
        args.fetch += p * kPieceBytes / num_parts;  // of each piece
      } else if (!problem.direct && sweep.tiles.size() == 1) {
        args.fetch += p * kPartBytes;  // of each step: a part fetches as much as it reads
      }
      run(args);
    }
    if (!last) continue;
    with_dtype(problem.args->dtype, [&](auto type) {
      emit<decltype(type)>(problem, rows, sweep.panels, sums);
    });
  }
}

QS_INLINE int64_t chunk_of(const Problem& problem, int64_t item) {
  return problem.chunks_first ? item % problem.num_chunks : item / problem.num_ranges;
}

QS_INLINE int64_t range_of(const Problem& problem, int64_t item) {
  return problem.chunks_first ? item / problem.num_chunks : item % problem.num_ranges;
}

// The range that the thread of `item` will probably compute next.
QS_INLINE int64_t following_range(const Problem& problem, int64_t item) {
  if (!problem.chunks_first) return (item + problem.threads) % problem.num_ranges;
  const bool stays = chunk_of(problem, item) + problem.threads < problem.num_chunks;
  const int64_t next = range_of(problem, stays ? item : item + problem.threads);
  return min_of(next, problem.num_ranges - 1);
}

void run_item(const Problem& problem, int64_t item) {
  const QuantizedLinearArgs& args = *problem.args;
  const int64_t num_panels = args.packed->num_panels;
  const int64_t chunk = chunk_of(problem, item);
  const Range range = part(num_panels, range_of(problem, item), problem.num_ranges);
  const int64_t following = following_range(problem, item);
  const int64_t after = part(num_panels, following, problem.num_ranges).begin;
  alignas(64) int32_t c[kSums];  // or float
  alignas(64) uint8_t unpacked[kUnpackedBytes];
  Sweep sweep;
  sweep.unpacked = unpacked;
  sweep.tiles = part(problem.num_tiles, chunk, problem.num_chunks);
  for (int64_t panel = range.begin; panel < range.end; panel = sweep.panels.end) {
    sweep.panels = {panel, min_of(range.end, panel + problem.tile_panels)};
    const int64_t next_panel = sweep.panels.end < range.end ? sweep.panels.end : after;
    for (int64_t block = 0; block < problem.num_blocks; ++block) {
      const bool last = block + 1 == problem.num_blocks;
      sweep.block = block;
      sweep.next = reinterpret_cast<const char*>(
          last ? block_at(problem, next_panel, 0) : block_at(problem, panel, block + 1));
      run_sweep(problem, sweep, c);
    }
  }
}

QS_INLINE int64_t block_inputs(const PackedQuantized& packed, int64_t num_tiles) {
  if (num_tiles == 1 || packed.bits == 4) return kAheadInputs;
  return num_tiles < kLongBlockTiles ? kBlockInputs : kLongBlockInputs;
}

// Groups, or parts of the one group, that make a block of about `inputs` inputs.
void set_blocks(const PackedQuantized& packed, int64_t inputs, Problem& problem) {
  if (packed.num_groups == 1) {
    problem.block_groups = 1;
    problem.block_inputs = inputs;
    problem.num_blocks = div_up(packed.group_size, inputs);
  } else {
    const int64_t shared = packed.shared_groups();
    problem.block_groups = max_of(1, inputs / (packed.group_size * shared)) * shared;
    problem.block_inputs = problem.block_groups * packed.group_size;
    problem.num_blocks = div_up(packed.num_groups, problem.block_groups);
  }
}

}  // namespace

static void quantized_linear(Pool* pool, const QuantizedLinearArgs& call) {
  const PackedQuantized& stored = *call.packed;
  PackedQuantized packed = stored.has_sub_scales ? unpacked_form(stored) : stored;
  QuantizedLinearArgs args = call;
  args.packed = &packed;
  if (runs_on_tiles(args)) {
    quantized_linear_tiles(pool, args, stored);
    return;
  }
  Problem problem;
  problem.args = &args;
  problem.stored = &stored;
  problem.direct = stored.has_sub_scales && args.num_tokens < kUnpackedRows;
  const int64_t max_rows =
      problem.direct ? kDirectRows : max_quantized_rows(packed, args.num_tokens);
  const int64_t chunk_rows = packed.bits == 4 ? kChunkRows4 : kChunkRows8;
  problem.num_tiles = div_up(args.num_tokens, max_rows);
  problem.unpacks = stored.has_sub_scales && !problem.direct;
  const bool packs = stored.has_levels() || stored.held_bits == 6;
  const bool unpackable = packs ? stored.num_groups > 1 : stored.super_bytes != 0;
  if (unpackable && problem.num_tiles >= kUnpackedTiles) {
    packed = unpacked_form(stored);
    problem.unpacks = true;
  }
  problem.num_chunks = div_up(problem.num_tiles, chunk_rows / max_rows);
  problem.threads = pool_size(pool);
  if (!args.quantized) quantize_rows(pool, args, problem.num_tiles);
  const bool one_tile = problem.num_tiles == 1;
  const int rows = static_cast<int>(args.num_tokens);
  problem.tile_panels = !one_tile        ? 1
                        : problem.direct ? max_direct_panels(rows)
                                         : max_quantized_panels(packed.held_bits, rows);
  problem.chunks_first = args.num_tokens * args.rows.stride <= kKeptBytes;
  // A copy of a block is written and read once more than the block itself: a short one stays near.
  const bool copies = problem.unpacks && !stored.has_sub_scales;
  const int64_t inputs = copies ? kAheadInputs : block_inputs(packed, problem.num_tiles);
  set_blocks(packed, inputs, problem);
  // A multiple of the thread count, so that equal threads end together.
  const int64_t ranges = div_up(packed.num_panels, problem.tile_panels);
  problem.num_ranges =
      min_of(packed.num_panels, div_up(ranges, problem.threads) * problem.threads);
  parallel_for(pool, problem.num_chunks * problem.num_ranges,
               [&](int64_t item) { run_item(problem, item); });
}

static bool gated_quantized(Pool* pool, const QuantizedLinearArgs& call, int activation) {
  const PackedQuantized& stored = *call.packed;
  const PackedQuantized packed = stored.has_sub_scales ? unpacked_form(stored) : stored;
  QuantizedLinearArgs args = call;
  args.packed = &packed;
  if (!runs_on_tiles(args) || packed.n % (2 * kQuantizedPanel) != 0) return false;
  gated_quantized_tiles(pool, args, stored, activation);
  return true;
}

void enter_quantized_linear(Kernels& level) {
  level.quantized_linear = quantized_linear;
  level.gated_quantized = gated_quantized;
}

}  // namespace qs::QS_LEVEL
