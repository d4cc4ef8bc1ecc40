// Weights of 4 or 8 bits as the low-bit kernels read them.
//
// Outputs go in panels of 64, a panel's inputs in steps of 4: what one integer dot product takes.
//
//   8 bits   step   [64][4] codes, 256 bytes
//   4 bits   pair   [64][4] bytes, the first step's codes below, the next one's above; 256 bytes
//
// A panel is one stream of memory. With one scale per output, scales and zeros stand apart; with
// groups they follow the codes of their group, so that they are read with them:
//
//   panel    group 0: steps | scales [64] | zeros [64] (if any), group 1: ...
//
// Zeros are held less 2^(bits - 1): 0 is symmetric. Scales and zeros of groups are f16 where that
// loses nothing, else f32.
//
// Codes of 4 bits may have multipliers: 16 inputs each, odd, from -15 to 15, held as (m + 15) / 2.
// They stand before the codes that they belong to, 32 inputs at a time:
//
//   piece    multipliers [64], a byte: inputs 0 to 15 below, 16 to 31 above; 4 pairs of codes
//   group    pieces | scales [64]
//
// Their scales are held times 16, what float16 has room for then being that of scales without. A
// weight is scale * m * (code - 8), and m * (code - 8) fits 8 bits: products run over that, as
// those of an 8-bit weight with the same groups (`opened_form`), bit for bit.
#pragma once

#include "kernels/kernels.h"

namespace qs {

constexpr int64_t kQuantizedPanel = 64;
constexpr int64_t kStepInputs = 4;
constexpr int64_t kSharedInputs = 128;
constexpr int64_t kStepBytes = kQuantizedPanel * kStepInputs;
constexpr int64_t kMultiplierInputs = 16;
constexpr int64_t kPieceInputs = 2 * kMultiplierInputs;
constexpr int64_t kPieceBytes = kQuantizedPanel + kPieceInputs / 2 * kQuantizedPanel;
constexpr int kLargestMultiplier = 15;
constexpr float kMultiplierUnit = 16.0f;

// From so many rows on codes with multipliers are opened once for all rows.
constexpr int64_t kOpenedRows = 13;

struct PackedQuantized {
  int bits;
  int64_t n, k;
  int64_t num_panels;
  int64_t panel_bytes;
  int64_t group_size;   // inputs; k, padded, for one group
  int64_t num_groups;   // 1: one scale per output
  int64_t group_bytes;  // codes, scales and zeros; panel_bytes for one group
  bool half_scales;     // f16, with groups
  bool has_zeros;
  bool has_multipliers;  // with them a group is whole pieces
  bool scaled_up;        // scales are held times kMultiplierUnit
  void* weights;
  float* scales;  // one group: [num_panels * 64]
  float* zeros;   // one group, null for symmetric
  float* bias;    // null for none

  // Of a group's codes, with their multipliers.
  int64_t code_bytes() const {
    if (has_multipliers) return group_size / kPieceInputs * kPieceBytes;
    return group_size * kQuantizedPanel * bits / 8;
  }
  // What is multiplied with scales as they are held.
  float scale_unit() const { return scaled_up ? 1.0f / kMultiplierUnit : 1.0f; }
  int64_t scale_bytes() const { return half_scales ? 2 : 4; }

  // Groups in a row that share a scale of activations: of 4 bits up to 128 inputs, else one.
  int64_t shared_groups() const {
    if (bits == 8 || has_multipliers) return 1;
    int64_t shared = 1;
    while (2 * shared * group_size <= kSharedInputs && num_groups % (2 * shared) == 0) shared *= 2;
    return shared;
  }
};

// The layout of a weight with multipliers once they are multiplied in: 8 bits, without memory.
inline PackedQuantized opened_form(const PackedQuantized& packed) {
  PackedQuantized opened = packed;
  opened.bits = 8;
  opened.has_multipliers = false;
  opened.weights = nullptr;
  opened.group_bytes = opened.code_bytes() + packed.scale_bytes() * kQuantizedPanel;
  opened.panel_bytes = opened.group_bytes * packed.num_groups;
  return opened;
}

// Activations as the kernels read them: codes in [-127, 127], per token and group their scale (the
// same in groups that share it) and correction: -2^(bits - 1) times the sum of the codes, what the
// weight's codes count too much. Tokens go in tiles of R rows, side by side: what a register tile
// reads is one stream.
//
//   codes     a tile  [stride / 4][R][4]
//   factors   a tile  [num_groups][2][R]: float scales, int32 corrections
//   parts     a tile  [stride / 16][R]: -8 times the sum of 16 inputs' codes
//
// Parts are there for codes with multipliers that are not opened, see quantized_direct.h.
struct QuantizedRows {
  int8_t* codes;
  int32_t* factors;
  int32_t* parts;
  int64_t stride;  // bytes a token, a multiple of 64, zeros behind the last input
  int64_t num_groups;
};

struct QuantizeArgs {
  int dtype;
  int bits;
  bool searches;  // groups, each with the best of a few scales
  int64_t n, k, row_stride, group_size;
  const void* weight;
  uint8_t* codes;
  float* scales;
  float* zeros;         // null for symmetric
  int8_t* multipliers;  // [n, k / 16], or null: codes without
};

struct PackQuantizedArgs {
  const uint8_t* codes;  // [n, k]
  const float* scales;   // [n, num_groups]
  const float* zeros;    // [n, num_groups] or null
  const int8_t* multipliers;  // [n, k / 16] or null
  const PackedQuantized* packed;
};

struct QuantizedLinearArgs {
  const PackedQuantized* packed;
  int dtype;
  const void* x;
  int64_t x_stride;
  int64_t num_tokens;
  void* out;
  QuantizedRows rows;  // scratch
};

}  // namespace qs
