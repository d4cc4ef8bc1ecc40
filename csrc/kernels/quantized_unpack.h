// Parts of a weight as products of many rows read them (`unpacked_form`): a byte for each quant that
// had 6 bits or levels, or 4 bits with a sub-block scale, and the scales of super-blocks multiplied.
//
// Those with sub-block scales become m * (quant - 8) + 128, which is from 8 to 248. Two quants of a pair
// of bytes need one multiplication of 16 bits: quant * m, borrows between the bytes included, plus
// 257 * (128 - 8 m) has the two results in its two bytes.
#pragma once

#include "kernels/quantized_dot.h"

namespace qs::QS_LEVEL {

typedef uint16_t vquant_pairs __attribute__((vector_size(4 * W)));

// The sub-block scales of W outputs for 16 inputs, a pair of bytes each, twice a lane.
struct Unpacking {
  vquant_pairs factor, start;

  template <int Step>
  QS_INLINE vquants unpack(vquants both) const {
    return bit_cast<vquants>(bit_cast<vquant_pairs>(step_quants<4, Step>(both)) * factor + start);
  }
};

// W bytes, a lane each. GCC 12 splits a conversion of vectors into lanes.
QS_INLINE vu widened_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return bit_cast<vu>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<vu>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef uint8_t bytes __attribute__((vector_size(W)));
  bytes held;
  memcpy(&held, p, sizeof(held));
  return __builtin_convertvector(held, vu);
#endif
}

// A piece's sub-block scales of W outputs, twice a lane.
QS_INLINE vu piece_sub_scales(const uint8_t* p) {
  const vu words = widened_bytes(p);
  return words | words << 16;
}

// Of the first 16 inputs of a piece (Half 0), or of the others.
template <int Half>
QS_INLINE Unpacking unpacking(vu sub_scales) {
  const vquant_pairs held =
      bit_cast<vquant_pairs>((Half == 0 ? sub_scales : sub_scales >> 4) & 0x000f000fu);
  const vquant_pairs factor = held + held - static_cast<uint16_t>(kLargestSubScale);
  return {factor, 0x8080 - factor * 0x0808};
}

// The sub-block scales themselves, of W outputs for half a piece, as `SubBlockSum` multiplies them.
template <int Half>
QS_INLINE vi sub_block_factor(const uint8_t* p) {
  if constexpr (SubBlockSum::kPairs) {
    return bit_cast<vi>(unpacking<Half>(piece_sub_scales(p)).factor);
  } else {
    const vi words = bit_cast<vi>(widened_bytes(p));
    const vi found = Half == 0 ? words & 15 : words >> 4;
    return narrow(found + found - kLargestSubScale);
  }
}

// A group of a panel, as an 8-bit weight holds it; its scales go along.
QS_INLINE void unpack_group(const PackedQuantized& packed, const uint8_t* from, uint8_t* to) {
  for (int64_t piece = 0; piece < packed.group_size / kPieceInputs; ++piece) {
    const uint8_t* quants = from + kQuantizedPanel;
    for (int64_t output = 0; output < kQuantizedPanel; output += W) {
      const vu sub_scales = piece_sub_scales(from + output);
      const Unpacking halves[2] = {unpacking<0>(sub_scales), unpacking<1>(sub_scales)};
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const vquants both = load_quants(quants + pair * kStepBytes + output * kStepInputs);
        const vquants low = halves[pair / 2].template unpack<0>(both) ^ Dot<8>::kFlip;
        const vquants high = halves[pair / 2].template unpack<1>(both) ^ Dot<8>::kFlip;
        uint8_t* at = to + 2 * pair * kStepBytes + output * kStepInputs;
        memcpy(at, &low, sizeof(low));
        memcpy(at + kStepBytes, &high, sizeof(high));
      }
    }
    from += kPieceBytes;
    to += kPieceInputs * kQuantizedPanel;
  }
  memcpy(to, from, packed.scale_bytes() * kQuantizedPanel);
}

template <int HeldBits, int Step>
QS_INLINE void unpack_step(const uint8_t* from, const auto& levels, uint8_t* to) {
  const vquants quants = levels.of(held_step<HeldBits, Step>(from));
  memcpy(to + Step * kStepBytes, &quants, sizeof(quants));
}

template <int HeldBits>
QS_INLINE void unpack_steps(const uint8_t* from, int64_t num_inputs, const auto& levels,
                            uint8_t* to) {
  for (int64_t k = 0; k < num_inputs; k += packed_inputs(HeldBits)) {
    for (int64_t i = 0; i < kStepBytes; i += sizeof(vquants)) {
      unpack_step<HeldBits, 0>(from + i, levels, to + i);
      if constexpr (HeldBits != 8) unpack_step<HeldBits, 1>(from + i, levels, to + i);
      if constexpr (HeldBits == 6) {
        unpack_step<HeldBits, 2>(from + i, levels, to + i);
        unpack_step<HeldBits, 3>(from + i, levels, to + i);
      }
    }
    from += packed_bytes(HeldBits);
    to += packed_inputs(HeldBits) * kQuantizedPanel;
  }
}

// Quants of a panel without sub-block scales, complete steps of them, a byte each.
QS_INLINE void unpack_quants(const PackedQuantized& packed, const uint8_t* from,
                             int64_t num_inputs, uint8_t* to) {
  static_assert(Dot<4>::kFlip == 0 && Dot<6>::kFlip == 0);
  const uint8_t flip = packed.bits == 8 ? Dot<8>::kFlip : 0;
  const Levels<false> as_held(nullptr, flip);
  if (packed.has_levels()) {
    unpack_steps<4>(from, num_inputs, Levels<true>(packed.levels, flip), to);
  } else if (packed.held_bits == 4) {
    unpack_steps<4>(from, num_inputs, as_held, to);
  } else if (packed.held_bits == 6) {
    unpack_steps<6>(from, num_inputs, as_held, to);
  } else {
    unpack_steps<8>(from, num_inputs, as_held, to);
  }
}

// A group of a block of a panel: its quants, a byte each if they have more than 4 bits, and its scales,
// those of super-blocks in f32.
QS_INLINE void widen_group(const PackedQuantized& packed, const uint8_t* block, int64_t group,
                             uint8_t* to) {
  const uint8_t* from = block + packed.group_offset(group);
  if (packed.bits == 4) {
    memcpy(to, from, packed.quant_bytes());
    to += packed.quant_bytes();
  } else {
    unpack_quants(packed, from, packed.group_size, to);
    to += packed.group_size * kQuantizedPanel;
  }
  from += packed.quant_bytes();
  if (packed.super_bytes == 0) {
    memcpy(to, from, packed.group_bytes - packed.quant_bytes());
    return;
  }
  const int8_t* scales = reinterpret_cast<const int8_t*>(from);
  const f16* super_scales = reinterpret_cast<const f16*>(block + packed.super_offset(group));
  float* unpacked = reinterpret_cast<float*>(to);
  for (int64_t i = 0; i < (packed.has_zeros ? 2 : 1) * kQuantizedPanel; i += W) {
    store(unpacked + i, group_scales(scales + i, super_scales + i));
  }
}

}  // namespace qs::QS_LEVEL
