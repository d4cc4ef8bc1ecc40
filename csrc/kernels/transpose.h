// Transposing W x W floats in registers; on levels without a shuffle set of their own, in memory.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

#if defined(__AVX512F__)

QS_INLINE void transpose(vf (&rows)[W]) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = rows[i];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#define QS_PD(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = QS_PD(_mm512_unpacklo_pd, t[i], t[i + 2]);
    r[i + 1] = QS_PD(_mm512_unpackhi_pd, t[i], t[i + 2]);
    r[i + 2] = QS_PD(_mm512_unpacklo_pd, t[i + 1], t[i + 3]);
    r[i + 3] = QS_PD(_mm512_unpackhi_pd, t[i + 1], t[i + 3]);
  }
#undef QS_PD
  // Lane L (128 bits) of r[4i + c] is column 4L + c of rows 4i ... 4i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even_top = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
    const __m512 odd_top = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    const __m512 even_low = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(even_top, even_low, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(odd_top, odd_low, 0xdd);
  }
}

#elif defined(__AVX2__)

QS_INLINE void transpose(vf (&rows)[W]) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#define QS_PD(f, a, b) _mm256_castpd_ps(f(_mm256_castps_pd(a), _mm256_castps_pd(b)))
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = QS_PD(_mm256_unpacklo_pd, t[i], t[i + 2]);
    r[i + 1] = QS_PD(_mm256_unpackhi_pd, t[i], t[i + 2]);
    r[i + 2] = QS_PD(_mm256_unpacklo_pd, t[i + 1], t[i + 3]);
    r[i + 3] = QS_PD(_mm256_unpackhi_pd, t[i + 1], t[i + 3]);
  }
#undef QS_PD
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
}

#elif defined(__aarch64__)

QS_INLINE void transpose(vf (&rows)[W]) {
  const float32x4_t even_low = vtrn1q_f32(rows[0], rows[1]);
  const float32x4_t odd_low = vtrn2q_f32(rows[0], rows[1]);
  const float32x4_t even_high = vtrn1q_f32(rows[2], rows[3]);
  const float32x4_t odd_high = vtrn2q_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(even_low), vget_low_f32(even_high));
  rows[1] = vcombine_f32(vget_low_f32(odd_low), vget_low_f32(odd_high));
  rows[2] = vcombine_f32(vget_high_f32(even_low), vget_high_f32(even_high));
  rows[3] = vcombine_f32(vget_high_f32(odd_low), vget_high_f32(odd_high));
}

#else

QS_INLINE void transpose(vf (&rows)[W]) {
  float in[W][W], out[W][W];
  memcpy(in, rows, sizeof(in));
  for (int i = 0; i < W; ++i) {
    for (int j = 0; j < W; ++j) out[j][i] = in[i][j];
  }
  memcpy(rows, out, sizeof(out));
}

#endif

}  // namespace qs::QS_LEVEL
