// The low-bit linear on tiles. A step has 64 inputs, of one of two shapes:
//
//   up to 16 rows   1 tile of activations x 4 of quants: the 64 outputs of a panel
//   17 and more     2 x 2, so that 4 products take 4 loads: 32 rows x half of a panel's outputs
//
// Tiles of quants ([16][16][4] of a step's [16][64][4]) are read in place; those held in 4 and 6 bits
// are unpacked first, once for all rows of an item. Activations are quantized into tiles:
//
//   quants    16 rows  [stride / 64][R][64]
//   factors   16 rows  [num_groups][2][R]
//
//   item = (chunk of <= 256 rows) x (<= 4 panels)
//     for each block of inputs     <= 256 KiB of quants of activations, 64 KiB of a panel's
//       for each panel
//         for each 32 rows         fetch their part of the next panel's quants into L2
//           sums over the block in tiles; with groups, over a group, which are stored (4 KiB), and
//           scaled while the next group is multiplied
//
// Gates and ups: an item has <= 2 panels of each, and their outputs become activations.

#include "kernels/amx_quantized.h"

#if defined(__AMX_INT8__)

#include "kernels/amx_items.h"
#include "kernels/amx_tiles.h"
#include "kernels/kernels.h"
#include "kernels/quantized_activations.h"
#include "kernels/quantized_output.h"
#include "kernels/quantized_unpack.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kTileInputs = 64;
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kRowsQuantized = 4;  // by an item
constexpr int64_t kItemPanels = 4;
// Quants of a block and the scales of its groups, the smallest of which have a piece.
constexpr int64_t kUnpackedBytes =
    kQuantizedPanel * kTileBlockInputs + kTileBlockInputs / kPieceInputs * kQuantizedPanel * 4;
constexpr int64_t kSums = kTileRows * kQuantizedPanel;  // of 4 tiles
constexpr int64_t kPanelSums = kChunkRows * kQuantizedPanel;
constexpr int64_t kStepLines = kTileInputs * kQuantizedPanel / kCacheLine;
static_assert(W == kTileOutputs);

// How many tiles of rows are multiplied at once, and so which tile is which.
template <int RowTiles>
struct Shape {
  static constexpr int kOutputs = RowTiles == 1 ? kQuantizedPanel : kQuantizedPanel / 2;
  static constexpr int kVectors = kOutputs / W;
  static constexpr int kPasses = kQuantizedPanel / kOutputs;
  static constexpr int64_t kSumBytes = kOutputs * sizeof(int32_t);  // of a row
};

// The shapes that a thread's tiles have.
struct Configured {
  int64_t rows = 0, inputs = 0;

  // Tiles 0 to 3 are sums. Up to 16 rows: 4 has activations and 5 to 7 have quants; else 4 and 5
  // have activations, and 6 and 7 quants.
  void set(int64_t num_rows, int64_t num_inputs) {
    if (num_rows == rows && num_inputs == inputs) return;
    rows = num_rows;
    inputs = num_inputs;
    const bool both = num_rows > kTileRows;
    const int64_t first = both ? kTileRows : num_rows, second = both ? num_rows - kTileRows : 0;
    TileShapes shapes;
    const auto shape = [&](int tile, int64_t tile_rows, int64_t row_bytes) {
      shapes.rows[tile] = static_cast<uint8_t>(tile_rows);
      shapes.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    for (int tile = 0; tile < 4; ++tile) {
      shape(tile, both && tile >= 2 ? second : first, sizeof(int32_t) * kTileOutputs);
    }
    for (int tile = 4; tile < 8; ++tile) {
      shape(tile, num_inputs / kStepInputs, sizeof(int32_t) * kTileOutputs);
    }
    shape(4, first, num_inputs);
    if (both) shape(5, second, num_inputs);
    set_shapes(shapes);
  }
};

void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
}

template <int RowTiles, typename T>
void load_sums(const T* from, int64_t stride) {
  load_tile<0>(from, stride);
  load_tile<1>(from + 16, stride);
  const T* other = RowTiles == 1 ? from + 32 : from + kTileRows * stride / sizeof(T);
  load_tile<2>(other, stride);
  load_tile<3>(other + 16, stride);
}

template <int RowTiles, typename T>
void store_sums(T* to, int64_t stride) {
  store_tile<0>(to, stride);
  store_tile<1>(to + 16, stride);
  T* other = RowTiles == 1 ? to + 32 : to + kTileRows * stride / sizeof(T);
  store_tile<2>(other, stride);
  store_tile<3>(other + 16, stride);
}

// What is brought into L2 with every step.
struct Fetch {
  const uint8_t* from;
  int64_t lines;
};

QS_INLINE void bring(Fetch& fetch) {
  for (int64_t i = 0; i < fetch.lines; ++i, fetch.from += kCacheLine) {
    __builtin_prefetch(fetch.from, 0, 2);
  }
}

// Some rows' activations from an input on: those of the first 16 rows, and of the others.
struct Rows {
  const int8_t* first;
  const int8_t* second;
  int64_t num_first;
};

Rows rows_at(const QuantizedRows& x, Range rows, int64_t input) {
  const int64_t first = min_of(kTileRows, rows.size()), second = rows.size() - first;
  const int64_t step = input / kTileInputs * kTileInputs, rest = input % kTileInputs;
  const int8_t* quants = x.quants + rows.begin * x.stride;
  return {quants + step * first + rest, quants + first * x.stride + step * second + rest, first};
}

// One step of up to 64 inputs, for the outputs from `quants` on.
template <int RowTiles>
QS_INLINE void add_step(const int8_t* first, const int8_t* second, const uint8_t* quants) {
  constexpr int64_t kTileBytes = kTileOutputs * kStepInputs;
  load_tile<4>(first, kTileInputs);
  if constexpr (RowTiles == 1) {
    load_tile<5>(quants, kStepBytes);
    add_signed_by_unsigned<0, 4, 5>();
    load_tile<6>(quants + kTileBytes, kStepBytes);
    add_signed_by_unsigned<1, 4, 6>();
    load_tile<7>(quants + 2 * kTileBytes, kStepBytes);
    add_signed_by_unsigned<2, 4, 7>();
    load_tile<5>(quants + 3 * kTileBytes, kStepBytes);
    add_signed_by_unsigned<3, 4, 5>();
  } else {
    load_tile<6>(quants, kStepBytes);
    add_signed_by_unsigned<0, 4, 6>();
    load_tile<7>(quants + kTileBytes, kStepBytes);
    add_signed_by_unsigned<1, 4, 7>();
    load_tile<5>(second, kTileInputs);
    add_signed_by_unsigned<2, 5, 6>();
    add_signed_by_unsigned<3, 5, 7>();
  }
}

struct Problem {
  const QuantizedLinearArgs* args;
  const PackedQuantized* stored;
  int64_t block_groups;  // groups, or parts of the one group, per block
  int64_t block_inputs;
  int64_t num_blocks;
  int64_t step_inputs;
};

// A block of a panel: its quants a byte each, and what belongs to them.
struct Block {
  const uint8_t* begin;  // as it is stored
  const uint8_t* quants;
  int64_t group_stride;  // bytes from the quants of one group to the next
  int64_t super_stride;  // bytes between super-blocks in addition
  const uint8_t* scales;  // of its first group
  int64_t first_group, num_groups;
  int64_t first_input, num_inputs;  // inputs of a group, or of the block within the one group
  Fetch fetch;

  const uint8_t* quants_of(int64_t group) const {
    return quants + group * group_stride + group * num_inputs / kSuperInputs * super_stride;
  }
};

const uint8_t* block_at(const Problem& problem, int64_t panel, int64_t index) {
  const PackedQuantized& packed = *problem.stored;
  const int64_t offset = packed.num_groups == 1
                             ? index * problem.block_inputs * kQuantizedPanel * packed.held_bits / 8
                             : packed.groups_bytes(index * problem.block_groups);
  return static_cast<const uint8_t*>(packed.weights) + panel * packed.panel_bytes + offset;
}

Block unpack_block(const Problem& problem, int64_t panel, int64_t index, uint8_t* unpacked) {
  const PackedQuantized& packed = *problem.stored;
  Block block = {};
  block.begin = block_at(problem, panel, index);
  block.quants = block.begin + packed.super_bytes;
  if (packed.num_groups == 1) {
    block.num_groups = 1;
    block.first_input = index * problem.block_inputs;
    block.num_inputs = min_of(problem.block_inputs, packed.group_size - block.first_input);
  } else {
    block.first_group = index * problem.block_groups;
    block.num_groups = min_of(problem.block_groups, packed.num_groups - block.first_group);
    block.first_input = block.first_group * packed.group_size;
    block.num_inputs = packed.group_size;
    block.scales = block.quants + packed.quant_bytes();
  }
  block.group_stride = packed.group_bytes;
  block.super_stride = packed.super_bytes;
  const int64_t bytes = block.num_inputs * kQuantizedPanel;
  if (packed.has_sub_scales) {
    const PackedQuantized& form = *problem.args->packed;
    for (int64_t group = 0; group < block.num_groups; ++group) {
      unpack_group(packed, block.quants + group * block.group_stride,
                   unpacked + group * form.group_bytes);
    }
    block.quants = unpacked;
    block.group_stride = form.group_bytes;
    block.scales = unpacked + form.quant_bytes();
  } else if (packed.held_bits != 8) {
    for (int64_t group = 0; group < block.num_groups; ++group) {
      unpack_quants(packed, block.quants_of(group), block.num_inputs, unpacked + group * bytes);
    }
    block.quants = unpacked;
    block.group_stride = bytes;
    block.super_stride = 0;
  } else if (packed.num_groups == 1 && block.num_inputs % kTileInputs != 0) {
    // The last tile reads beyond the panel, where activations are zero: not beyond the memory.
    memcpy(unpacked, block.quants, bytes);
    block.quants = unpacked;
  }
  return block;
}

// The one group's part: sums continue in `c`, which the first block starts.
template <int RowTiles>
void run_single(const QuantizedLinearArgs& args, const Block& block, int64_t pass, Range rows,
                int32_t* c) {
  constexpr int64_t kStride = kQuantizedPanel * sizeof(int32_t);
  const Rows x = rows_at(args.rows, rows, block.first_input);
  const int64_t second = rows.size() - x.num_first;
  const uint8_t* quants = block.quants + pass * Shape<RowTiles>::kOutputs * kStepInputs;
  Fetch fetch = block.fetch;
  if (block.first_input == 0) {
    zero_sums();
  } else {
    load_sums<RowTiles>(c, kStride);
  }
  for (int64_t k = 0; k < block.num_inputs; k += kTileInputs) {
    bring(fetch);
    add_step<RowTiles>(x.first + k * x.num_first, x.second + k * second,
                       quants + k * kQuantizedPanel);
  }
  store_sums<RowTiles>(c, kStride);
}

// Where the sums of a group are between its products and the end of the next group's.
template <int RowTiles>
struct GroupSums {
  alignas(64) int32_t dots[2][kSums];
  // Of 4 bits, over the groups that share a scale of activations.
  alignas(64) float part[Shape<RowTiles>::kPasses][kSums];
};

// One group, as defined in `quantized_tile.h`. 6 or 8 bits: c = fma((dot - zero * sum) * x_scale,
// scale, c); of 4 bits the same without x_scale: part = fma(dot - zero * sum, scale, part), and after
// the last group that shares x_scale c = fma(part, x_scale, c). Minimums are added there as well.
template <bool Shares, int Vectors, typename Scale, Offset Kind>
void add_group(int bits, const int32_t* factors, int64_t num_rows, const Scale* scales,
               const f16* super_scales, const int32_t* dots, float* part, bool first, bool last,
               float* c) {
  vf scale[Vectors], zero[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    scale[v] = group_scales(scales + v * W, super_scales + v * W);
    zero[v] = Kind != kMiddle ? group_scales(scales + kQuantizedPanel + v * W,
                                             super_scales + kQuantizedPanel + v * W)
                              : vf{};
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const vf x_scale = set1(bit_cast<float>(factors[row]));
    const int32_t correction = factors[num_rows + row];
    const vi start = set1i(Kind == kMinimums ? 0 : correction);  // tiles multiply quants from 0 on
    const vf negative = negative_sum(bits, correction);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      vi sum;
      memcpy(&sum, dots + v * W, sizeof(sum));
      vf dot = __builtin_convertvector(sum + start, vf);
      if (Kind == kZeros) dot = fma(zero[v], negative, dot);
      if constexpr (!Shares) {
        vf total = fma(dot * x_scale, scale[v], load(c + v * W));
        if (Kind == kMinimums) total = fma(zero[v], -negative * x_scale, total);
        store(c + v * W, total);
      } else {
        vf sums = fma(dot, scale[v], first ? vf{} : load(part + v * W));
        if (Kind == kMinimums) sums = fma(zero[v], -negative, sums);
        if (last) {
          store(c + v * W, fma(sums, x_scale, load(c + v * W)));
        } else {
          store(part + v * W, sums);
        }
      }
    }
    dots += Vectors * W;
    part += Vectors * W;
    c += kQuantizedPanel;
  }
}

// Sums number `done` of a block: those of its groups in order, of each the outputs of every pass.
template <bool Shares, int RowTiles, typename Scale, Offset Kind>
void scale_sums(const QuantizedLinearArgs& args, const Block& block, Range rows, int64_t done,
                GroupSums<RowTiles>& sums, float* c) {
  using S = Shape<RowTiles>;
  const PackedQuantized& packed = *args.packed;
  const int64_t index = done / S::kPasses, pass = done % S::kPasses;
  const int64_t shared = packed.shared_groups(), group = block.first_group + index;
  const bool first = index % shared == 0, last = (index + 1) % shared == 0;
  const Scale* scales = reinterpret_cast<const Scale*>(block.scales + packed.groups_bytes(index));
  const f16* super_scales = reinterpret_cast<const f16*>(
      block.begin + (packed.super_bytes != 0 ? packed.super_offset(index) : 0));
  for (int64_t begin = 0; begin < rows.size(); begin += kTileRows) {
    const int64_t num_rows = min_of(kTileRows, rows.size() - begin);
    const int32_t* factors =
        args.rows.factors + 2 * ((rows.begin + begin) * packed.num_groups + group * num_rows);
    add_group<Shares, S::kVectors, Scale, Kind>(
        packed.bits, factors, num_rows, scales + pass * S::kOutputs,
        super_scales + pass * S::kOutputs,
        sums.dots[done % 2] + begin * S::kOutputs, sums.part[pass] + begin * S::kOutputs, first,
        last, c + begin * kQuantizedPanel + pass * S::kOutputs);
  }
}

template <bool Shares, int RowTiles, typename Scale, Offset Kind>
void run_groups(const QuantizedLinearArgs& args, const Block& block, int64_t step_inputs,
                Range rows, float* c) {
  using S = Shape<RowTiles>;
  const int64_t size = block.num_inputs;
  const int64_t num_sums = block.num_groups * S::kPasses;
  GroupSums<RowTiles> sums;
  Fetch fetch = block.fetch;
  if (block.first_group == 0) memset(c, 0, rows.size() * kQuantizedPanel * sizeof(float));
  for (int64_t i = 0; i < num_sums; ++i) {
    const int64_t group = i / S::kPasses, pass = i % S::kPasses;
    const int64_t input = block.first_input + group * size;
    const uint8_t* quants = block.quants_of(group) + pass * S::kOutputs * kStepInputs;
    zero_sums();
    for (int64_t k = 0; k < size; k += step_inputs) {
      const Rows x = rows_at(args.rows, rows, input + k);
      bring(fetch);
      add_step<RowTiles>(x.first, x.second, quants + k * kQuantizedPanel);
    }
    if (i > 0) scale_sums<Shares, RowTiles, Scale, Kind>(args, block, rows, i - 1, sums, c);
    store_sums<RowTiles>(sums.dots[i % 2], S::kSumBytes);
  }
  scale_sums<Shares, RowTiles, Scale, Kind>(args, block, rows, num_sums - 1, sums, c);
}

template <Offset Kind>
struct OffsetKind {
  static constexpr Offset value = Kind;
};

template <bool Shares, int RowTiles>
void run_tile(const Problem& problem, const Block& block, Range rows, int32_t* c) {
  const QuantizedLinearArgs& args = *problem.args;
  const PackedQuantized& packed = *args.packed;
  if (packed.num_groups == 1) {
    for (int64_t pass = 0; pass < Shape<RowTiles>::kPasses; ++pass) {
      run_single<RowTiles>(args, block, pass, rows, c + pass * Shape<RowTiles>::kOutputs);
    }
    return;
  }
  const auto run = [&](auto scale, auto offset) {
    run_groups<Shares, RowTiles, decltype(scale), decltype(offset)::value>(
        args, block, problem.step_inputs, rows, reinterpret_cast<float*>(c));
  };
  const auto run_scales = [&](auto offset) {
    if (packed.super_bytes != 0) {
      run(int8_t{}, offset);
    } else {
      packed.half_scales ? run(f16{}, offset) : run(float{}, offset);
    }
  };
  if (packed.has_minimums) {
    run_scales(OffsetKind<kMinimums>{});
  } else if (packed.has_zeros) {
    run_scales(OffsetKind<kZeros>{});
  } else {
    run_scales(OffsetKind<kMiddle>{});
  }
}

// Outputs of a panel; `out` is the first of them, and `out_stride` from a row to the next.
template <typename T>
void emit(const QuantizedLinearArgs& args, Range rows, int64_t panel, const int32_t* c, T* out,
          int64_t out_stride) {
  const PackedQuantized& packed = *args.packed;
  const int64_t first = panel * kQuantizedPanel;
  const int64_t n = min_of(kQuantizedPanel, packed.n - first);
  const int32_t* factors = args.rows.factors + 2 * rows.begin * packed.num_groups;
  const int64_t num_first = min_of(kTileRows, rows.size()), num_second = rows.size() - num_first;
  for (int64_t row = 0; row < rows.size(); ++row, c += kQuantizedPanel, out += out_stride) {
    if (packed.num_groups == 1) {
      const bool second = row >= num_first;
      const int32_t* factor = factors + (second ? row + num_first : row);
      emit_single(packed, bit_cast<float>(factor[0]), factor[second ? num_second : num_first], c,
                  {first, first + n}, out);
    } else {
      emit_groups(packed, reinterpret_cast<const float*>(c), first, n, out);
    }
  }
}

// What follows a panel's block: the next panel's, the first panel's next block, or another item's.
const uint8_t* following(const Problem& problem, Range panels, int64_t panel, int64_t index) {
  if (panel + 1 < panels.end) return block_at(problem, panel + 1, index);
  if (index + 1 < problem.num_blocks) return block_at(problem, panels.begin, index + 1);
  return block_at(problem, min_of(panels.end, problem.args->packed->num_panels - 1), 0);
}

// The outputs of some panels for some tiles of rows; `out` is the first of them, and `out_stride`
// from a row to the next.
template <bool Shares, typename T>
void run_panels(const Problem& problem, Range panels, Range tiles, T* out, int64_t out_stride) {
  const QuantizedLinearArgs& args = *problem.args;
  alignas(64) int32_t c[kItemPanels * kPanelSums];  // or float
  alignas(64) uint8_t unpacked[kUnpackedBytes];
  Configured configured;
  for (int64_t index = 0; index < problem.num_blocks; ++index) {
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      Block block = unpack_block(problem, panel, index, unpacked);
      const int64_t passes = Shape<2>::kPasses * tiles.size();
      block.fetch = {following(problem, panels, panel, index),
                     div_up(kStepLines * problem.step_inputs / kTileInputs *
                                problem.stored->held_bits / 8, passes)};
      for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const Range rows = {tile * kMostRows, min_of(args.num_tokens, (tile + 1) * kMostRows)};
        // With one block sums are read at once, and all tiles can use the same memory.
        int32_t* sums = c;
        if (problem.num_blocks > 1) {
          sums += (panel - panels.begin) * kPanelSums +
                  (tile - tiles.begin) * kMostRows * kQuantizedPanel;
        }
        configured.set(rows.size(), problem.step_inputs);
        rows.size() > kTileRows ? run_tile<Shares, 2>(problem, block, rows, sums)
                                : run_tile<Shares, 1>(problem, block, rows, sums);
        if (index + 1 < problem.num_blocks) continue;
        const int64_t row = (tile - tiles.begin) * kMostRows;
        emit(args, rows, panel, sums,
             out + row * out_stride + (panel - panels.begin) * kQuantizedPanel, out_stride);
      }
    }
  }
  release_tiles();
}

// Up to a step of a row's inputs from `x` on; returns the sums of the quants by lane.
template <typename T>
QS_INLINE vi quantize_step(const T* x, int64_t n, float inverse, int8_t* quants) {
  vi total = {};
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTileInputs; i += W) {
    if (i >= n) break;
    const vi rounded = rounded_quants(x + i, n - i, inverse);
    total += rounded;
    const __m128i narrow = _mm512_cvtepi32_epi8(bit_cast<__m512i>(rounded));
    memcpy(quants + i, &narrow, sizeof(narrow));
  }
  return total;
}

// One group of a row; a tile's step has 64 inputs of each of `num_rows` rows.
template <typename T>
QS_INLINE int32_t quantize_row(const T* x, Range inputs, float inverse, int64_t num_rows,
                               int8_t* quants) {
  vi total = {};
  for (int64_t i = inputs.begin; i < inputs.end;) {
    const int64_t step = i / kTileInputs * kTileInputs;
    const int64_t n = min_of(inputs.end, step + kTileInputs) - i;
    int8_t* to = quants + step * num_rows + (i - step);
    if (inverse == 0.0f) {
      memset(to, 0, div_up(n, W) * W);
    } else if (n == kTileInputs) {  // a constant: without branches
      total += quantize_step(x + i, kTileInputs, inverse, to);
    } else {
      total += quantize_step(x + i, n, inverse, to);
    }
    i += n;
  }
  return reduce_add(total);
}

// Some rows of a tile.
template <typename T>
void quantize_rows_of_tile(const QuantizedLinearArgs& args, Range tile, Range of_tile) {
  const PackedQuantized& packed = *args.packed;
  const QuantizedRows& rows = args.rows;
  const int64_t shared = packed.shared_groups();
  const int64_t written = div_up(packed.k, W) * W;  // beyond it come zeros
  for (int64_t row = of_tile.begin; row < of_tile.end; ++row) {
    const T* x = static_cast<const T*>(args.x) + (tile.begin + row) * args.x_stride;
    int8_t* quants = rows.quants + tile.begin * rows.stride + row * kTileInputs;
    int32_t* factor = rows.factors + 2 * tile.begin * packed.num_groups + row;
    Scaling scaling = {};
    for (int64_t group = 0; group < packed.num_groups; ++group) {
      const int64_t first = group * packed.group_size;
      const int64_t size = min_of(packed.group_size, packed.k - first);
      if (group % shared == 0) scaling = scaling_of(x + first, size * shared);
      const int32_t sum =
          quantize_row(x, {first, first + size}, scaling.inverse, tile.size(), quants);
      factor[0] = bit_cast<int32_t>(scaling.scale * packed.scale_unit());
      factor[tile.size()] = -(sum << (packed.bits - 1));
      factor += 2 * tile.size();
    }
    memset(quants + written / kTileInputs * kTileInputs * tile.size() + written % kTileInputs, 0,
           rows.stride - written);
  }
}

void quantize_tiles(Pool* pool, const QuantizedLinearArgs& args) {
  const int64_t num_items = div_up(args.num_tokens, kRowsQuantized);
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_items, [&](int64_t item) {
      const int64_t begin = item * kRowsQuantized, first = begin / kTileRows * kTileRows;
      const Range tile = {first, min_of(args.num_tokens, first + kTileRows)};
      const int64_t end = min_of(tile.end, begin + kRowsQuantized);
      quantize_rows_of_tile<T>(args, tile, {begin - first, end - first});
    });
  });
}

Problem problem_of(const QuantizedLinearArgs& args, const PackedQuantized& stored) {
  const PackedQuantized& packed = *args.packed;
  Problem problem = {};
  problem.stored = &stored;
  problem.args = &args;
  const int64_t size = packed.group_size, shared = packed.shared_groups();
  if (packed.num_groups == 1) {
    problem.block_groups = 1;
    problem.block_inputs = kTileBlockInputs;
    problem.num_blocks = div_up(size, kTileBlockInputs);
    problem.step_inputs = kTileInputs;
  } else {
    problem.block_groups = kTileBlockInputs / (size * shared) * shared;
    problem.block_inputs = problem.block_groups * size;
    problem.num_blocks = div_up(packed.num_groups, problem.block_groups);
    problem.step_inputs = size % 64 == 0 ? 64 : size % 32 == 0 ? 32 : 16;
  }
  return problem;
}

template <typename T>
void run_panels(const Problem& problem, Range panels, Range tiles, T* out, int64_t out_stride) {
  problem.args->packed->bits == 4 ? run_panels<true>(problem, panels, tiles, out, out_stride)
                                  : run_panels<false>(problem, panels, tiles, out, out_stride);
}

}  // namespace

void quantized_linear_tiles(Pool* pool, const QuantizedLinearArgs& args,
                            const PackedQuantized& stored) {
  if (!args.quantized) quantize_tiles(pool, args);
  const Problem problem = problem_of(args, stored);
  const int64_t out_stride = args.out_stride, num_panels = args.packed->num_panels;
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_items(pool, args.num_tokens, num_panels, kItemPanels, [&](Range panels, Range tiles) {
      T* out = static_cast<T*>(args.out) + tiles.begin * kMostRows * out_stride;
      run_panels(problem, panels, tiles, out + panels.begin * kQuantizedPanel, out_stride);
    });
  });
}

void gated_quantized_tiles(Pool* pool, const QuantizedLinearArgs& args,
                           const PackedQuantized& stored, int activation) {
  quantize_tiles(pool, args);
  const Problem problem = problem_of(args, stored);
  const int64_t num_panels = args.packed->num_panels / 2;
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_items(pool, args.num_tokens, num_panels, kItemPanels / 2, [&](Range gates, Range tiles) {
      alignas(64) T halves[kItemPanels * kPanelSums];
      activate_item<kQuantizedPanel>(activation, args.num_tokens, num_panels, gates, tiles, halves,
                                     args.out, [&](Range panels, T* out, int64_t out_stride) {
                                       run_panels(problem, panels, tiles, out, out_stride);
                                     });
    });
  });
}

}  // namespace qs::QS_LEVEL

#endif
