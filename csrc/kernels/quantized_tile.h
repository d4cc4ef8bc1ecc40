// The shapes of the low-bit linear's register tiles, and the functions that compute them
// (quantized_tiles.cpp). Levels that have the same integer products have the same functions: those of
// QS_TILES.
#pragma once

#include "kernels/quantized_dot.h"

namespace qs {

constexpr int64_t kCacheLine = 64;

struct QuantizedTileArgs {
  const int8_t* x;         // [steps][R][4], from the block's first step on
  const int32_t* factors;  // [groups][2][R]: scales, corrections; from the block's first group on
  const int32_t* parts;    // with sub-block scales, see QuantizedRows; from the block's first
  const uint8_t* w;        // the block's quants in the first panel, at the tile's part
  int64_t panel_bytes;
  int64_t group_bytes;
  int64_t quant_bytes;      // of a group in a panel
  int64_t part_outputs;    // outputs of the panel before the tile's part
  int64_t num_inputs;      // of a group, or of the block within the one group; padded
  int64_t num_groups;      // of the block
  int64_t shared_groups;   // groups with one scale of activations, in a row
  int64_t super_groups;    // groups of a super-block, a power of two
  int64_t super_bytes;     // of its own scales, which precede them
  const uint8_t* levels;   // of the weight
  bool first;              // the first block: c is written, afterwards added to
  void* c;                 // [R][S][64] int32 sums with one group, fp32 sums with groups
  const char* fetch;       // what to bring into L2 meanwhile
  int fetch_lines;         // cache lines a step
  int64_t fetch_stride;    // from a step to the next; 0 fetches nothing more
  int64_t fetch_scales;    // from the end of a group's steps to the next group
};

using QuantizedTileFn = void (*)(const QuantizedTileArgs& args);

}  // namespace qs

namespace qs::QS_TILES {

// The tile of a weight for so many rows and panels, up to the largest ones below.
QuantizedTileFn quantized_tile(const PackedQuantized& packed, int rows, int panels);
// The same for quants with sub-block scales, which are read in place.
QuantizedTileFn direct_tile(const PackedQuantized& packed, int rows, int panels);

}  // namespace qs::QS_TILES

namespace qs::QS_LEVEL {

using QS_TILES::direct_tile;
using QS_TILES::quantized_tile;

// Vectors of a tile in a panel. With AVX2 they are a complete panel: a part of it would be a part of each
// step, and memory that is read in pieces of 128 bytes was half as fast on Zen 3 as in complete lines one
// after the other. Sums for which there are no registers cost less. Tiles of several panels loop over
// them there, since addresses of each would be spilled too.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kTileVectors = 8;
constexpr int kUnrolledPanels = 1;
#else
constexpr int kTileVectors = 4;
constexpr int kUnrolledPanels = 4;
#endif
constexpr int kPanelParts = kQuantizedPanel / (kTileVectors * W);
constexpr int64_t kPartBytes = kStepBytes / kPanelParts;
constexpr int kManyRows = 24;  // from here on a tile of fewer rows pays
#if defined(__AVX512F__)
constexpr int kQuantizedRows = 6;
constexpr int kGroupRows4 = 3;
constexpr int kGroupRows8 = 4;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kQuantizedRows = 6;
constexpr int kGroupRows4 = 3;
constexpr int kGroupRows8 = 6;
#else
constexpr int kQuantizedRows = 2;
constexpr int kGroupRows4 = 2;
constexpr int kGroupRows8 = 2;
#endif

// Of quants with sub-block scales that are read in place: rows of a tile, and up to how many the
// scales multiply sums of 16 inputs instead of quants.
#if defined(__AVX512F__)
constexpr int kDirectRows = 12;
constexpr int kPartRows = 6;
#else
constexpr int kDirectRows = kQuantizedRows;
constexpr int kPartRows = 2;
#endif

// Rows of a tile. For groups fewer: their fp32 sums stay in registers then, or most of them. On
// Zen 4 a store replaces a product, and 4 bits have groups of 32 where 8 have 128.
QS_INLINE int max_quantized_rows(const PackedQuantized& packed, int64_t num_tokens) {
  if (packed.num_groups == 1 || num_tokens <= kQuantizedRows) return kQuantizedRows;
  if (packed.bits == 4) return kGroupRows4;
  return num_tokens >= kManyRows ? kGroupRows8 : kQuantizedRows;
}

// Panels that a tile of `rows` runs at once: several streams of memory. With AVX-512 a row of 6 bits runs
// two in place of four: sums of groups and of outputs fit the registers, which is 1.25 to 1.4 times as
// fast for groups of 16 on Zen 4.
constexpr int max_quantized_panels(int held_bits, int rows) {
  if (kPanelParts > 1) return 1;
  if (rows == 1) return W == 16 && held_bits == 6 ? 2 : 4;
  return rows <= 3 ? 2 : 1;
}

// More rows have fewer outputs at once: no more sums, and quants are unpacked once for all rows.
constexpr int direct_vectors(int rows) {
  return rows > kQuantizedRows ? kTileVectors / 2 : kTileVectors;
}

static_assert(direct_vectors(kPartRows) == kTileVectors);

constexpr int max_direct_panels(int rows) {
  return kPanelParts > 1 ? 1 : rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

}  // namespace qs::QS_LEVEL
