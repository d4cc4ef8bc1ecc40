// exp, log and tanh in float64 from IEEE additions, products and quotients only (no fused ones:
// the build forbids contraction), so that NumPy and PyTorch compute the same bits operation by
// operation: ops/reference/exact_math.py and runtime/sampling/exact_math.py. Written for one value,
// without branches, for loops that the compiler vectorises.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// Adding and subtracting it rounds a value below 2^51 to the nearest integer, ties to even.
constexpr double kRoundMagic = 0x1.8p52;

// exp(x) for x <= 0; below -708 it stays at exp(-708), about 3e-308.
QS_INLINE double exp64_nonpositive(double x) {
  x = x < -708.0 ? -708.0 : x;  // a NaN stays a NaN
  const double shifted = x * 1.4426950408889634 + kRoundMagic;
  const double n = shifted - kRoundMagic;
  const double rest = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
  double value = 2.505210838544172e-08;  // 1 / 11!
  value = value * rest + 2.755731922398589e-07;
  value = value * rest + 2.7557319223985893e-06;
  value = value * rest + 2.48015873015873e-05;
  value = value * rest + 0.0001984126984126984;
  value = value * rest + 0.001388888888888889;
  value = value * rest + 0.008333333333333333;
  value = value * rest + 0.041666666666666664;
  value = value * rest + 0.16666666666666666;
  value = value * rest + 0.5;
  value = value * rest + 1.0;
  value = value * rest + 1.0;
  const int64_t exponent = bit_cast<int64_t>(shifted) - bit_cast<int64_t>(kRoundMagic);
  return value * bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

typedef double vd __attribute__((vector_size(4 * W)));
typedef int64_t vl __attribute__((vector_size(4 * W)));
// Vectors to compute side by side: one waits for its last result more than it computes, and a
// machine looks only so far ahead.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSideBySide = 8;
#else
constexpr int kSideBySide = 4;
#endif

// The same of every lane, to the bit; x becomes the result.
QS_INLINE void exp64_nonpositive(vd (&x)[kSideBySide]) {
  constexpr double kTerms[] = {2.755731922398589e-07, 2.7557319223985893e-06,
                               2.48015873015873e-05,   0.0001984126984126984,
                               0.001388888888888889,   0.008333333333333333,
                               0.041666666666666664,   0.16666666666666666,
                               0.5,                    1.0,
                               1.0};
  vd rest[kSideBySide], value[kSideBySide];
  vl exponent[kSideBySide];
#pragma GCC unroll 8
  for (int i = 0; i < kSideBySide; ++i) {
    const vd least = vd{} - 708.0;
    const vd bounded = x[i] < least ? least : x[i];
    const vd shifted = bounded * 1.4426950408889634 + kRoundMagic;
    const vd n = shifted - kRoundMagic;
    rest[i] = (bounded - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    value[i] = vd{} + 2.505210838544172e-08;
    exponent[i] = bit_cast<vl>(shifted) - bit_cast<int64_t>(kRoundMagic);
  }
#pragma GCC unroll 11
  for (int term = 0; term < 11; ++term) {
#pragma GCC unroll 8
    for (int i = 0; i < kSideBySide; ++i) value[i] = value[i] * rest[i] + kTerms[term];
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSideBySide; ++i) {
    x[i] = value[i] * bit_cast<vd>((exponent[i] + 1023) << 52);
  }
}

QS_INLINE double tanh64(double x) {
  const double magnitude = bit_cast<double>(bit_cast<uint64_t>(x) & ~(uint64_t{1} << 63));
  const double tail = exp64_nonpositive(magnitude * -2.0);
  const double result = (1.0 - tail) / (tail + 1.0);
  const uint64_t sign = bit_cast<uint64_t>(x) & (uint64_t{1} << 63);
  return bit_cast<double>(bit_cast<uint64_t>(result) | sign);
}

// log(x) for normal x > 0, with a small relative error near x = 1 too:
// x = 2^k m, sqrt(1/2) <= m < sqrt 2; log m = 2 artanh(s), s = (m - 1) / (m + 1), by its series.
QS_INLINE double log64(double x) {
  const uint64_t bits = bit_cast<uint64_t>(x);
  const uint64_t above = bits - 0x3fe6a09e667f3bcd;  // bits of sqrt(1/2)
  const int64_t k = static_cast<int64_t>(above) >> 52;
  const double m = bit_cast<double>((above & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
  const double f = m - 1.0;
  const double s = f / (m + 1.0);
  const double z = s * s;
  double value = 0.043478260869565216;  // 1 / 23
  value = value * z + 0.047619047619047616;
  value = value * z + 0.05263157894736842;
  value = value * z + 0.058823529411764705;
  value = value * z + 0.06666666666666667;
  value = value * z + 0.07692307692307693;
  value = value * z + 0.09090909090909091;
  value = value * z + 0.1111111111111111;
  value = value * z + 0.14285714285714285;
  value = value * z + 0.2;
  value = value * z + 0.3333333333333333;
  const double twice = s + s;
  const double n = static_cast<double>(k);
  const double low = twice * (z * value) + n * 1.9082149292705877e-10;
  return n * 0.6931471803691238 + (twice + low);
}

}  // namespace qs::QS_LEVEL
