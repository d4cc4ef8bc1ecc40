// The size of packed quants and the places of their parts, for code that makes such weights.
#pragma once

#include "objects.h"

namespace qs {

struct QuantizedForm {
  int bits;
  int64_t n, k;
  int64_t group_size;  // inputs; k for one scale per output
  bool has_zeros;
  bool has_minimums;  // in place of zeros
  bool half_scales;  // of groups; one scale per output is always f32
  bool has_sub_scales;
  bool has_super_scales;  // in place of half_scales
  const uint8_t* levels;  // the 16 values of all quants, which are held in 4 bits then; or null
};

// 4, 6 or 8 bits; groups of a multiple of 16 inputs that divides k, or of all.
bool valid_quantized_form(int bits, int64_t n, int64_t k, int64_t group_size);
// Whether a valid form can have zeros; minimums too are passed as zeros.
bool takes_zeros(int bits, bool has_minimums);
// Whether a valid form can have sub-block scales.
bool takes_sub_scales(int bits, int64_t k, int64_t group_size, bool has_zeros);
// Whether a valid form can have the scales of super-blocks.
bool takes_super_scales(int64_t k, int64_t group_size);
// Whether quants of a valid form can be held as the numbers of levels, which `bits` hold.
bool takes_levels(int bits, bool has_zeros, bool has_sub_scales, const uint8_t* levels);
// Whether f16 holds the value.
bool fits_half(float value);
// Without memory.
PackedQuantized quantized_layout(const QuantizedForm& form);
// The bytes of the parts of `linear->packed`, whose layout is set.
void set_quantized_sizes(qs_quantized* linear);
// Memory for `linear->packed`, whose layout is set. False when memory is lacking.
bool allocate_quantized(qs_quantized* linear, bool has_bias);

}  // namespace qs
