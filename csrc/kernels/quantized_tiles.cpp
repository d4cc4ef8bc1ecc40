// All tiles of the low-bit linear: which function computes what a weight, rows and panels need.

#include "kernels/quantized_direct.h"

namespace qs::QS_LEVEL {

QuantizedTileFn quantized_tile(const PackedQuantized& packed, int rows, int panels) {
  static constexpr QuantizedTileTable<Held<4, 4>> four;
  static constexpr QuantizedTileTable<Held<4, 6>> six_in_four;
  static constexpr QuantizedTileTable<Held<4, 8>> eight_in_four;
  static constexpr QuantizedTileTable<Held<6, 6>> six;
  static constexpr QuantizedTileTable<Held<8, 8>> eight;
  static constexpr QuantizedTileTable<Held<8, 6, true>> six_unpacked;
  static constexpr QuantizedTileTable<Held<8, 8, Dot<8>::kFlip != 0>> eight_unpacked;
  int form = kSingle;
  if (packed.super_bytes != 0) {
    form = packed.has_minimums ? kMinimumsSuper : kGroupsSuper;
  } else if (packed.num_groups > 1) {
    form = packed.has_minimums ? kMinimumsF32 : packed.has_zeros ? kZerosF32 : kGroupsF32;
    form += packed.half_scales ? 1 : 0;
  }
  const auto& in_four = packed.bits == 4   ? four.entries
                        : packed.bits == 6 ? six_in_four.entries
                                           : eight_in_four.entries;
  const auto& unpacked = packed.bits == 6 ? six_unpacked.entries : eight_unpacked.entries;
  const auto& tiles = packed.unpacked         ? unpacked
                      : packed.held_bits == 4 ? in_four
                      : packed.held_bits == 6 ? six.entries
                                              : eight.entries;
  return tiles[form][rows - 1][panels - 1];
}

QuantizedTileFn direct_tile(const PackedQuantized& packed, int rows, int panels) {
  static constexpr DirectTileTable table;
  return table.entries[packed.half_scales ? 1 : 0][rows - 1][panels - 1];
}

}  // namespace qs::QS_LEVEL
