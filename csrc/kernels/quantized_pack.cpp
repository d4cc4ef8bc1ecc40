// Quants, scales and zeros into the layout of quantized.h, a panel at a time, and rows out of it.

#include "kernels/kernels.h"
#include "kernels/quantized.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

// The place of input k of an output in its panel: the byte, without the output's own offset. Of 6 bits
// that of the first step with which it shares bytes.
QS_INLINE int64_t quant_offset(const PackedQuantized& packed, int64_t k) {
  const int64_t group = packed.num_groups == 1 ? 0 : k / packed.group_size;
  int64_t within = k - group * packed.group_size;
  int64_t pieces = 0;
  if (packed.has_sub_scales) {
    pieces = within / kPieceInputs * kPieceBytes + kQuantizedPanel;
    within %= kPieceInputs;
  }
  const int64_t start = packed.group_offset(group) + pieces + within % kStepInputs;
  if (packed.held_bits == 6) return start + (within >> 4) * packed_bytes(6);
  const int64_t step = within >> (packed.held_bits == 4 ? 3 : 2);  // a division would be felt
  return start + step * kStepBytes;
}

QS_INLINE uint8_t* panel_of(const PackedQuantized& packed, int64_t output) {
  return static_cast<uint8_t*>(packed.weights) + output / kQuantizedPanel * packed.panel_bytes;
}

constexpr int64_t kSegment = 16;  // what every group's size is a multiple of

struct Inputs {
  int64_t begin, end;
};

template <typename Scale>
void pack_group_scales(const PackQuantizedArgs& args, int64_t output, int64_t group, uint8_t* at) {
  const PackedQuantized& packed = *args.packed;
  const int64_t from = output * packed.num_groups + group;
  Scale* scales = reinterpret_cast<Scale*>(at) + output % kQuantizedPanel;
  store_n(scales, set1(args.scales[from] / packed.scale_unit()), 1);
  if (packed.has_zeros) {
    store_n(scales + kQuantizedPanel, set1(args.zeros[from] - packed.middle()), 1);
  }
}

void pack_super_scales(const PackQuantizedArgs& args, int64_t output) {
  const PackedQuantized& packed = *args.packed;
  uint8_t* panel = panel_of(packed, output);
  const int64_t lane = output % kQuantizedPanel, super_groups = packed.super_groups();
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    const int64_t from = output * packed.num_groups + group;
    uint8_t* at = panel + packed.group_offset(group) + packed.quant_bytes() + lane;
    *at = static_cast<uint8_t>(args.super.scales[from]);
    if (packed.has_zeros) at[kQuantizedPanel] = static_cast<uint8_t>(args.super.minimums[from]);
    if (group % super_groups != 0) continue;
    const int64_t block = from / super_groups;
    uint16_t* held = reinterpret_cast<uint16_t*>(panel + packed.super_offset(group)) + lane;
    *held = args.super.super_scales[block];
    if (packed.has_zeros) held[kQuantizedPanel] = args.super.super_minimums[block];
  }
}

// The number of each quant among the levels of a weight.
struct LevelNumbers {
  uint8_t of[256] = {};

  explicit LevelNumbers(const uint8_t* levels) {
    for (int i = 0; i < kNumLevels; ++i) of[levels[i]] = static_cast<uint8_t>(i);
  }
};

// Stores 16 quants of one output, all of one group, from the place of the first on.
QS_INLINE void pack_segment(const uint8_t* quants, int bits, uint8_t* out) {
  uint32_t steps[kSegment / kStepInputs];
  memcpy(steps, quants, sizeof(steps));
  if (bits == 8) {
    for (int i = 0; i < 4; ++i) memcpy(out + i * kStepBytes, &steps[i], sizeof(steps[i]));
    return;
  }
  if (bits == 6) {
    for (int i = 0; i < 3; ++i) {
      const uint32_t held = steps[i] | (steps[3] >> 2 * i & 0x03030303u) << 6;
      memcpy(out + i * kStepBytes, &held, sizeof(held));
    }
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = steps[2 * i] | steps[2 * i + 1] << 4;
    memcpy(out + i * kStepBytes, &pair, sizeof(pair));
  }
}

// Quants of inputs [begin, end) of one output, whose segments of 16 are at these offsets; `begin`
// is a multiple of 16.
template <bool HasLevels>
QS_INLINE void pack_quants(const PackQuantizedArgs& args, const LevelNumbers& numbers,
                           int64_t output, Inputs inputs, const int64_t* offsets) {
  const PackedQuantized& packed = *args.packed;
  uint8_t* column = panel_of(packed, output) + output % kQuantizedPanel * kStepInputs;
  const uint8_t* quants = args.quants + output * packed.k;
  int64_t k = inputs.begin;
  const auto pack = [&](const uint8_t* from, uint8_t* to) {
    if constexpr (HasLevels) {
      uint8_t numbered[kSegment];
      for (int64_t i = 0; i < kSegment; ++i) numbered[i] = numbers.of[from[i]];
      pack_segment(numbered, 4, to);
    } else {
      pack_segment(from, packed.held_bits, to);
    }
  };
  for (; k + kSegment <= inputs.end; k += kSegment) pack(quants + k, column + *offsets++);
  if (k == inputs.end) return;
  uint8_t rest[kSegment] = {};
  memcpy(rest, quants + k, inputs.end - k);
  if (packed.held_bits == 6) {  // there are bytes for a multiple of 16 inputs
    pack(rest, column + *offsets);
    return;
  }
  uint8_t packed_rest[kSegment / kStepInputs * kStepBytes];
  pack(rest, packed_rest);
  const int64_t inputs_per_step = packed_inputs(packed.held_bits);
  for (int64_t i = 0; k + i < inputs.end; i += inputs_per_step) {
    memcpy(column + quant_offset(packed, k + i), packed_rest + i / inputs_per_step * kStepBytes,
           kStepInputs);
  }
}

void pack_scales(const PackQuantizedArgs& args, int64_t output) {
  const PackedQuantized& packed = *args.packed;
  if (packed.num_groups == 1) {
    packed.scales[output] = args.scales[output];
    if (packed.zeros == nullptr) return;
    packed.zeros[output] = args.zeros[output] - packed.middle();
    return;
  }
  if (packed.super_bytes != 0) {
    pack_super_scales(args, output);
    return;
  }
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    uint8_t* at = panel_of(packed, output) + group * packed.group_bytes + packed.quant_bytes();
    if (packed.half_scales) {
      pack_group_scales<f16>(args, output, group, at);
    } else {
      pack_group_scales<float>(args, output, group, at);
    }
  }
}

void pack_sub_scales(const PackQuantizedArgs& args, int64_t output) {
  const PackedQuantized& packed = *args.packed;
  uint8_t* column = panel_of(packed, output) + output % kQuantizedPanel;
  const int8_t* sub_scales = args.sub_scales + output * (packed.k / kSubBlockInputs);
  const int64_t pieces = packed.group_size / kPieceInputs;
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    for (int64_t piece = 0; piece < pieces; ++piece, sub_scales += 2) {
      const int low = (sub_scales[0] + kLargestSubScale) / 2;
      const int high = (sub_scales[1] + kLargestSubScale) / 2;
      column[group * packed.group_bytes + piece * kPieceBytes] =
          static_cast<uint8_t>(low | high << 4);
    }
  }
}

// A cache line of every output's quants at a time, so that what is written stays in L1.
void pack_panel(const PackQuantizedArgs& args, const LevelNumbers& numbers, int64_t panel) {
  constexpr int64_t kAtOnce = 64;
  const int64_t first = panel * kQuantizedPanel;
  const int64_t last = min_of(args.packed->n, first + kQuantizedPanel);
  for (int64_t k = 0; k < args.packed->k; k += kAtOnce) {
    const Inputs inputs = {k, min_of(args.packed->k, k + kAtOnce)};
    int64_t offsets[kAtOnce / kSegment];  // the same for all outputs, and not cheap
    for (int64_t i = 0; i < kAtOnce; i += kSegment) {
      offsets[i / kSegment] = quant_offset(*args.packed, min_of(k + i, args.packed->k - 1));
    }
    for (int64_t output = first; output < last; ++output) {
      if (args.packed->has_levels()) {
        pack_quants<true>(args, numbers, output, inputs, offsets);
      } else {
        pack_quants<false>(args, numbers, output, inputs, offsets);
      }
    }
  }
  for (int64_t output = first; output < last; ++output) {
    pack_scales(args, output);
    if (args.packed->has_sub_scales) pack_sub_scales(args, output);
  }
}

struct Scaling {
  float scale, zero;  // the zero with its middle, or the minimum
};

template <typename Scale>
QS_INLINE Scaling group_scaling(const PackedQuantized& packed, const uint8_t* at, int64_t lane) {
  const Scale* scales = reinterpret_cast<const Scale*>(at) + lane;
  const float zero = packed.has_zeros ? load_n(scales + kQuantizedPanel, 1)[0] : 0.0f;
  return {load_n(scales, 1)[0], zero};
}

QS_INLINE Scaling super_scaling(const PackedQuantized& packed, const uint8_t* panel,
                                int64_t group, int64_t lane) {
  const int8_t* scales = reinterpret_cast<const int8_t*>(panel) + packed.group_offset(group) +
                         packed.quant_bytes() + lane;
  const f16* super = reinterpret_cast<const f16*>(panel + packed.super_offset(group)) + lane;
  Scaling found = {load_n(super, 1)[0] * static_cast<float>(scales[0]), 0.0f};
  if (packed.has_zeros) {
    found.zero = load_n(super + kQuantizedPanel, 1)[0] *
                 static_cast<float>(scales[kQuantizedPanel]);
  }
  return found;
}

QS_INLINE Scaling scaling_of(const PackedQuantized& packed, int64_t output, int64_t group) {
  Scaling found;
  if (packed.num_groups == 1) {
    found = {packed.scales[output], packed.zeros == nullptr ? 0.0f : packed.zeros[output]};
  } else {
    const uint8_t* panel = panel_of(packed, output);
    const uint8_t* at = panel + packed.group_offset(group) + packed.quant_bytes();
    const int64_t lane = output % kQuantizedPanel;
    found = packed.super_bytes != 0 ? super_scaling(packed, panel, group, lane)
            : packed.half_scales    ? group_scaling<f16>(packed, at, lane)
                                    : group_scaling<float>(packed, at, lane);
    found.scale *= packed.scale_unit();
  }
  found.zero += packed.middle();
  return found;
}

QS_INLINE float sub_scale_of(const PackedQuantized& packed, int64_t output, int64_t k) {
  const int64_t within = k % packed.group_size;
  const uint8_t* at = static_cast<const uint8_t*>(packed.weights) +
                      output / kQuantizedPanel * packed.panel_bytes +
                      k / packed.group_size * packed.group_bytes +
                      within / kPieceInputs * kPieceBytes + output % kQuantizedPanel;
  const int held = within % kPieceInputs < kSubBlockInputs ? *at & 15 : *at >> 4;
  return static_cast<float>(2 * held - kLargestSubScale);
}

// Quant k of the output that `column` belongs to.
QS_INLINE int quant_at(const PackedQuantized& packed, const uint8_t* column, int64_t k) {
  const uint8_t* at = column + quant_offset(packed, k);
  if (packed.held_bits == 8) return at[0];
  const int64_t step = k % packed.group_size / kStepInputs;
  if (packed.held_bits == 4) {
    const int held = step % 2 != 0 ? at[0] >> 4 : at[0] & 15;
    return packed.has_levels() ? packed.levels[held] : held;
  }
  if (step % 4 < 3) return at[step % 4 * kStepBytes] & 63;
  return at[0] >> 6 | (at[kStepBytes] >> 6) << 2 | (at[2 * kStepBytes] >> 6) << 4;
}

template <typename T>
QS_INLINE void store_row(const float* values, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += W) store_up_to(out + i, load(values + i), n - i);
}

template <typename T>
void read_row(const PackedQuantized& packed, int64_t output, T* out) {
  constexpr int64_t kAtOnce = 64;  // a multiple of 2 steps and of W
  const uint8_t* column = static_cast<const uint8_t*>(packed.weights) +
                          output / kQuantizedPanel * packed.panel_bytes +
                          output % kQuantizedPanel * kStepInputs;
  float values[kAtOnce];
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    const Scaling scaling = scaling_of(packed, output, group);
    const int64_t begin = group * packed.group_size;
    const int64_t end = min_of(packed.k, begin + packed.group_size);
    for (int64_t first = begin; first < end; first += kAtOnce) {
      const int64_t size = min_of(kAtOnce, end - first);
      for (int64_t i = 0; i < size; ++i) {
        const int quant = quant_at(packed, column, first + i);
        if (packed.has_minimums) {
          values[i] = static_cast<float>(quant) * scaling.scale + scaling.zero;
          continue;
        }
        float value = static_cast<float>(quant) - scaling.zero;
        if (packed.has_sub_scales) value *= sub_scale_of(packed, output, first + i);
        values[i] = value * scaling.scale;
      }
      store_row(values, size, out + first);
    }
  }
}

template <typename T>
void read_plain_row(const PackedLinear& packed, int64_t output, T* out) {
  constexpr int64_t kPair = sizeof(T) == sizeof(bf16) ? 2 : 1;
  const int64_t pair = packed.dtype == QS_BF16 ? kPair : 1;
  const T* column = static_cast<const T*>(packed.weights) +
                    output / kPanel * packed.panel_size + output % kPanel * pair;
  for (int64_t k = 0; k < packed.k; ++k) {
    out[k] = column[k / pair * kPanel * pair + k % pair];
  }
}

}  // namespace

static void pack_quantized(Pool* pool, const PackQuantizedArgs& args) {
  const PackedQuantized& packed = *args.packed;
  const LevelNumbers numbers(packed.levels);
  parallel_for(pool, packed.num_panels, [&](int64_t panel) { pack_panel(args, numbers, panel); });
}

static void quantized_rows(Pool* pool, const PackedQuantized& packed, int dtype, const int64_t* ids,
                    int64_t num_tokens, void* out) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_tokens, [&](int64_t i) {
      read_row(packed, ids[i], static_cast<T*>(out) + i * packed.k);
    });
  });
}

static void linear_rows(Pool* pool, const PackedLinear& packed, const int64_t* ids, int64_t num_tokens,
                 void* out) {
  with_dtype(packed.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_tokens, [&](int64_t i) {
      read_plain_row(packed, ids[i], static_cast<T*>(out) + i * packed.k);
    });
  });
}

void enter_quantized_pack(Kernels& level) {
  level.linear_rows = linear_rows;
  level.pack_quantized = pack_quantized;
  level.quantized_rows = quantized_rows;
}

}  // namespace qs::QS_LEVEL
