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
#pragma once

#include "kernels/kernels.h"

namespace qs {

constexpr int64_t kQuantizedPanel = 64;
constexpr int64_t kStepInputs = 4;
constexpr int64_t kSharedInputs = 128;
constexpr int64_t kStepBytes = kQuantizedPanel * kStepInputs;

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
  void* weights;
  float* scales;  // one group: [num_panels * 64]
  float* zeros;   // one group, null for symmetric
  float* bias;    // null for none

  int64_t code_bytes() const { return group_size * kQuantizedPanel * bits / 8; }
  int64_t scale_bytes() const { return half_scales ? 2 : 4; }

  // Groups in a row that share a scale of activations: of 4 bits up to 128 inputs, else one.
  int64_t shared_groups() const {
    if (bits == 8) return 1;
    int64_t shared = 1;
    while (2 * shared * group_size <= kSharedInputs && num_groups % (2 * shared) == 0) shared *= 2;
    return shared;
  }
};

// Activations as the kernels read them: codes in [-127, 127], per token and group their scale (the
// same in groups that share it) and correction: -2^(bits - 1) times the sum of the codes, what the
// weight's codes count too much. Tokens go in tiles of R rows, side by side: what a register tile
// reads is one stream.
//
//   codes     a tile  [stride / 4][R][4]
//   factors   a tile  [num_groups][2][R]: float scales, int32 corrections
struct QuantizedRows {
  int8_t* codes;
  int32_t* factors;
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
  float* zeros;  // null for symmetric
};

struct PackQuantizedArgs {
  const uint8_t* codes;  // [n, k]
  const float* scales;   // [n, num_groups]
  const float* zeros;    // [n, num_groups] or null
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
