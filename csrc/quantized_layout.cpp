#include "quantized_layout.h"

#include <cmath>
#include <cstring>

#include "memory.h"

namespace qs {
namespace {

constexpr int64_t kMaxGroup = 65536;  // 255 x 127 of these fit 32 bits

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

bool valid_quantized_form(int bits, int64_t n, int64_t k, int64_t group_size) {
  const bool sizes = n >= 1 && k >= 1 && group_size >= 1 && group_size <= kMaxGroup;
  if ((bits != 4 && bits != 6 && bits != 8) || !sizes) return false;
  return group_size == k || (group_size % 16 == 0 && k % group_size == 0);
}

bool takes_zeros(int bits, bool has_minimums) { return bits != 6 || has_minimums; }

bool takes_sub_scales(int bits, int64_t k, int64_t group_size, bool has_zeros) {
  return bits == 4 && !has_zeros && group_size < k && group_size % kPieceInputs == 0;
}

bool takes_super_scales(int64_t k, int64_t group_size) {
  return k % kSuperInputs == 0 && (group_size == 16 || group_size == 32);
}

bool takes_levels(int bits, bool has_zeros, bool has_sub_scales, const uint8_t* levels) {
  for (int i = 0; i < kNumLevels; ++i) {
    if (levels[i] >> bits != 0) return false;
  }
  return bits > 4 && !has_zeros && !has_sub_scales;
}

bool fits_half(float value) {
  const float magnitude = std::fabs(value);
  if (!(magnitude <= 65504.0f)) return false;
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (magnitude >= 0x1p-14f) return (bits & 0x1fff) == 0;
  const float units = magnitude * 0x1p24f;
  return units == std::floor(units);
}

PackedQuantized quantized_layout(const QuantizedForm& form) {
  PackedQuantized packed = {};
  packed.bits = packed.held_bits = form.bits;
  if (form.levels != nullptr) {
    packed.held_bits = 4;
    memcpy(packed.levels, form.levels, kNumLevels);
  }
  packed.n = form.n;
  packed.k = form.k;
  packed.num_panels = (form.n + kQuantizedPanel - 1) / kQuantizedPanel;
  packed.num_groups = form.k / form.group_size;
  packed.has_zeros = form.has_zeros;
  packed.has_minimums = form.has_minimums;
  packed.has_sub_scales = packed.scaled_up = form.has_sub_scales;
  packed.group_size = form.group_size;
  if (packed.num_groups == 1) {
    packed.group_size = round_up(form.k, packed_inputs(packed.held_bits));
    packed.group_bytes = packed.quant_bytes();
  } else {
    packed.half_scales = form.half_scales && !form.has_super_scales;
    const int64_t super_arrays = !form.has_super_scales ? 0 : form.has_zeros ? 2 : 1;
    packed.super_bytes = super_arrays * kQuantizedPanel * static_cast<int64_t>(sizeof(uint16_t));
    const int64_t per_scale = packed.scale_bytes() * (packed.has_zeros ? 2 : 1);
    packed.group_bytes = packed.quant_bytes() + per_scale * kQuantizedPanel;
  }
  packed.panel_bytes = packed.groups_bytes(packed.num_groups);
  return packed;
}

void set_quantized_sizes(qs_quantized* linear) {
  const PackedQuantized& packed = linear->packed;
  linear->weight_bytes = packed.num_panels * packed.panel_bytes;
  linear->scale_bytes = packed.num_panels * kQuantizedPanel * sizeof(float);
}

bool allocate_quantized(qs_quantized* linear, bool has_bias) {
  set_quantized_sizes(linear);
  PackedQuantized& packed = linear->packed;
  packed.weights = weight_alloc(linear->weight_bytes);
  bool whole = packed.weights != nullptr;
  const auto floats = [&](bool wanted) {
    if (!wanted || !whole) return static_cast<float*>(nullptr);
    void* memory = weight_alloc(linear->scale_bytes);
    whole = memory != nullptr;
    return static_cast<float*>(memory);
  };
  const bool single = packed.num_groups == 1;
  packed.scales = floats(single);
  packed.zeros = floats(single && packed.has_zeros);
  packed.bias = floats(has_bias);
  return whole;
}

}  // namespace qs
