// Vectors of W floats for the ISA level being compiled, on GCC/Clang vector extensions.
//
// fma() is the only fused operation; on a level without one it multiplies and adds. Every level
// fixes its own bits, none promises another's.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace qs::QS_LEVEL {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#define QS_INLINE inline __attribute__((always_inline))

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename To, typename From>
QS_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

QS_INLINE vf set1(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return vf{} + x;  // an addition, for the sake of -0
#endif
}
QS_INLINE vi set1i(int32_t x) { return vi{} + x; }
QS_INLINE vu set1u(uint32_t x) { return vu{} + x; }

QS_INLINE vi lane_indices() {
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes;
}

QS_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// A NaN in b is returned, a NaN in a is dropped (as x86's max and min do with swapped operands).
QS_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
QS_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

QS_INLINE float reduce_add(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#endif
  // A fixed tree: halves first.
  float lanes[W];
  memcpy(lanes, &v, sizeof(v));
  for (int step = W / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

QS_INLINE float reduce_max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#endif
  float lanes[W];
  memcpy(lanes, &v, sizeof(v));
  for (int step = W / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      if (lanes[i + step] > lanes[i]) lanes[i] = lanes[i + step];
    }
  }
  return lanes[0];
}

QS_INLINE int32_t reduce_add(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(bit_cast<__m512i>(v));
#elif defined(__aarch64__)
  return vaddvq_s32(v);
#endif
  int32_t total = 0;
  for (int lane = 0; lane < W; ++lane) total += v[lane];
  return total;
}

QS_INLINE int32_t reduce_max(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bit_cast<__m512i>(v));
#elif defined(__aarch64__)
  return vmaxvq_s32(v);
#endif
  int32_t most = v[0];
  for (int lane = 1; lane < W; ++lane) most = v[lane] > most ? v[lane] : most;
  return most;
}

// float16 <-> float32 for levels without instructions for it.
QS_INLINE vf half_bits_to_float(vu h) {
  // Rescaling by 2^112 moves the exponent and makes denormals exact; inf and NaN are patched.
  const vu magnitude = h & 0x7fffu;
  vf value = bit_cast<vf>(magnitude << 13) * 0x1p112f;
  const vu special = bit_cast<vu>(value) | 0x7f800000u;
  const vu bits = (magnitude >= 0x7c00u) ? special : bit_cast<vu>(value);
  return bit_cast<vf>(bits | ((h & 0x8000u) << 16));
}

QS_INLINE vu float_to_half_bits(vf x) {
  const vu bits = bit_cast<vu>(x);
  const vu sign = (bits >> 16) & 0x8000u;
  const vu magnitude = bits & 0x7fffffffu;
  // Below 2^-14: adding 0.5 lines the halves' denormal unit up with the last bit of a float.
  const vu small = bit_cast<vu>(bit_cast<vf>(magnitude) + 0.5f) - 0x3f000000u;
  // Normal: rebias the exponent (15 - 127) and round to nearest even.
  const vu normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  vu half = (magnitude < 0x38800000u) ? small : normal;
  half = (magnitude >= 0x477ff000u) ? set1u(0x7c00u) : half;
  half = (magnitude > 0x7f800000u) ? set1u(0x7e00u) : half;
  return half | sign;
}

QS_INLINE vf bf16_bits_to_float(vu h) { return bit_cast<vf>(h << 16); }

QS_INLINE vu float_to_bf16_bits(vf x) {
  const vu bits = bit_cast<vu>(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu quiet_nan = (bits >> 16) | 0x40u;
  return ((bits & 0x7fffffffu) > 0x7f800000u) ? quiet_nan : rounded;
}

// By instructions where compilers convert in halves (GCC 12), or lane by lane (`load` of int8).
QS_INLINE vu load_u16(const void* p) {
#if defined(__AVX512F__)
  return bit_cast<vu>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<vu>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#endif
  vh h;
  memcpy(&h, p, sizeof(h));
  return __builtin_convertvector(h, vu);
}
QS_INLINE void store_u16(void* p, vu v) {
  const vh h = __builtin_convertvector(v, vh);
  memcpy(p, &h, sizeof(h));
}

QS_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof(v));
  return v;
}
QS_INLINE vf load(const bf16* p) { return bf16_bits_to_float(load_u16(p)); }
QS_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(p)));
#else
  return half_bits_to_float(load_u16(p));
#endif
}

QS_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof(v)); }
QS_INLINE void store(bf16* p, vf v) { store_u16(p, float_to_bf16_bits(v)); }
QS_INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
#elif defined(__aarch64__)
  vst1_f16(reinterpret_cast<float16_t*>(p), vcvt_f16_f32(v));
#else
  store_u16(p, float_to_half_bits(v));
#endif
}

// Quants of quantised keys and values.
QS_INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
  vb quants;
  memcpy(&quants, p, sizeof(quants));
  return __builtin_convertvector(__builtin_convertvector(quants, vi), vf);
}

// The first n < W elements; the other lanes are zero, and nothing beyond is touched.
template <typename T>
QS_INLINE vf load_n(const T* p, int64_t n) {
  T lanes[W] = {};
  memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
template <typename T>
QS_INLINE void store_n(T* p, vf v, int64_t n) {
  T lanes[W];
  store(lanes, v);
  memcpy(p, lanes, n * sizeof(T));
}

template <typename T>
QS_INLINE vf load_up_to(const T* p, int64_t n) {
  return n >= W ? load(p) : load_n(p, n);
}
template <typename T>
QS_INLINE void store_up_to(T* p, vf v, int64_t n) {
  if (n >= W) {
    store(p, v);
  } else {
    store_n(p, v, n);
  }
}

// Calls fn with a value of the element type that `dtype` names.
template <typename Fn>
QS_INLINE void with_dtype(int dtype, const Fn& fn) {
  if (dtype == 0) {
    fn(float{});
  } else if (dtype == 1) {
    fn(bf16{});
  } else {
    fn(f16{});
  }
}

// Two quants of 4 bits (kv_rows.h).
struct quants4 {
  uint8_t bits;
};

// A bfloat16 of a cache in pairs (kv_pairs.h).
struct bf16_pairs {
  uint16_t bits;
};

// The same for what a KV cache may hold.
template <typename Fn>
QS_INLINE void with_kv_dtype(int dtype, const Fn& fn) {
  if (dtype == 3) {
    fn(int8_t{});
  } else if (dtype == 4) {
    fn(quants4{});
  } else if (dtype == 5) {
    fn(bf16_pairs{});
  } else {
    with_dtype(dtype, fn);
  }
}

}  // namespace qs::QS_LEVEL
