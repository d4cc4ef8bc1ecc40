// Products of 4 inputs of a step on the level being compiled: unsigned quants of weights, signed
// ones of activations, sums of 32 bits that are exact on every level.
#pragma once

#include "kernels/quantized.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// W outputs x 4 inputs.
typedef uint8_t vquants __attribute__((vector_size(4 * W)));

QS_INLINE vquants load_quants(const uint8_t* p) {
  vquants v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// One step's quants of W outputs, out of a loaded vector: itself, or its lower or upper halves.
template <int HeldBits, int Half>
QS_INLINE vquants step_quants(vquants v) {
  if constexpr (HeldBits == 8) return v;
  const vu words = bit_cast<vu>(v);
  return bit_cast<vquants>((Half == 0 ? words : words >> 4) & 0x0f0f0f0fu);
}

// One of the steps of 6 bits whose quants of W outputs are at `p`, `kStepBytes` from one to the next.
template <int Step>
QS_INLINE vquants step_of_four(const uint8_t* p) {
  if constexpr (Step < 3) {
    return bit_cast<vquants>(bit_cast<vu>(load_quants(p + Step * kStepBytes)) & 0x3f3f3f3fu);
  } else {
    const vu low = bit_cast<vu>(load_quants(p)) >> 6;
    const vu middle = bit_cast<vu>(load_quants(p + kStepBytes)) >> 4;
    const vu high = bit_cast<vu>(load_quants(p + 2 * kStepBytes)) >> 2;
    return bit_cast<vquants>((low & 0x03030303u) | (middle & 0x0c0c0c0cu) | (high & 0x30303030u));
  }
}

// One of the steps whose quants of W outputs are in the same bytes, of which the first are at `p`.
template <int HeldBits, int Step>
QS_INLINE vquants held_step(const uint8_t* p) {
  if constexpr (HeldBits == 6) {
    return step_of_four<Step>(p);
  } else {
    return step_quants<HeldBits, Step>(load_quants(p));
  }
}

// Quants as memory has them, or looked up by their numbers among 16 levels, each with the bits of
// `flip` changed.
template <bool Looks>
struct Levels {
  uint8_t flip;

  QS_INLINE Levels(const uint8_t*, uint8_t changed) : flip(changed) {}
  QS_INLINE vquants of(vquants v) const { return v ^ flip; }
};

template <>
struct Levels<true> {
  vquants table;  // the levels, again in every 16 bytes

  QS_INLINE Levels(const uint8_t* levels, uint8_t flip) {
    uint8_t repeated[sizeof(vquants)];
    for (size_t i = 0; i < sizeof(vquants); i += kNumLevels) {
      memcpy(repeated + i, levels, kNumLevels);
    }
    table = load_quants(repeated) ^ flip;
  }
  QS_INLINE vquants of(vquants numbers) const {
#if defined(__AVX512F__)
    return bit_cast<vquants>(
        _mm512_shuffle_epi8(bit_cast<__m512i>(table), bit_cast<__m512i>(numbers)));
#elif defined(__AVX2__)
    return bit_cast<vquants>(
        _mm256_shuffle_epi8(bit_cast<__m256i>(table), bit_cast<__m256i>(numbers)));
#elif defined(__aarch64__)
    return bit_cast<vquants>(
        vqtbl1q_u8(bit_cast<uint8x16_t>(table), bit_cast<uint8x16_t>(numbers)));
#else
    vquants found;
    for (size_t i = 0; i < sizeof(vquants); ++i) found[i] = table[numbers[i]];
    return found;
#endif
  }
};

// Whether one instruction makes products of 4 inputs and adds them.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasDotProducts = true;
#else
constexpr bool kHasDotProducts = false;
#endif

// sum += quants x activations, 4 inputs a lane. With `kOffset` the quants are not shifted,
// so that 2^(bits - 1) times the activations' sum must be subtracted; otherwise the product is of
// quants less 2^(bits - 1) already. `flipped` takes quants whose bits of `kFlip` are changed: so they are
// where they are looked up or unpacked for it.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <int Bits>
struct Dot {
  using Quants = vi;
  static constexpr bool kOffset = true;
  static constexpr uint8_t kFlip = 0;
  static QS_INLINE Quants quants(vquants v) { return flipped(v); }
  static QS_INLINE Quants flipped(vquants v) { return bit_cast<vi>(v); }
  // Written as assembly because GCC 12 spills arrays of accumulators around the intrinsic.
  static QS_INLINE void add(vi& sum, Quants w, vi x) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#elif defined(QS_EMULATED)  // AVX-VNNI's operation as AVX-512 encodes it
    asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#endif
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

// Both sides are signed: quants of 8 bits count less 128, those of fewer bits fit as they are.
template <int Bits>
struct Dot {
  using Quants = int8x16_t;
  static constexpr bool kOffset = Bits != 8;
  static constexpr uint8_t kFlip = Bits != 8 ? 0 : 0x80;
  static QS_INLINE Quants quants(vquants v) { return flipped(v ^ kFlip); }
  static QS_INLINE Quants flipped(vquants v) { return bit_cast<int8x16_t>(v); }
  static QS_INLINE void add(vi& sum, Quants w, vi x) {
    sum = vdotq_s32(sum, w, bit_cast<int8x16_t>(x));
  }
};

#elif defined(__AVX2__)

#if defined(__AVX512F__)
QS_INLINE __m512i pairs_16(__m512i a, __m512i b) { return _mm512_maddubs_epi16(a, b); }
QS_INLINE __m512i pairs_32(__m512i a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
QS_INLINE __m512i magnitude(__m512i a) { return _mm512_abs_epi8(a); }
QS_INLINE __m512i with_sign_of(__m512i x, __m512i w) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
using vbytes = __m512i;
#else
QS_INLINE __m256i pairs_16(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }
QS_INLINE __m256i pairs_32(__m256i a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
QS_INLINE __m256i magnitude(__m256i a) { return _mm256_abs_epi8(a); }
QS_INLINE __m256i with_sign_of(__m256i x, __m256i w) { return _mm256_sign_epi8(x, w); }
using vbytes = __m256i;
#endif

// 2 x 63 x 127 fits the 16 bits in which vpmaddubsw saturates.
template <int Bits>
struct Dot {
  using Quants = vbytes;
  static constexpr bool kOffset = true;
  static constexpr uint8_t kFlip = 0;
  static QS_INLINE Quants quants(vquants v) { return flipped(v); }
  static QS_INLINE Quants flipped(vquants v) { return bit_cast<vbytes>(v); }
  static QS_INLINE void add(vi& sum, Quants w, vi x) {
    sum += bit_cast<vi>(pairs_32(pairs_16(w, bit_cast<vbytes>(x))));
  }
};

// 2 x 255 x 127 does not, but 2 x 128 x 127 does: magnitudes of quants - 128, signs moved over to
// the activations, which are never -128.
template <>
struct Dot<8> {
  struct Quants {
    vbytes value, magnitude;
  };
  static constexpr bool kOffset = false;
  static constexpr uint8_t kFlip = 0x80;
  static QS_INLINE Quants quants(vquants v) { return flipped(v ^ kFlip); }
  static QS_INLINE Quants flipped(vquants v) {
    const vbytes value = bit_cast<vbytes>(v);
    return {value, magnitude(value)};
  }
  static QS_INLINE void add(vi& sum, Quants w, vi x) {
    const vbytes moved = with_sign_of(bit_cast<vbytes>(x), w.value);
    sum += bit_cast<vi>(pairs_32(pairs_16(w.magnitude, moved)));
  }
};

#else

typedef int16_t vpairs __attribute__((vector_size(4 * W)));
typedef uint16_t vwords __attribute__((vector_size(4 * W)));

// Products of 16 bits, none of which overflows: 255 x 127.
template <int Bits>
struct Dot {
  using Quants = vquants;
  static constexpr bool kOffset = true;
  static constexpr uint8_t kFlip = 0;
  static QS_INLINE Quants quants(vquants v) { return flipped(v); }
  static QS_INLINE Quants flipped(vquants v) { return v; }
  static QS_INLINE vi add_pairs(vpairs products) {
    const vi both = bit_cast<vi>(products);
    return (bit_cast<vi>(bit_cast<vu>(both) << 16) >> 16) + (both >> 16);
  }
  static QS_INLINE void add(vi& sum, Quants w, vi x) {
    const vpairs inputs = bit_cast<vpairs>(x);
    const vpairs even_inputs = bit_cast<vpairs>(bit_cast<vwords>(x) << 8) >> 8;
    const vpairs even = bit_cast<vpairs>(w) & 0xff;
    const vpairs odd = bit_cast<vpairs>(bit_cast<vwords>(w) >> 8);
    sum += add_pairs(even * even_inputs) + add_pairs(odd * (inputs >> 8));
  }
};

#endif

// How memory has the quants of a tile.
template <int HeldBits, int QuantBits, bool IsUnpacked = false>
struct Held {
  static constexpr int kHeld = HeldBits;
  static constexpr int kBits = QuantBits;
  static constexpr bool kLooks = HeldBits < QuantBits;  // quants up by their numbers
  static constexpr bool kUnpacked = IsUnpacked;
};

// What the quants of a group are about: the middle quant, its zero, or 0 with a minimum.
enum Offset { kMiddle, kZeros, kMinimums };

// The scales of W outputs, or their minimums: as they are held, or bytes times those of their
// super-block. Both factors have few bits, so that their product is exact.
template <typename Scale>
QS_INLINE vf group_scales(const Scale* scales, const f16*) {
  return load(scales);
}
QS_INLINE vf group_scales(const int8_t* scales, const f16* super_scales) {
  return load(scales) * load(super_scales);
}

// sum += value x factor, where both fit 16 bits, as the sum of 16 products of 4 bits does. `narrow`
// is applied to the factor before: pairs of 16 bits are multiplied, and its upper half by a sign.
#if defined(__AVX2__)
QS_INLINE vi narrow(vi factor) { return factor & 0xffff; }
QS_INLINE void add_narrow(vi& sum, vi value, vi factor) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(value), "v"(factor));
#elif defined(__AVX512F__)
  sum += bit_cast<vi>(_mm512_madd_epi16(bit_cast<__m512i>(value), bit_cast<__m512i>(factor)));
#else
  sum += bit_cast<vi>(_mm256_madd_epi16(bit_cast<__m256i>(value), bit_cast<__m256i>(factor)));
#endif
}
#else
QS_INLINE vi narrow(vi factor) { return factor; }
QS_INLINE void add_narrow(vi& sum, vi value, vi factor) { sum += value * factor; }
#endif

// The products of 16 inputs with quants of 4 bits, added to their correction, and then times a sub-block
// scale.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
// Sums of pairs fit 16 bits, 4 x 2 x 15 x 127 + 16 x 8 x 127, so that only the scale widens them.
struct SubBlockSum {
  static constexpr bool kPairs = true;  // a scale is twice in a lane
  __m256i sum;

  QS_INLINE explicit SubBlockSum(int32_t correction)
      : sum(bit_cast<__m256i>(set1i(correction & 0xffff))) {}
  QS_INLINE void add(Dot<4>::Quants w, vi x) {
    sum = _mm256_add_epi16(sum, pairs_16(w, bit_cast<vbytes>(x)));
  }
  QS_INLINE void add_to(vi& total, vi factor) const {
    total += bit_cast<vi>(_mm256_madd_epi16(sum, bit_cast<__m256i>(factor)));
  }
};
#else
struct SubBlockSum {
  static constexpr bool kPairs = false;
  vi sum;

  QS_INLINE explicit SubBlockSum(int32_t correction) : sum(set1i(correction)) {}
  QS_INLINE void add(Dot<4>::Quants w, vi x) { Dot<4>::add(sum, w, x); }
  QS_INLINE void add_to(vi& total, vi factor) const { add_narrow(total, sum, factor); }
};
#endif

// Added to the products of quants, in place of the correction, where weights have minimums: those
// count quants from 0 on.
template <int Bits>
QS_INLINE int32_t minimum_start(int32_t correction) {
  return Dot<Bits>::kOffset ? 0 : -correction;
}

// The quants' sum of activations out of its correction, negative; exact.
QS_INLINE vf negative_sum(int bits, int32_t correction) {
  return __builtin_convertvector(set1i(correction), vf) * set1(1.0f / (1 << (bits - 1)));
}

}  // namespace qs::QS_LEVEL
