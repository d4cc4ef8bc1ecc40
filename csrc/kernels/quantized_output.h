// The last step of the low-bit linear: sums as outputs, rounded alike whatever computed the sums.
#pragma once

#include "kernels/quantized_dot.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {

QS_INLINE void store_output(float* p, vf v, int64_t n) { store_up_to(p, v, n); }
QS_INLINE void store_output(f16* p, vf v, int64_t n) { store_up_to(p, v, n); }
QS_INLINE void store_output(bf16* p, vf v, int64_t n) {
#if defined(__AVX512BF16__)
  if (n >= W) {
    const vh rounded = bit_cast<vh>(_mm512_cvtneps_pbh(v));
    memcpy(p, &rounded, sizeof(rounded));
    return;
  }
#endif
  store_up_to(p, v, n);
}

// One row's sums as outputs [first, first + n) of it.
template <typename T>
QS_INLINE void emit_groups(const PackedQuantized& packed, const float* c, int64_t first, int64_t n,
                           T* out) {
  for (int64_t i = 0; i < n; i += W) {
    vf sum = load(c + i);
    if (packed.bias != nullptr) sum += load(packed.bias + first + i);
    store_output(out + i, sum, n - i);
  }
}

template <typename T>
QS_INLINE void emit_single(const PackedQuantized& packed, float scale, int32_t correction,
                           const int32_t* c, Range outputs, T* out) {
  const int64_t first = outputs.begin, n = outputs.size();
  static_assert(Dot<4>::kOffset == Dot<6>::kOffset);
  const bool offset = packed.bits == 8 ? Dot<8>::kOffset : Dot<4>::kOffset;
  const vf negative = negative_sum(packed.bits, correction);
  const int32_t from_zero =
      packed.bits == 8 ? minimum_start<8>(correction) : minimum_start<4>(correction);
  const vi start = set1i(packed.has_minimums ? from_zero : offset ? correction : 0);
  const vf x_scale = set1(scale);
  for (int64_t i = 0; i < n; i += W) {
    vi dot;
    memcpy(&dot, c + i, sizeof(dot));
    vf sum = __builtin_convertvector(dot + start, vf);
    if (packed.has_minimums) {
      const vf scaled = sum * load(packed.scales + first + i);
      sum = fma(load(packed.zeros + first + i), -negative, scaled) * x_scale;
    } else {
      if (packed.zeros != nullptr) sum = fma(load(packed.zeros + first + i), negative, sum);
      sum = sum * x_scale * load(packed.scales + first + i);
    }
    if (packed.bias != nullptr) sum += load(packed.bias + first + i);
    store_output(out + i, sum, n - i);
  }
}

}  // namespace qs::QS_LEVEL
