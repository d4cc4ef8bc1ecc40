// exp, tanh and the normal distribution on vectors, so that bits depend on neither libm nor a
// value's lane. The polynomials are Chebyshev fits in double, rounded; a NaN stays a NaN.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// p * 2^n, where `shifted` is n + 1.5 * 2^23.
QS_INLINE vf times_power_of_two(vf p, [[maybe_unused]] vf n, [[maybe_unused]] vf shifted) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  // in two factors, so that results near the ends of the range are right
  const vi exponent = bit_cast<vi>(shifted) - 0x4b400000;
  const vi half = exponent >> 1;
  const vf scale_a = bit_cast<vf>((half + 127) << 23);
  const vf scale_b = bit_cast<vf>((exponent - half + 127) << 23);
  return p * scale_a * scale_b;
#endif
}

// Relative error below 1.2e-7 where the result is normal; overflows to inf, underflows to 0.
QS_INLINE vf vexp(vf x) {
  x = vmax(set1(-105.0f), vmin(set1(89.0f), x));
  // x = n ln2 + r with |r| <= ln2 / 2; adding 1.5 * 2^23 rounds to an integer.
  const vf magic = set1(0x1.8p23f);
  const vf shifted = fma(x, set1(1.44269504f), magic);
  const vf n = shifted - magic;
  vf r = fma(n, set1(-0.693359375f), x);  // ln2 in two parts, the first exact in 9 bits
  r = fma(n, set1(2.12194440e-4f), r);
  // exp(r) = 1 + r + r^2 g(r), |error of g| < 2e-9 on the interval
  vf g = fma(r, set1(1.98992986e-4f), set1(1.39336695e-3f));
  g = fma(r, g, set1(8.33329838e-3f));
  g = fma(r, g, set1(4.16664667e-2f));
  g = fma(r, g, set1(1.66666672e-1f));
  g = fma(r, g, set1(0.5f));
  const vf p = fma(r * r, g, r) + 1.0f;
  return times_power_of_two(p, n, shifted);
}

// 2^x as p * 2^n: n is the nearest integer of x, `shifted` n + 1.5 * 2^23. p is 1 at n, and at least 1
// above it.
struct Exp2Parts {
  vf p, n, shifted;
};
QS_INLINE Exp2Parts exp2_parts(vf x) {
  const vf magic = set1(0x1.8p23f);
  const vf shifted = x + magic;
  const vf n = shifted - magic;
  const vf r = x - n;
  vf p = fma(r, set1(1.326472731e-3f), set1(9.671512991e-3f));
  p = fma(r, p, set1(5.550733581e-2f));
  p = fma(r, p, set1(2.402224243e-1f));
  p = fma(r, p, set1(6.931470037e-1f));
  p = fma(r, p, set1(1.0f));
  return {p, n, shifted};
}

// 2^x for -160 <= x <= 126, exactly 1 at 0; relative error below 1.6e-7 where the result is normal,
// 0 below -150. Cheaper than vexp: the argument needs no reducing.
QS_INLINE vf vexp2(vf x) {
  const Exp2Parts of = exp2_parts(x);
  return times_power_of_two(of.p, of.n, of.shifted);
}

// The same for x <= 0, but 0 below -126: vscalefps takes 60 ns instead of 1.2 for a result that is
// not normal (Xeon with AMX), and masked scores are -inf. All others are normal (p >= 1 at -126), so
// one factor is enough, and has the bits of two.
QS_INLINE vf vexp2_nonpositive(vf x) {
  const vf least = set1(-126.0f);
  const Exp2Parts of = exp2_parts(vmax(least, x));
#if defined(__AVX512F__)
  const vf power = times_power_of_two(of.p, of.n, of.shifted);
#else
  const vf power = of.p * bit_cast<vf>((bit_cast<vi>(of.shifted) << 23) + 0x3f800000);
#endif
  return x < least ? vf{} : power;
}

// 1 / x of normal x up to 2^126; within 2^-22 of it where that is cheaper than a division.
QS_INLINE vf vreciprocal(vf x) {
#if defined(__AVX512F__)
  const vf near = _mm512_rcp14_ps(x);
  return near * fma(-x, near, set1(2.0f));
#else
  return 1.0f / x;
#endif
}

// As store(), by the instruction for it where there is one: values below 2^-126 become zero.
template <typename T>
QS_INLINE void store_near(T* p, vf v) {
  store(p, v);
}
#if defined(__AVX512BF16__)
template <>
QS_INLINE void store_near(bf16* p, vf v) {
  const __m256bh packed = _mm512_cvtneps_pbh(v);
  memcpy(p, &packed, sizeof(packed));
}
#endif
template <typename T>
QS_INLINE void store_near_up_to(T* p, vf v, int64_t n) {
  if (n >= W) {
    store_near(p, v);
  } else {
    T lanes[W];
    store_near(lanes, v);
    memcpy(p, lanes, n * sizeof(T));
  }
}

QS_INLINE vf vabs(vf x) { return bit_cast<vf>(bit_cast<vu>(x) & 0x7fffffffu); }

QS_INLINE vf copy_sign(vf magnitude, vf sign) {
  return bit_cast<vf>(bit_cast<vu>(magnitude) | (bit_cast<vu>(sign) & 0x80000000u));
}

QS_INLINE vf vtanh(vf x) {
  const vf t = vabs(x);
  // Small: t + t z h(z), z = t^2. Otherwise 1 - 2 / (exp(2t) + 1).
  const vf z = x * x;
  vf h = fma(z, set1(-6.10494788e-3f), set1(2.10036411e-2f));
  h = fma(z, h, set1(-5.38524974e-2f));
  h = fma(z, h, set1(1.33327823e-1f));
  h = fma(z, h, set1(-3.33333291e-1f));
  const vf small = fma(t * z, h, t);
  const vf large = 1.0f - 2.0f / (vexp(t + t) + 1.0f);
  return copy_sign(t < 0.625f ? small : large, x);
}

// The distribution function of the standard normal: erfc(t) = exp(-t^2) s p(s) with
// s = 1 / (1 + 0.4 t), t = |x| / sqrt 2; relative error of p below 1e-8 for t < 14.
QS_INLINE vf normal_cdf(vf x) {
  const vf t = vabs(x) * 0.70710678f;
  const vf s = 1.0f / fma(t, set1(0.4f), set1(1.0f));
  vf p = set1(-0.020926462f);
  p = fma(p, s, set1(0.093442716f));
  p = fma(p, s, set1(-0.119354114f));
  p = fma(p, s, set1(-0.026713545f));
  p = fma(p, s, set1(0.09977581f));
  p = fma(p, s, set1(-0.0021602067f));
  p = fma(p, s, set1(0.15250556f));
  p = fma(p, s, set1(0.16323636f));
  p = fma(p, s, set1(0.20895652f));
  p = fma(p, s, set1(0.22555703f));
  p = fma(p, s, set1(0.2256803f));
  const vf tail = 0.5f * (vexp(-(t * t)) * (s * p));
  return x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace qs::QS_LEVEL
