// Up to 16 rows by a panel of 64 outputs in 4 tiles of sums; a step has 64 inputs: one tile of
// activations and 4 tiles of the panel's quants ([16][16][4] of [16][64][4]), in place. Quants
// of 4 bits are unpacked once for all rows of an item.
//
//   item = (chunk of <= 128 rows) x (one panel)
//     for each block of inputs     its quants: <= 32 KiB, a byte each
//       for each 16 rows           sums in tiles, then in `c` (32 KiB)

#include "kernels/amx_quantized.h"

#if defined(__AMX_INT8__)

#include "kernels/amx_tiles.h"
#include "kernels/entries.h"
#include "kernels/quantized_unpack.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 64;
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kChunkRows = 128;
// Quants of a block and the scales of its groups, the smallest of which have a piece.
constexpr int64_t kUnpackedBytes =
    kQuantizedPanel * kTileBlockInputs + kTileBlockInputs / kPieceInputs * kQuantizedPanel * 4;
constexpr int64_t kDotBytes = kQuantizedPanel * 4;
static_assert(W == kTileOutputs);

// Tiles 0 to 3 are sums, 4 is activations, 5 to 7 are quants of `inputs` inputs.
void set_shapes(int64_t rows, int64_t inputs) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = tile == 4 ? inputs : 4 * kTileOutputs;
    shapes.rows[tile] = tile <= 4 ? rows : inputs / kStepInputs;
  }
  set_shapes(shapes);
}

// Adds `count` times `inputs` inputs of every row against those of every output.
void add_products(const int8_t* x, int64_t x_stride, const uint8_t* quants, int64_t inputs,
                  int64_t count) {
  for (int64_t i = 0; i < count; ++i, x += inputs, quants += inputs * kQuantizedPanel) {
    load_tile<4>(x, x_stride);
    load_tile<5>(quants, kStepBytes);
    add_signed_by_unsigned<0, 4, 5>();
    load_tile<6>(quants + 64, kStepBytes);
    add_signed_by_unsigned<1, 4, 6>();
    load_tile<7>(quants + 128, kStepBytes);
    add_signed_by_unsigned<2, 4, 7>();
    load_tile<5>(quants + 192, kStepBytes);
    add_signed_by_unsigned<3, 4, 5>();
  }
}

void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
}

void load_sums(const int32_t* from) {
  load_tile<0>(from, kDotBytes);
  load_tile<1>(from + 16, kDotBytes);
  load_tile<2>(from + 32, kDotBytes);
  load_tile<3>(from + 48, kDotBytes);
}

void store_sums(int32_t* to) {
  store_tile<0>(to, kDotBytes);
  store_tile<1>(to + 16, kDotBytes);
  store_tile<2>(to + 32, kDotBytes);
  store_tile<3>(to + 48, kDotBytes);
}

struct Problem {
  const QuantizedLinearArgs* args;
  const PackedQuantized* stored;
  int64_t num_chunks;
  int64_t block_groups;  // groups, or parts of the one group, per block
  int64_t block_inputs;
  int64_t num_blocks;
};

// A block of a panel: its quants a byte each, and what belongs to them.
struct Block {
  const uint8_t* quants;
  int64_t group_stride;  // bytes from the quants of one group to the next
  const uint8_t* scales;  // of its first group
  int64_t first_group, num_groups;
  int64_t first_input, num_inputs;  // inputs of a group, or of the block within the one group
};

void unpack_quants(const uint8_t* from, int64_t num_inputs, uint8_t* unpacked) {
  for (int64_t pair = 0; pair < num_inputs / (2 * kStepInputs); ++pair) {
    for (int64_t i = 0; i < kStepBytes; i += sizeof(vquants)) {
      const vquants both = load_quants(from + i);
      const vquants low = step_quants<4, 0>(both), high = step_quants<4, 1>(both);
      memcpy(unpacked + i, &low, sizeof(low));
      memcpy(unpacked + kStepBytes + i, &high, sizeof(high));
    }
    from += kStepBytes;
    unpacked += 2 * kStepBytes;
  }
}

Block unpack_block(const Problem& problem, int64_t panel, int64_t index, uint8_t* unpacked) {
  const PackedQuantized& packed = *problem.stored;
  const uint8_t* weights =
      static_cast<const uint8_t*>(packed.weights) + panel * packed.panel_bytes;
  Block block = {};
  block.first_input = index * problem.block_inputs;
  if (packed.num_groups == 1) {
    block.num_groups = 1;
    block.num_inputs = min_of(problem.block_inputs, packed.group_size - block.first_input);
    block.quants = weights + block.first_input * kQuantizedPanel * packed.bits / 8;
  } else {
    block.first_group = index * problem.block_groups;
    block.num_groups = min_of(problem.block_groups, packed.num_groups - block.first_group);
    block.num_inputs = packed.group_size;
    block.quants = weights + block.first_group * packed.group_bytes;
    block.scales = block.quants + packed.quant_bytes();
  }
  block.group_stride = packed.group_bytes;
  if (packed.has_sub_scales) {
    const PackedQuantized& form = *problem.args->packed;
    for (int64_t group = 0; group < block.num_groups; ++group) {
      unpack_group(packed, block.quants + group * block.group_stride,
                 unpacked + group * form.group_bytes);
    }
    block.quants = unpacked;
    block.group_stride = form.group_bytes;
    block.scales = unpacked + form.quant_bytes();
  } else if (packed.bits == 4) {
    const int64_t bytes = block.num_inputs * kQuantizedPanel;
    for (int64_t group = 0; group < block.num_groups; ++group) {
      unpack_quants(block.quants + group * block.group_stride, block.num_inputs,
                 unpacked + group * bytes);
    }
    block.quants = unpacked;
    block.group_stride = bytes;
  }
  return block;
}

// The one group's part: sums go on in `c`, whose first block starts them.
void run_single(const QuantizedRows& x, const Block& block, Range rows, int32_t* c) {
  const int8_t* quants = x.quants + rows.begin * x.stride + block.first_input;
  const int64_t whole = block.num_inputs / kTileInputs;
  const int64_t rest = block.num_inputs % kTileInputs;
  if (whole > 0) {
    set_shapes(rows.size(), kTileInputs);
    load_sums(c);
    add_products(quants, x.stride, block.quants, kTileInputs, whole);
    store_sums(c);
  }
  if (rest > 0) {
    const int64_t done = whole * kTileInputs;
    set_shapes(rows.size(), rest);
    load_sums(c);
    add_products(quants + done, x.stride, block.quants + done * kQuantizedPanel, rest, 1);
    store_sums(c);
  }
}

// One group, as defined in `quantized_tile.h`. 8 bits: c = fma((dot - zero * sum) * x_scale, scale,
// c); of 4 bits the same without x_scale, which `add_part` multiplies with.
template <int Bits, typename Scale>
void add_group(const QuantizedRows& x, const Scale* scales, bool has_zeros, int64_t group,
               Range rows, const int32_t* dots, float* c) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int32_t* factor = x.factors + 2 * (row * x.num_groups + group);
    const float x_scale = bit_cast<float>(factor[0]);
    const int32_t correction = factor[1];
    for (int64_t i = 0; i < kQuantizedPanel; i += W, dots += W, c += W) {
      vi sum;
      memcpy(&sum, dots, sizeof(sum));
      vf dot = __builtin_convertvector(sum + set1i(correction), vf);
      if (has_zeros) {
        dot = fma(load(scales + kQuantizedPanel + i), negative_sum<Bits>(correction), dot);
      }
      if constexpr (Bits == 8) dot = dot * set1(x_scale);
      store(c, fma(dot, load(scales + i), load(c)));
    }
  }
}

// c = fma(part, x_scale, c), for the groups that share the scale of `group`.
void add_part(const QuantizedRows& x, int64_t group, Range rows, const float* part, float* c) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const vf x_scale = set1(bit_cast<float>(x.factors[2 * (row * x.num_groups + group)]));
    for (int64_t i = 0; i < kQuantizedPanel; i += W, part += W, c += W) {
      store(c, fma(load(part), x_scale, load(c)));
    }
  }
}

template <int Bits>
void run_groups(const QuantizedLinearArgs& args, const Block& block, Range rows, float* c) {
  const PackedQuantized& packed = *args.packed;
  const QuantizedRows& x = args.rows;
  const int64_t size = block.num_inputs;  // a multiple of 16
  const int64_t inputs = size % 64 == 0 ? 64 : size % 32 == 0 ? 32 : 16;
  const int64_t shared = packed.shared_groups();
  alignas(64) int32_t dots[kTileRows * kQuantizedPanel];
  alignas(64) float part[Bits == 4 ? kTileRows * kQuantizedPanel : 1];
  float* const to = Bits == 4 ? part : c;
  set_shapes(rows.size(), inputs);
  for (int64_t i = 0; i < block.num_groups; ++i) {
    const int64_t group = block.first_group + i;
    if (Bits == 4 && i % shared == 0) memset(part, 0, sizeof(part));
    zero_sums();
    add_products(x.quants + rows.begin * x.stride + group * size, x.stride,
                 block.quants + i * block.group_stride, inputs, size / inputs);
    store_sums(dots);
    const uint8_t* scales = block.scales + i * packed.group_bytes;
    if (packed.half_scales) {
      add_group<Bits>(x, reinterpret_cast<const f16*>(scales), packed.has_zeros, group, rows, dots,
                      to);
    } else {
      add_group<Bits>(x, reinterpret_cast<const float*>(scales), packed.has_zeros, group, rows,
                      dots, to);
    }
    if (Bits == 4 && (i + 1) % shared == 0) add_part(x, group, rows, part, c);
  }
}

template <typename T, int Bits>
void emit(const QuantizedLinearArgs& args, Range rows, int64_t panel, const void* c) {
  const PackedQuantized& packed = *args.packed;
  const int64_t first = panel * kQuantizedPanel;
  const int64_t num_outputs = min_of(kQuantizedPanel, packed.n - first);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t base = (row - rows.begin) * kQuantizedPanel;
    T* out = static_cast<T*>(args.out) + row * packed.n + first;
    for (int64_t i = 0; i < num_outputs; i += W) {
      vf sum = load(static_cast<const float*>(c) + base + i);
      if (packed.num_groups == 1) {
        const int32_t* factor = args.rows.factors + 2 * row;
        const int32_t correction = factor[1];
        const vi dot = bit_cast<vi>(sum) + set1i(correction);
        sum = __builtin_convertvector(dot, vf);
        if (packed.zeros != nullptr) {
          sum = fma(load(packed.zeros + first + i), negative_sum<Bits>(correction), sum);
        }
        sum = sum * set1(bit_cast<float>(factor[0])) * load(packed.scales + first + i);
      }
      if (packed.bias != nullptr) sum += load(packed.bias + first + i);
      store_up_to(out + i, sum, num_outputs - i);
    }
  }
}

template <int Bits>
void run_item(const Problem& problem, int64_t item) {
  const QuantizedLinearArgs& args = *problem.args;
  const int64_t panel = item / problem.num_chunks;
  const Range chunk = part(args.num_tokens, item % problem.num_chunks, problem.num_chunks);
  const int64_t num_tiles = div_up(chunk.size(), kTileRows);
  alignas(64) int32_t c[kChunkRows * kQuantizedPanel];  // or float, whose zero has the same bits
  alignas(64) uint8_t unpacked[kUnpackedBytes];
  memset(c, 0, chunk.size() * kQuantizedPanel * sizeof(*c));
  for (int64_t index = 0; index < problem.num_blocks; ++index) {
    const Block block = unpack_block(problem, panel, index, unpacked);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const Range local = part(chunk.size(), tile, num_tiles);
      const Range rows = {chunk.begin + local.begin, chunk.begin + local.end};
      int32_t* sums = c + local.begin * kQuantizedPanel;
      if (args.packed->num_groups == 1) {
        run_single(args.rows, block, rows, sums);
      } else {
        run_groups<Bits>(args, block, rows, reinterpret_cast<float*>(sums));
      }
    }
  }
  release_tiles();
  with_dtype(args.dtype, [&](auto type) { emit<decltype(type), Bits>(args, chunk, panel, c); });
}

}  // namespace

void quantized_linear_tiles(Pool* pool, const QuantizedLinearArgs& args,
                            const PackedQuantized& stored) {
  const PackedQuantized& packed = *args.packed;
  Problem problem;
  problem.stored = &stored;
  problem.args = &args;
  problem.num_chunks = div_up(args.num_tokens, kChunkRows);
  const int64_t shared = packed.shared_groups();
  problem.block_groups =
      packed.num_groups == 1 ? 1 : kTileBlockInputs / (packed.group_size * shared) * shared;
  problem.block_inputs =
      packed.num_groups == 1 ? kTileBlockInputs : problem.block_groups * packed.group_size;
  problem.num_blocks = packed.num_groups == 1 ? div_up(packed.group_size, kTileBlockInputs)
                                              : div_up(packed.num_groups, problem.block_groups);
  parallel_for(pool, packed.num_panels * problem.num_chunks, [&](int64_t item) {
    packed.bits == 4 ? run_item<4>(problem, item) : run_item<8>(problem, item);
  });
}

}  // namespace qs::QS_LEVEL

#endif
