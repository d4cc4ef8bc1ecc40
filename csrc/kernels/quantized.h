// Weights of 4, 6 or 8 bits as the low-bit kernels read them. Quants are their quantized values.
//
// Outputs go in panels of 64, a panel's inputs in steps of 4: the inputs of one integer dot
// product.
//
//   8 bits   step   [64][4] quants, 256 bytes
//   4 bits   pair   [64][4] bytes, the first step's quants below, the next one's above; 256 bytes
//   6 bits   four   3 x [64][4] bytes: the quants of a step in the lower 6 bits of each, and those of
//                   a fourth step in the upper 2 bits of all three, its lowest bits first; 768 bytes
//
// Four steps of 6 bits take one operation each for three of them, and six for the fourth: fewer than
// a plane of 4 bits and one of 2. Weights of 6 bits have no zeros; quants of 5 bits are held so too.
//
// Quants of 6 or 8 bits that have no more than 16 values may be held in 4 bits: the number of each in
// the weight's `levels`, which are looked up in registers. Products run over the quants themselves, so
// they have the bits of the same weight without levels. Such a weight has no zeros.
//
// A panel is one stream of memory. With one scale per output, scales and zeros are separate; with
// groups they follow the quants of their group, so that they are read with them:
//
//   panel    group 0: steps | scales [64] | zeros [64] (if any), group 1: ...
//
// Zeros are held less 2^(bits - 1): 0 is symmetric. In their place there may be minimums, and a
// weight is scale * quant + minimum. Scales, zeros and minimums of groups are f16 where that loses
// nothing, else f32.
//
// Those of K types are products of two, and are held as two: a group has bytes, and 256 inputs have
// super-block scales in f16, which precede their groups. A scale is (its super-block's scale) * byte,
// a minimum likewise; both are exact in f32, so nothing that reads them differs from f32.
//
//   super-block   super-scales [64] | super-minimums [64] (if any) | its 8 or 16 groups:
//   group         steps | scales [64] | minimums [64] (if any), a signed byte each
//
// Quants of 4 bits may have sub-block scales: 16 inputs each, odd, from -15 to 15, held as (m + 15)
// / 2. They precede the quants that they belong to, 32 inputs at a time:
//
//   piece    sub-block scales [64], a byte: inputs 0 to 15 below, 16 to 31 above; 4 pairs of quants
//   group    pieces | scales [64]
//
// Their scales are stored times 16, so that float16 holds the same range as without them. A
// weight is scale * m * (quant - 8), and m * (quant - 8) fits 8 bits: products run over that, as
// those of an 8-bit weight with the same groups (`unpacked_form`), bit for bit.
#pragma once

#include "kernels/kernels.h"

namespace qs {

constexpr int64_t kQuantizedPanel = 64;
constexpr int64_t kStepInputs = 4;
constexpr int64_t kSharedInputs = 128;
constexpr int64_t kStepBytes = kQuantizedPanel * kStepInputs;
constexpr int64_t kSubBlockInputs = 16;
constexpr int64_t kPieceInputs = 2 * kSubBlockInputs;
constexpr int64_t kPieceBytes = kQuantizedPanel + kPieceInputs / 2 * kQuantizedPanel;
constexpr int kLargestSubScale = 15;
constexpr float kSubScaleUnit = 16.0f;
constexpr int64_t kSuperInputs = 256;
constexpr int kNumLevels = 16;

// Inputs whose quants are in the same bytes, and those bytes in a panel; `bits` as they are held.
constexpr int64_t packed_inputs(int bits) {
  return bits == 4 ? 2 * kStepInputs : bits == 6 ? 4 * kStepInputs : kStepInputs;
}
constexpr int64_t packed_bytes(int bits) {
  return packed_inputs(bits) * kQuantizedPanel * bits / 8;
}

// From so many tiles of rows on the scales of groups are multiplied once for all of them.
constexpr int64_t kUnpackedTiles = 4;

// From so many rows on quants with sub-block scales are unpacked once for all rows.
constexpr int64_t kUnpackedRows = 13;

struct PackedQuantized {
  int bits;       // of a quant
  int held_bits;  // of a quant in memory: as many, 4 with levels, 8 once they are unpacked
  bool unpacked;  // quants are bytes in the form in which products take them, see `Dot::flipped`
  int64_t n, k;
  int64_t num_panels;
  int64_t panel_bytes;
  int64_t group_size;   // inputs; k, padded, for one group
  int64_t num_groups;   // 1: one scale per output
  int64_t group_bytes;  // quants, scales and zeros; panel_bytes for one group
  bool half_scales;     // f16, with groups
  bool has_zeros;
  bool has_minimums;    // in place of zeros
  bool has_sub_scales;  // with them a group is complete pieces
  bool scaled_up;       // scales are held times kSubScaleUnit
  int64_t super_bytes;  // of a super-block's own scales and minimums; 0 without super-blocks
  uint8_t levels[kNumLevels];  // quants, if `has_levels`
  void* weights;
  float* scales;  // one group: [num_panels * 64]
  float* zeros;   // or minimums; one group, null for symmetric
  float* bias;    // null for none

  bool has_levels() const { return held_bits < bits; }
  // Of a group's quants, with their sub-block scales.
  int64_t quant_bytes() const {
    if (has_sub_scales) return group_size / kPieceInputs * kPieceBytes;
    return group_size * kQuantizedPanel * held_bits / 8;
  }
  // What is multiplied with scales as they are held.
  float scale_unit() const { return scaled_up ? 1.0f / kSubScaleUnit : 1.0f; }
  int64_t scale_bytes() const { return super_bytes != 0 ? 1 : half_scales ? 2 : 4; }
  // Of so many groups from the first of a panel on, or of a super-block, if they are complete ones.
  int64_t groups_bytes(int64_t count) const {
    return count * group_bytes + count * group_size / kSuperInputs * super_bytes;
  }
  // From the beginning of a panel, or of a block of its groups, to the quants of a group.
  int64_t group_offset(int64_t group) const { return groups_bytes(group) + super_bytes; }
  // To the scales of the super-block that a group belongs to.
  int64_t super_offset(int64_t group) const {
    return groups_bytes(group - group % super_groups());
  }
  int64_t super_groups() const { return kSuperInputs / group_size; }
  // What zeros are held less.
  float middle() const { return has_minimums ? 0.0f : static_cast<float>(1 << (bits - 1)); }

  // Groups in a row that share a scale of activations: of 4 bits up to 128 inputs, else one.
  int64_t shared_groups() const {
    if (bits != 4 || has_sub_scales) return 1;
    int64_t shared = 1;
    while (2 * shared * group_size <= kSharedInputs && num_groups % (2 * shared) == 0) shared *= 2;
    return shared;
  }
};

// The layout of a weight once its quants have a byte each where they had 6 bits or levels, and its
// scales are multiplied: those of sub-blocks with quants, to 8 bits; those of super-blocks with the
// scales and minimums of groups, to f32. Without memory.
inline PackedQuantized unpacked_form(const PackedQuantized& packed) {
  PackedQuantized unpacked = packed;
  if (packed.has_sub_scales) unpacked.bits = 8;
  if (unpacked.bits != 4) {
    unpacked.held_bits = 8;
    unpacked.unpacked = true;
  }
  unpacked.has_sub_scales = false;
  unpacked.super_bytes = 0;
  unpacked.weights = nullptr;
  const int64_t per_scale = unpacked.scale_bytes() * (packed.has_zeros ? 2 : 1);
  unpacked.group_bytes = unpacked.quant_bytes() + per_scale * kQuantizedPanel;
  unpacked.panel_bytes = unpacked.group_bytes * packed.num_groups;
  return unpacked;
}

// Whether products with both weights read the same quantized activations, for any number of tokens.
inline bool same_activations(const PackedQuantized& a, const PackedQuantized& b) {
  return a.bits == b.bits && a.k == b.k && a.num_groups == b.num_groups &&
         a.has_sub_scales == b.has_sub_scales;
}

// Activations as the kernels read them: quants in [-127, 127], per token and group their scale (the
// same in groups that share it) and correction: -2^(bits - 1) times the sum of the quants, what the
// weight's quants count too much. Tokens go in tiles of R rows, side by side: what a register tile
// reads is one stream.
//
//   quants    a tile  [stride / 4][R][4]
//   factors   a tile  [num_groups][2][R]: float scales, int32 corrections
//   parts     a tile  [stride / 16][R]: -8 times the sum of 16 inputs' quants
//
// Parts are there for quants with sub-block scales that are not unpacked, see quantized_direct.h.
struct QuantizedRows {
  int8_t* quants;
  int32_t* factors;
  int32_t* parts;
  int64_t stride;  // bytes a token, a multiple of 64, zeros after the last input
  int64_t num_groups;
};

struct QuantizeArgs {
  int dtype;
  int bits;
  bool searches;  // groups, each with the best of a few scales
  int64_t n, k, row_stride, group_size;
  const void* weight;
  uint8_t* quants;
  float* scales;
  float* zeros;        // null for symmetric
  int8_t* sub_scales;  // [n, k / 16], or null: quants without
};

// The scales and minimums of super-blocks and of their groups.
struct SuperScales {
  int8_t* scales;            // [n, num_groups]
  int8_t* minimums;          // the same
  uint16_t* super_scales;    // [n, k / 256] f16
  uint16_t* super_minimums;  // the same
};

struct PackQuantizedArgs {
  const uint8_t* quants;  // [n, k]
  const float* scales;   // [n, num_groups]
  const float* zeros;    // [n, num_groups] or null; minimums if the layout has these
  const int8_t* sub_scales;  // [n, k / 16] or null
  const PackedQuantized* packed;
  SuperScales super;  // in place of `scales` and `zeros`, if the layout has super-blocks
};

struct QuantizedLinearArgs {
  const PackedQuantized* packed;
  int dtype;
  const void* x;
  int64_t x_stride;
  int64_t num_tokens;
  void* out;
  int64_t out_stride;  // elements from a row of outputs to the next
  QuantizedRows rows;  // scratch
  bool quantized;      // `rows` has the activations already, of a product that `same_activations`
};

}  // namespace qs
