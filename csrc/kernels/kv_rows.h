// The layout of a head of a KV cache, and how it is read.
//
//   floats    D elements
//   int8_t    D quants, then their scale in float32
//   quants4   for each 32 elements: scale and minimum in bfloat16, then 16 bytes of two quants each,
//             the first in the low half; the last group has as many bytes as it needs, D is even.
//             An element is scale * quant + minimum, computed in float32, rounded to bfloat16.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

constexpr int64_t kQuantGroup = 32;       // elements of quants4 that share a scale
constexpr int64_t kGroupScaleBytes = 4;   // its scale and minimum
constexpr int64_t kQuantGroupBytes = kGroupScaleBytes + kQuantGroup / 2;

template <typename KV>
constexpr int64_t kv_head_bytes(int64_t head_size) {
  return head_size * static_cast<int64_t>(sizeof(KV));
}
template <>
constexpr int64_t kv_head_bytes<int8_t>(int64_t head_size) {
  return head_size + static_cast<int64_t>(sizeof(float));
}
template <>
constexpr int64_t kv_head_bytes<quants4>(int64_t head_size) {
  return div_up(head_size, kQuantGroup) * kGroupScaleBytes + div_up(head_size, 2);
}

// A head of a slot; null: none. `load` gives elements d ... d + W of which n exist, the others 0;
// d is a multiple of W, and of 2 * W for `load_pairs`.
template <typename KV>
struct HeadRow {
  const char* at;

  QS_INLINE vf load(int64_t d, int64_t n) const {
    return load_up_to(reinterpret_cast<const KV*>(at) + d, n);
  }
};

struct GroupScale {
  vf scale, least;

  explicit QS_INLINE GroupScale(const char* group) {
    uint32_t both;
    memcpy(&both, group, sizeof(both));
    scale = set1(bit_cast<float>(both << 16));
    least = set1(bit_cast<float>(both & 0xffff0000u));
  }
};

// W quants of 4 bits, of which the first n exist.
QS_INLINE vu load_quants(const char* p, int64_t n) {
  uint64_t bytes = 0;
  if (n >= W) {
    memcpy(&bytes, p, W / 2);
  } else {
    memcpy(&bytes, p, div_up(n, 2));
  }
#if defined(__AVX512F__)
  const __m512i from = _mm512_castsi128_si512(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
  const __m512i word_of_lane = bit_cast<__m512i>(lane_indices() >> 3);
  const vu words = bit_cast<vu>(_mm512_permutexvar_epi32(word_of_lane, from));
#else
  const vu words = set1u(static_cast<uint32_t>(bytes));
#endif
  return (words >> bit_cast<vu>((lane_indices() & 7) * 4)) & 15u;
}

template <>
struct HeadRow<quants4> {
  const char* at;

  QS_INLINE const char* group_of(int64_t d) const { return at + d / kQuantGroup * kQuantGroupBytes; }

  QS_INLINE vf load(int64_t d, int64_t n) const {
    const char* group = group_of(d);
    const GroupScale of(group);
    const vu quants = load_quants(group + kGroupScaleBytes + d % kQuantGroup / 2, n);
    const vf exact = __builtin_convertvector(bit_cast<vi>(quants), vf) * of.scale + of.least;
    // to bfloat16; a NaN of a group stays one, as its low half is zero
    const vu bits = bit_cast<vu>(exact);
    const vu near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    if (n >= W) return bit_cast<vf>(near);
    return lane_indices() < static_cast<int32_t>(n) ? bit_cast<vf>(near) : vf{};
  }
};

#if defined(__AVX512BF16__)

QS_INLINE __mmask32 first_lanes(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}

// 32 elements from d on as bfloat16, of which n exist; the others are 0.
QS_INLINE __m512i load_pairs(HeadRow<bf16> row, int64_t d, int64_t n) {
  return _mm512_maskz_loadu_epi16(first_lanes(n), row.at + d * sizeof(bf16));
}
QS_INLINE __m512i load_pairs(HeadRow<int8_t> row, int64_t d, int64_t n) {  // exact: 8 bits
  const __m256i quants = _mm256_maskz_loadu_epi8(first_lanes(n), row.at + d);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(quants)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(quants, 1)));
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// The 16 values that an element of the group may have are a table in a register.
QS_INLINE __m512i load_pairs(HeadRow<quants4> row, int64_t d, int64_t n) {
  static_assert(kQuantGroup == 2 * W);
  const char* group = row.group_of(d);
  const GroupScale of(group);
  const vf values = __builtin_convertvector(lane_indices(), vf) * of.scale + of.least;
  const __m512i table = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(values, values));
  const char* quants = group + kGroupScaleBytes;
  const __m128i bytes =
      n >= 32 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants))
              : _mm_maskz_loadu_epi8(static_cast<__mmask16>(first_lanes(div_up(n, 2))), quants);
  // A byte to both halves of a word, shifted in the upper one. An index has 5 bits, and the table
  // is there twice, so the bit above a quant has no effect.
  const __m512i words = _mm512_cvtepu8_epi32(bytes);
  const __m512i indices = _mm512_or_si512(words, _mm512_slli_epi32(words, 12));
  return _mm512_maskz_permutexvar_epi16(first_lanes(n), indices, table);
}

#endif

}  // namespace qs::QS_LEVEL
